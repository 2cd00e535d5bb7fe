"""Calls of a signal handler, at each place at which Python runs one: they work, or are refused at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

import unified
from tests.support.bus import DEADLINE_S, World, call
from tests.support.interrupts import Interrupter
from unified.errors import RpcError, UsageError
from unified.threads import start_thread

_LARGE = bytes(1 << 20)
T = TypeVar("T")


def aside(work: Callable[..., T], *args: Any) -> T:
    """Call it on a thread of its own, which a test that fails can leave behind."""
    ended: Future[T] = Future()

    def run() -> None:
        try:
            ended.set_result(work(*args))
        except BaseException as error:
            ended.set_exception(error)

    start_thread("signalled", run)
    return ended.result(DEADLINE_S)


class Handling(Interrupter):
    """Runs a signal handler in place of the interrupt, on the thread that `run` is called on, as Python does."""

    def __init__(self, handle: Callable[[], object]) -> None:
        super().__init__(str(Path(unified.__file__).parent / "bus"))
        self._handle = handle

    def _interrupt(self) -> None:
        self._handle()


@pytest.mark.parametrize("waits", [False, True])
def test_call_of_a_signal_handler_at_each_point_of_a_call_and_its_wait(world: World, waits: bool) -> None:
    a, _ = world.pair({"echo": lambda x: x})
    handled: list[Any] = []
    errors: list[str] = []

    def handle() -> None:
        try:
            future = a.call("b", "echo", ("from the handler",), {})
            handled.append(future)
            if waits:
                future.result(DEADLINE_S)
        except (UsageError, RpcError) as error:
            errors.append(str(error))

    handling = Handling(handle)

    def make(number: int) -> None:
        """Make calls as a program does: alone, in a burst, large; and wait for all of them."""
        values = [number, *range(number % 3), _LARGE][: 2 + number % 4]
        futures = [a.call("b", "echo", (value,), {}) for value in values]
        assert [future.result(DEADLINE_S) for future in futures] == values

    num_vain = 0
    while num_vain < 24:  # not each call goes the same way
        num_vain = 0 if aside(handling.run, partial(make, num_vain)) else num_vain + 1
    assert len(handling.hit) > 50
    for future in handled:
        try:
            assert future.result(DEADLINE_S) == "from the handler"
        except RpcError as error:
            errors.append(str(error))
    assert all("a signal handler" in error for error in errors), set(errors)
    assert len(errors) < len(handling.hit)
    assert call(a, "echo", "still") == "still"


def test_call_of_a_signal_handler_while_its_thread_waits(world: World) -> None:
    release = threading.Event()
    a, _ = world.pair({"hold": lambda: release.wait(DEADLINE_S), "release": release.set})
    before = signal.signal(signal.SIGUSR1, lambda *_: a.call("b", "release", (), {}) and None)
    me = threading.main_thread().ident or 0
    timer = threading.Timer(0.2, signal.pthread_kill, (me, signal.SIGUSR1))
    try:
        timer.start()
        assert a.call("b", "hold", (), {}).result(DEADLINE_S)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
