"""Timers, delayed calls and background workers go on, whatever went wrong before; a fork has none of them."""

import os
import sys
import threading
import time

import pytest

from tests.support.deadlines import met
from unified.testing import eventually
from unified.threads import DelayedCalls, SerialWorker, TimerThread, after_fork

DEADLINE_S = met(100.0)


def test_timer_rings_once_the_system_has_a_thread_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rung = threading.Event()
    timer = TimerThread("timer", rung.set, stays=True)
    due = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _no_thread)
        timer.set(due)
    timer.set(due)
    assert rung.wait(DEADLINE_S)
    timer.close()


def test_interrupt_while_a_timer_starts_leaves_no_thread_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    rung = threading.Event()
    timer = TimerThread("timer", rung.set, stays=True)
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            timer.set(time.monotonic())
    eventually(lambda: not _is_running("timer"))
    timer.set(time.monotonic())
    assert rung.wait(DEADLINE_S)
    timer.close()
    assert not _is_running("timer")


def test_timer_goes_on_when_ringing_fails() -> None:
    num_rung, rung = 0, threading.Semaphore(0)

    def ring() -> None:
        nonlocal num_rung
        num_rung += 1
        rung.release()
        if num_rung == 1:
            sys.exit("a callback of somebody who was told")
        if num_rung == 2:
            raise ValueError("a bug")

    timer = TimerThread("timer", ring, stays=True)
    for _ in range(3):
        timer.set(time.monotonic())
        assert rung.acquire(timeout=DEADLINE_S)
    timer.close()
    timer.set(time.monotonic())
    assert not _is_running("timer")


def test_timer_rings_at_the_earliest_time() -> None:
    rung: list[float] = []
    timer = TimerThread("timer", lambda: rung.append(time.monotonic()))
    began = time.monotonic()
    timer.set(began + 60.0)
    timer.set(began + 0.03)
    timer.set(began + 0.06)
    eventually(lambda: bool(rung))
    assert 0.03 <= rung[0] - began < 30.0
    eventually(lambda: not _is_running("timer"))
    assert len(rung) == 1


def test_delayed_calls_keep_the_time_and_end_their_thread(caplog: pytest.LogCaptureFixture) -> None:
    later = DelayedCalls("later")
    done: list[str] = []

    def fail_after_noting() -> None:
        done.append("first")
        raise SystemExit("a done callback may")

    later.call_after(0.4, lambda: done.append("third"))
    later.call_after(0.03, lambda: done.append("second"))
    later.call_after(0.0, fail_after_noting)
    eventually(lambda: done == ["first", "second", "third"])
    assert "event=delayed-call-failed" in caplog.text
    eventually(lambda: not _is_running("later"))
    later.call_after(0.0, lambda: done.append("again"))
    eventually(lambda: done[-1] == "again")


def test_worker_is_serial_and_survives_an_error(caplog: pytest.LogCaptureFixture) -> None:
    done: list[tuple[int, str]] = []

    def work(key: int) -> None:
        if key == 1:
            raise ValueError("one")
        done.append((key, threading.current_thread().name))

    worker = SerialWorker("worker", work)
    worker.put(0)
    assert not _is_running("worker")
    worker.start()
    worker.start()
    worker.put(1)
    worker.put(2)
    eventually(lambda: len(done) == 2)
    assert done == [(0, "worker"), (2, "worker")]
    assert "event=background-work-failed" in caplog.text
    worker.close()
    worker.put(3)
    assert len(done) == 2


class _Hooked:
    def __init__(self, code: int) -> None:
        self.code = code
        after_fork(self.hook)

    def hook(self) -> None:
        os._exit(self.code)


def test_fork_hook_is_called_in_the_child_while_its_object_lives() -> None:
    incarnations, dead = _Hooked(3), _Hooked(4)
    del dead
    child = os.fork()
    if not child:
        os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == incarnations.code


def test_fork_has_timers_of_its_own() -> None:
    rung = threading.Event()
    timer = TimerThread("timer", rung.set)
    timer.set(time.monotonic() + 60.0)
    child = os.fork()
    if not child:
        timer.set(time.monotonic() + 0.01)
        os._exit(0 if rung.wait(DEADLINE_S) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    timer.close()
    assert not rung.is_set()


def _is_running(name: str) -> bool:
    return any(thread.name == name for thread in threading.enumerate())


def _no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
