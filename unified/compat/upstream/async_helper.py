"""Counterpart of ``dlrover.python.unified.util.async_helper``: coroutines in code without an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from unified.threads import start_thread

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def init_main_loop() -> None:
    """Let the running event loop run the coroutines of `as_future`.

    Raises:
        RuntimeError: no event loop is running here.
    """
    global _loop
    running = asyncio.get_running_loop()
    with _lock:
        _loop = running


def get_main_loop() -> asyncio.AbstractEventLoop:
    """Return the loop for the coroutines of `as_future`: that of `init_main_loop`, else a loop on its own thread."""
    global _loop
    with _lock:
        if _loop is None or _loop.is_closed():
            _loop = asyncio.new_event_loop()
            start_thread("compat-loop", _loop.run_forever)
        return _loop


def is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def as_future(co: Coroutine[Any, Any, T]) -> Future[T]:
    """Run a coroutine on the main loop.

    Raises:
        RuntimeError: the caller runs in an event loop, which a wait for the future would block: await instead.
    """
    if is_in_event_loop():
        co.close()
        raise RuntimeError("as_future() and wait() are for code outside an event loop: await the coroutine here.")
    return asyncio.run_coroutine_threadsafe(co, get_main_loop())


def wait(co: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the main loop, and wait for its result."""
    return as_future(co).result()


def completed_future(result: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(result)
    return future
