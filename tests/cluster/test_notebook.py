"""A notebook in a real Jupyter kernel: functions and classes of its cells as roles, interrupts, restarts, the end."""

import json
import os
import re
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

jupyter_client = pytest.importorskip("jupyter_client")

from unified.client.daemons import marked_processes  # noqa: E402
from unified.client.embedded import CLUSTER_VARIABLE  # noqa: E402
from unified.config import settings  # noqa: E402
from unified.testing import SHARED_MEMORY, Belongings, eventually  # noqa: E402

pytestmark = pytest.mark.processes
WITHIN_S = 100.0
EXAMPLES = Path(__file__).parents[2] / "examples"

START = "import time\nimport unified\ncluster = unified.local_cluster(devices=4)\nprint(cluster.cluster_id)"
DEFINE = '''
from dataclasses import dataclass
from unified import DLJobBuilder, current_worker, rpc

@dataclass
class Point:
    x: int

def play(config):
    """Runs until the job is stopped."""
    while not current_worker().should_stop:
        time.sleep(0.01)

@rpc
def word():
    return "first"

class Judge:
    def __init__(self, config):
        self.factor = config["factor"]

    @rpc()
    def score(self, point):
        assert isinstance(point, Point)
        return Point(point.x * self.factor)
'''
SUBMIT = """
builder = DLJobBuilder().device_type("CPU").device_per_node(4).config({"factor": 3})
builder.role("player").run(play)
builder.role("judge").run(Judge)
handle = builder.build().submit("cells", blocking=False)
"""
CALL = """
import asyncio
asyncio.get_running_loop()
scored = handle.call("judge", "score", Point(4)).result(timeout=100)
print(isinstance(scored, Point), scored.x, handle.call("player", "word").result(timeout=100))
"""
CHANGE = """
handle.stop()
handle.wait(timeout=200)

@rpc
def word():
    return "second"

class Judge:
    @rpc()
    def score(self, point):
        return Point(-point.x)
"""
WAIT = """
def told(timeout, await_end=handle._await_end):
    open("waits", "w").close()
    return await_end(timeout)

handle._await_end = told
handle.wait()
"""
STILL = "print(str(handle.status().stage), handle.call('player', 'word').result(timeout=100))"


class Ran(NamedTuple):
    """What one cell has given."""

    printed: str
    error: str
    """Name and text of its exception; empty for none."""


class Notebook:
    """A kernel, and a front end that waits for each cell."""

    def __init__(self, folder: Path) -> None:
        self.manager: Any = jupyter_client.KernelManager()
        self.manager.start_kernel(cwd=str(folder))
        self.client: Any = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=WITHIN_S)

    def run(self, code: str) -> Ran:
        """Run a cell to its end."""
        printed, errors = [], []

        def take(message: Any) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                printed.append(content["text"])
            elif message["msg_type"] == "error":
                errors.append(f"{content['ename']}: {content['evalue']}")

        self.client.execute_interactive(code, output_hook=take, timeout=WITHIN_S, allow_stdin=False)
        return Ran("".join(printed), "".join(errors))

    def interrupt_at(self, file: Path) -> None:
        """Interrupt the kernel once a cell has made this file."""
        eventually(file.exists, timeout=WITHIN_S)
        os.kill(
            self.manager.provisioner.pid, signal.SIGINT
        )  # as `interrupt_kernel`, which wants the front end's thread

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    for name in ("HOME", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "UNIFIED_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    with tempfile.TemporaryDirectory(prefix="unified-") as run_dir:  # a socket's path has to be short
        monkeypatch.setenv("UNIFIED_RUN_DIR", run_dir)
        made = Notebook(tmp_path)
        yield made
        made.close()


@pytest.mark.slow
def test_a_notebook_from_its_first_cell_to_a_killed_kernel(notebook: Notebook, tmp_path: Path) -> None:
    before = Belongings()
    first = notebook.run(START)
    assert not first.error, first
    assert [notebook.run(cell).error for cell in (DEFINE, SUBMIT)] == ["", ""]
    assert notebook.run(CALL).printed == "True 12 first\n"

    assert notebook.run(CHANGE).error == ""
    assert notebook.run(SUBMIT).error == ""
    assert notebook.run(CALL).printed == "True -4 second\n"

    interrupter = threading.Thread(target=notebook.interrupt_at, args=[tmp_path / "waits"])
    interrupter.start()
    interrupted = notebook.run(WAIT)
    interrupter.join()
    assert re.fullmatch(
        r"KeyboardInterrupt: job cells-2-\w{10} goes on: wait\(\) again, or stop\(\) it", interrupted.error
    )
    assert notebook.run(STILL).printed == "RUNNING second\n"

    notebook.manager.restart_kernel(now=False)
    notebook.client.wait_for_ready(timeout=WITHIN_S)
    nothing_of(first.printed.strip())
    assert "NameError" in notebook.run("handle").error

    second = notebook.run(START)
    assert not second.error, second
    notebook.close()
    nothing_of(second.printed.strip())
    eventually(lambda: not left_since(before), message=f"left: {left_since(before)}")
    assert [str(path) for path in settings.run_root().rglob("*") if path.is_socket()] == []


@pytest.mark.slow
def test_the_notebook_of_the_examples(notebook: Notebook) -> None:
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    ran = [notebook.run("".join(cell["source"])) for cell in cells if cell["cell_type"] == "code"]
    assert [each.error for each in ran] == [""] * len(ran)
    assert re.fullmatch(r"\[ELASTIC-0\] 50 error \d\.\d+\n\[ELASTIC-0\] 100 error 0\.\d+\n", ran[2].printed)
    assert "'is_good': True" in ran[3].printed


def left_since(before: Belongings) -> list[str]:
    """Processes and shared memory; threads and descriptors are those of the front end, in this process."""
    return [thing for thing in Belongings().left_since(before) if thing.startswith(("process", str(SHARED_MEMORY)))]


def nothing_of(cluster_id: str) -> None:
    """Wait until the cluster has ended, however its kernel did."""
    mark = f"{CLUSTER_VARIABLE}={cluster_id}"
    eventually(lambda: not marked_processes(mark), timeout=100, message=f"processes of {cluster_id} are left")
