"""The agent's end of the snapshot server, where the server cannot live."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from msgspec.structs import replace

from tests.support.agent_core import FACTS
from tests.support.deadlines import missed
from unified.errors import SnapshotError
from unified.protocol.snapshots import AttachSeries, SnapshotSeries
from unified.snapshot.worker.client import SnapshotClient
from unified_agent.poll_loop import PollLoop
from unified_agent.processes import Processes
from unified_agent.snapshots import SnapshotProcess

WITHIN_S = 100.0


class Children:
    """The part of `Processes` that sees the ends of helpers, without a claim to all children of this process."""

    def __init__(self) -> None:
        self.on_end: dict[int, Callable[[int], None]] = {}
        self.num_started = 0

    def add_helper(self, pid: int, on_end: Callable[[int], None]) -> None:
        self.on_end[pid] = on_end
        self.num_started += 1

    def forget_helper(self, pid: int) -> None:
        self.on_end.pop(pid, None)

    def reap(self) -> None:
        for pid in list(self.on_end):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.on_end.pop(pid)(os.waitstatus_to_exitcode(status))


def attach(run_dir: Path, errors: list[str]) -> None:
    series = SnapshotSeries("job", "trainer", 1, 0)
    try:
        SnapshotClient(str(run_dir), AttachSeries(token="", series=series)).attach()
    except SnapshotError as error:
        errors.append(str(error))


@pytest.mark.parametrize("fault", ["dies at once", "does not start"])
def test_a_worker_that_waits_for_a_server_that_cannot_live_is_told_so(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other" / "unified").mkdir(parents=True)
    (tmp_path / "other" / "unified" / "__init__.py").write_text("raise SystemExit('a broken installation')")
    if fault == "does not start":
        monkeypatch.setattr("sys.executable", str(tmp_path / "no-python"))
    loop, children, errors = PollLoop(), Children(), list[str]()
    server = SnapshotProcess(
        loop,
        cast(Processes, children),
        replace(FACTS, run_dir=str(tmp_path)),
        {"PYTHONPATH": str(tmp_path / "other")},
        key=None,
        quota_mb=1,
        linger_s=1,
        on_event=lambda event: None,
    )
    worker = threading.Thread(target=attach, args=(tmp_path, errors))
    worker.start()
    deadline = time.monotonic() + WITHIN_S
    while worker.is_alive() and time.monotonic() < deadline:
        loop.wait(missed(0.05))
        children.reap()
    server.close()
    worker.join(WITHIN_S)
    assert "is gone" in errors[0]
    assert children.num_started == (2 if fault == "dies at once" else 0)
