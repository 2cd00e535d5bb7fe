"""Queues in a signal handler that interrupts a wait for one: refused at once, and no item is lost or comes twice."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

from tests.support.bus import DEADLINE_S
from tests.support.queue_members import Member
from unified.errors import UsageError


def test_signal_handler_in_the_middle_of_a_get_may_put_async_but_not_wait(owner: Member, consumer: Member) -> None:
    owner.queue(is_master=True)
    queue = consumer.queue()
    refused: list[str] = []

    def try_to(work: Callable[[], Any]) -> None:
        try:
            work()
        except UsageError as error:
            refused.append(str(error))

    def handle(*_: object) -> None:
        try_to(lambda: queue.get(timeout=DEADLINE_S))
        try_to(lambda: queue.put("put", timeout=DEADLINE_S))
        queue.put_async("put_async")

    before = signal.signal(signal.SIGUSR1, handle)
    queue.put("first")
    assert queue.get(timeout=DEADLINE_S) == ["first"]
    timer = threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident or 0, signal.SIGUSR1))
    try:
        timer.start()
        got = []
        while "put_async" not in got:
            got += queue.get(timeout=DEADLINE_S)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert got in (["put", "put_async"], ["put_async"]), "a refused put may be in"
    assert 1 <= len(refused) <= 2, "an answer that has come already is not waited for"
    assert all("a signal handler" in each for each in refused)
    queue.put("last")
    assert queue.get(timeout=DEADLINE_S) == ["last"]
