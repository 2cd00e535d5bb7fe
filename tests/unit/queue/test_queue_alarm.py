"""An alarm rings, whatever went wrong before."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from unified.queue.alarm import Alarm

PATIENCE_S = 10.0


def test_it_rings_once_the_system_has_a_thread_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rung = threading.Event()
    alarm = Alarm(rung.set)
    due = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _no_thread)
        alarm.set(due)
    alarm.set(due)
    assert rung.wait(PATIENCE_S)
    alarm.close()


def test_it_goes_on_when_ringing_fails() -> None:
    num_rung, rung = 0, threading.Semaphore(0)

    def ring() -> None:
        nonlocal num_rung
        num_rung += 1
        rung.release()
        if num_rung == 1:
            sys.exit("a callback of somebody who was told")
        if num_rung == 2:
            raise ValueError("a bug")

    alarm = Alarm(ring)
    for _ in range(3):
        alarm.set(time.monotonic())
        assert rung.acquire(timeout=PATIENCE_S)
    alarm.close()


def _no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
