"""`unified profile` of real workers, by the real tools: what a user gets, and what is said where there is nothing."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import Cluster, Project
from unified.api.builder import DLJobBuilder
from unified.cli.main import main
from unified.client.handle import JobHandle
from unified.testing import LocalCluster, eventually
from unified_agent.measure.profiles import find_program

pytestmark = [pytest.mark.processes, pytest.mark.slow]
needs_py_spy = pytest.mark.skipif(find_program("py-spy") is None, reason="needs py-spy, of the extra debug")
needs_memray = pytest.mark.skipif(
    find_program("memray") is None or shutil.which("gdb") is None, reason="needs memray, of the extra debug, and gdb"
)

PROGRAM = """
import time
import torch
from unified import current_worker

def busy_loop():
    total = 0
    for number in range(100_000):
        total += number * number
    return total

def allocating_function():
    return bytearray(300_000)

def train():
    kept = []
    for step in range(10_000_000):
        busy_loop()
        kept = [*kept[-20:], allocating_function()]
        torch.relu(torch.ones(8, 8) @ torch.ones(8, 8))
        current_worker().report(step=step)

def idle():
    print("ready", flush=True)
    time.sleep(600)
"""


class Profiled:
    """A job of a busy trainer and an idler."""

    def __init__(self, cluster: LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
        self.cluster = cluster
        builder = DLJobBuilder().node_num(1).device_per_node(2).device_type("CPU")
        builder.role("trainer").train("program.train").total(1)
        builder.role("idler").run("program.idle").total(1)
        self.handle: JobHandle = cluster.submit(builder.build(), "profiled")
        self._capsys = capsys
        eventually(self.is_busy, timeout=100)

    def is_busy(self) -> bool:
        steps = [worker.progress.step or 0 for worker in self.handle.status().workers if worker.progress]
        return any(step > 3 for step in steps) and "ready" in "\n".join(self.handle.logs())

    def run(self, *words: str) -> tuple[int, str, str]:
        """Return the command's exit code, and what it printed on stdout and on stderr."""
        self._capsys.readouterr()
        code = main(["profile", self.handle.job_id, *words, "--master", self.cluster.address])
        return code, *self._capsys.readouterr()

    def profile(self, *words: str, code: int = 0) -> str:
        """Return what the command printed; on stderr, if it is to fail."""
        ended, out, err = self.run(*words)
        assert ended == code
        return err if code else out

    def refusal(self, *words: str) -> str:
        """Return why there is no profile; empty if there is one."""
        code, _, err = self.run(*words)
        return err if code == 1 else ""

    def pid(self, role: str) -> int:
        return next(worker.pid for worker in self.handle.status().workers if worker.role == role)


@pytest.fixture
def profiled(
    local_cluster: Cluster,
    project: Project,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Profiled]:
    project(program=PROGRAM)
    made = Profiled(local_cluster(nodes=1, devices=2), capsys)
    monkeypatch.chdir(tmp_path)
    yield made
    made.handle.stop(force=True)


@needs_py_spy
def test_a_flame_graph_of_a_busy_worker(profiled: Profiled, tmp_path: Path) -> None:
    printed = profiled.profile("--seconds", "2")
    (file,) = tmp_path.glob("profiled*.svg")
    assert "busy_loop" in file.read_text()
    assert printed.startswith(f"{file.name}: open it")
    assert "busy_loop (program.py)" in printed.splitlines()[3], "what takes most of the time is first"

    printed = profiled.profile("trainer-0", "--seconds", "1", "-o", "of.json")
    assert json.loads(Path("of.json").read_text())["profiles"]
    assert "busy_loop (" in printed.splitlines()[3]

    status = profiled.handle.status()
    folder = Path(next(worker.log_file for worker in status.workers if worker.role == "trainer")).parent
    assert sorted(path.name for path in folder.glob("*profile*")) == ["0.profile"]
    assert all(worker.state == "RUNNING" for worker in status.workers)


@needs_py_spy
def test_a_worker_that_runs_no_python_code_has_no_profile(profiled: Profiled) -> None:
    """Timers of the worker run for a moment every few seconds: the test awaits a profile that meets none of them."""
    for file in ("idle.svg", "idle.json"):
        words = ("idler-0", "--seconds", "1", "-o", file)
        assert "ran no Python code" in eventually(lambda words=words: profiled.refusal(*words), timeout=100)  # type: ignore[misc]


def test_a_trace_of_one_step(profiled: Profiled) -> None:
    assert "perfetto" in profiled.profile("0", "--torch", "-o", "step.json.gz")
    events = json.loads(gzip.decompress(Path("step.json.gz").read_bytes()))["traceEvents"]
    names = [event.get("name") for event in events if event.get("cat") == "cpu_op"]
    assert names.count("aten::relu") == 1, "it is one step"


def gdb_error() -> str:
    """Return why gdb cannot call a function in a process, which gdb 13 cannot where the processor has AMX."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as called:
        command = ["gdb", "--batch", "-p", str(called.pid), "-ex", "call (int)getpid()"]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        called.kill()
    return "" if f"= {called.pid}" in said.stdout else said.stderr.strip().rpartition("\n")[2]


@needs_memray
def test_a_page_of_what_a_worker_allocates(profiled: Profiled) -> None:
    if why := gdb_error():
        pytest.skip(f"gdb cannot call a function in a process here: {why}")
    profiled.profile("--memory", "--seconds", "2", "-o", "memory.html")
    page = Path("memory.html").read_text()
    assert "allocating_function" in page
    assert "<script src=" not in page, "it needs no network"


def test_what_cannot_be_profiled_is_said(profiled: Profiled, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no worker 'trainer-7'" in profiled.profile("trainer-7", code=2)
    assert "*.svg or *.json" in profiled.profile("-o", "file.txt", code=2)
    assert "600 s at most" in profiled.profile("--seconds", "601", code=2)
    assert "its folder is not there" in profiled.profile("-o", "nowhere/file.svg", code=2)
    assert "reported no step within 1 s" in profiled.profile("idler-0", "--torch", "--seconds", "1", code=1)


def test_a_worker_that_ends_meanwhile(profiled: Profiled) -> None:
    threading.Timer(2.0, os.kill, (profiled.pid("idler"), signal.SIGKILL)).start()
    said = profiled.profile("idler-0", "--torch", "--seconds", "600", code=1)
    assert "it ended before a step was recorded" in said
    assert "SIGKILL" in said
