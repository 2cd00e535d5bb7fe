"""Daemon threads: start, errors, and forks; a timer, and a worker with a queue.

A thread of the runtime is a daemon, so that it keeps no process alive. It has a name, and starts at first use.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from unified.errors import UsageError

logger = logging.getLogger(__name__)
K = TypeVar("K")
CLOSE_WITHIN_S = 2.0
_LONGEST_SLEEP_S = 3600.0
_own_pid = os.getpid()
_fork_hooks: set[weakref.WeakMethod[Callable[[], object]]] = set()


def start_thread(name: str, work: Callable[..., object], *args: Any) -> threading.Thread:
    """Start a daemon thread that calls `work(*args)`; RuntimeError: the system has no more threads."""
    thread = threading.Thread(target=work, args=args, name=name, daemon=True)
    thread.start()
    return thread


def call_guarded(event: str, work: Callable[..., object], *args: Any) -> bool:
    """Call `work(*args)` on a thread that must go on: an error is logged under `event`, and False is returned.

    That includes `SystemExit`: a user's done callback may raise it, and it would end the thread silently.
    """
    try:
        work(*args)
    except BaseException:
        logger.exception("event=%s: the thread goes on", event)
        return False
    return True


def after_fork(method: Callable[[], object]) -> None:
    """Have a bound method called in every child that this process forks, as long as its object exists."""
    _fork_hooks.add(weakref.WeakMethod(method, _fork_hooks.discard))


def own_pid() -> int:
    """Return the id of this process without a system call, which takes longer than giving back shared memory."""
    return _own_pid


def _forked() -> None:
    global _own_pid
    _own_pid = os.getpid()
    for each in list(_fork_hooks):
        if (method := each()) is not None:
            call_guarded("after-fork-failed", method)


os.register_at_fork(after_in_child=_forked)


class OwnedLock(type(threading.RLock())):  # type: ignore[misc]  # the class has no public name
    """Lock that code which interrupted its holder does not wait for: a signal handler, on the same thread."""

    def check(self) -> None:
        """Raise UsageError if this thread holds the lock."""
        if self._is_owned():
            raise UsageError("a signal handler used the bus that it interrupted: set a flag, or use another thread.")


class TimerThread:
    """Timer that calls `ring` at the earliest time set since the last call. Its thread starts when a time is set.

    Args:
        ring: should be short. Its errors are logged.
        stays: True: the thread ends with `close`. False: it ends as soon as no time is set.
    """

    def __init__(self, name: str, ring: Callable[[], object], *, stays: bool = False) -> None:
        self._name = name
        self._ring = ring
        self._stays = stays
        self._is_closed = False
        self._begin()
        after_fork(self._begin)

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._at = math.inf
        self._thread: threading.Thread | None = None

    def set(self, at: float) -> None:
        """Call `ring` at this time of `time.monotonic`, unless an earlier one is set; not after `close`."""
        if at >= self._at:
            return
        with self._changed:
            if self._is_closed or at >= self._at:
                return
            if self._thread is None:
                try:
                    self._thread = start_thread(self._name, self._run)
                except RuntimeError as error:  # the caller has other work, too, and will set it again
                    logger.warning(
                        "event=timer-not-set name=%s reason=%r: the next timer tries again", self._name, str(error)
                    )
                    return
            self._at = at
            self._changed.notify()

    def clear(self) -> None:
        with self._changed:
            self._at = math.inf
            self._changed.notify()

    def close(self, timeout_s: float | None = None) -> None:
        """End the thread, and wait up to `timeout_s` for that (None: until `ring` has returned)."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _run(self) -> None:
        while self._await():
            call_guarded("timer-failed", self._ring)

    def _await(self) -> bool:
        with self._changed:
            if self._thread is not threading.current_thread():
                return False  # an interrupt hit `set` before it noted this thread: `set` will start another
            while not self._is_closed and (self._stays or self._at != math.inf):
                left_s = self._at - time.monotonic()
                if left_s <= 0:
                    self._at = math.inf
                    return True
                self._changed.wait(min(left_s, _LONGEST_SLEEP_S))
            self._thread = None
            return False


class DelayedCalls:
    """Calls of functions after a delay, one after another, on a thread that exists only while a call waits."""

    def __init__(self, name: str) -> None:
        self._numbers = itertools.count()
        self._timer = TimerThread(name, self._ring)
        self._begin()
        after_fork(self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[float, int, Callable[[], object]]] = []

    def call_after(self, delay_s: float, work: Callable[[], object]) -> None:
        """Call `work()` in `delay_s` seconds, at the earliest. `work` should be short; its errors are logged."""
        with self._lock:
            heapq.heappush(self._waiting, (time.monotonic() + delay_s, next(self._numbers), work))
            self._timer.set(self._waiting[0][0])

    def _ring(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    return
                if self._waiting[0][0] > time.monotonic():
                    self._timer.set(self._waiting[0][0])
                    return
                work = heapq.heappop(self._waiting)[2]
            call_guarded("delayed-call-failed", work)
            del work


class SerialWorker(Generic[K]):
    """A background worker thread with a FIFO queue. Finalizers, which must not take a lock, may add to the queue.

    The thread calls `work` with each key, in order, and logs its errors.
    """

    def __init__(self, name: str, work: Callable[[K], object]) -> None:
        self._name = name
        self._work = work
        self._keys: SimpleQueue[K | None] = SimpleQueue()  # finalizers may call its `put`
        self._begin()
        after_fork(self._begin)

    def _begin(self) -> None:
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, key: K) -> None:
        """Let the thread, once started, call `work(key)` after the keys put before. Safe in a finalizer."""
        self._keys.put(key)

    def start(self) -> None:
        """Start the thread, unless it runs. RuntimeError: the system has no more threads."""
        with self._starting:
            if self._thread is None:
                self._thread = start_thread(self._name, self._run)

    def close(self, timeout_s: float = CLOSE_WITHIN_S) -> None:
        """End the thread after the keys put before, and wait up to `timeout_s` for that; later keys are ignored."""
        self._keys.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (key := self._keys.get()) is not None:
            call_guarded("background-work-failed", self._work, key)
            del key  # keep no reference during the wait for the next key
