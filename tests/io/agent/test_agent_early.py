"""An agent that is started before its flags are known: its zygote, its end with its driver, its workers."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agents import ROOT, PlayedMaster, a_job, a_worker, eventually
from unified import process
from unified.protocol.records import WorkerState

pytestmark = pytest.mark.processes


@pytest.fixture
def early(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    programs = str(ROOT / "tests/support/programs")
    env = {**os.environ, "UNIFIED_RUN_DIR": str(tmp_path / "run"), "PYTHONPATH": programs}
    command = [sys.executable, "-m", "unified_agent", "--early", str(os.getpid()), "n1"]
    with (tmp_path / "log").open("wb") as log:
        agent = subprocess.Popen(
            [*command, "--worker-entry", "agent_entry:main"], env=env, stdin=subprocess.PIPE, stderr=log
        )
    with agent:
        yield agent
        agent.kill()


def marked(folder: Path) -> list[int]:
    """Living processes that the agent of a test has started."""
    return [
        found.pid
        for found in process.every_process()
        if found.is_alive
        and process.has_environment(found.pid, "UNIFIED_AGENT_NODE=n1")
        and process.has_environment(found.pid, f"UNIFIED_RUN_DIR={folder / 'run'}")
    ]


def test_its_zygote_comes_first_and_forks_its_workers_when_the_flags_have_come(
    early: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    (zygote,) = eventually(lambda: marked(tmp_path), message="there is no zygote, which needs no flags")
    master = PlayedMaster()
    flags = ["--master", master.address, "--node-id", "n1", "--state-dir", str(tmp_path / "state")]
    assert early.stdin is not None
    with early.stdin as stdin:
        stdin.write(json.dumps(flags).encode() + b"\n")
    assert master.welcome().node == "n1"
    master.desire(a_worker(0), jobs=[a_job("obey")])
    worker = master.reaches("w-0#0", WorkerState.RUNNING)
    found = process.facts(worker.pid)
    assert found is not None
    assert found.parent == zygote
    early.terminate()
    assert early.wait(100) == 0
    assert not process.is_alive(worker.pid)
    assert not process.is_alive(zygote)
    assert list((tmp_path / "run").glob("a-*")) == []
    master.hang_up()


@pytest.mark.parametrize("end", ["the driver ends", signal.SIGTERM, signal.SIGKILL])
def test_without_flags_it_ends_with_its_driver_and_leaves_no_process(
    early: subprocess.Popen[bytes], tmp_path: Path, end: str | signal.Signals
) -> None:
    (zygote,) = eventually(lambda: marked(tmp_path), message="there is no zygote")
    if isinstance(end, signal.Signals):
        early.send_signal(end)
    elif early.stdin is not None:
        early.stdin.close()
    assert early.wait(100) == (-end if isinstance(end, signal.Signals) else 0)
    eventually(lambda: not process.is_alive(zygote), message="the zygote outlived its agent")
