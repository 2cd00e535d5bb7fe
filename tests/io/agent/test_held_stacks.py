"""An agent's reads of the stacks of workers that do not answer."""

import os
import threading

import pytest

from unified.protocol.records import JobWorkerIncarnation
from unified.protocol.stacks import WorkerStacks
from unified_agent.core.messages import ReadHeldStacks
from unified_agent.held_stacks import HeldStacks


def run_nothing(command: list[str], within_s: float, passed: list[int]) -> tuple[bytes, bytes]:
    raise AssertionError(command)


def test_an_agent_that_gets_no_thread_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)  # the system's limit would meet the other tests, too
    held, pidfd = HeldStacks(run_nothing), os.pidfd_open(os.getpid())
    worker = WorkerStacks(worker="w-0", incarnation=0, rank=0, pid=os.getpid())
    held.read(ReadHeldStacks(JobWorkerIncarnation("job-1", "w-0", 0), 1, worker, 1.0), pidfd)
    (answer,) = held.take()
    assert answer.report.workers[0].note == "its agent has no thread to read them with: can't start new thread"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(pidfd)
