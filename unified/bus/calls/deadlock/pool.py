"""Monitor of the handler pool: finds threads that wait for calls with `concurrent.futures.wait` or `as_completed`,
which know nothing of the bus. Looks only while there is work that no thread is free for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from unified.bus.calls.retry import LATER
from unified.bus.executor import HandlerPool

LOOK_S = 0.25


class WatchedCall(Protocol):
    """An open call."""

    @property
    def watcher(self) -> int:
        """Ident of the thread that waits for the call without having said so; 0: none."""


class PoolMonitor:
    """Has other threads stand in for those that wait.

    Args:
        outgoing_calls: returns the open calls of this worker.
    """

    def __init__(self, pool: HandlerPool, outgoing_calls: Callable[[], Iterable[WatchedCall]]) -> None:
        self._pool = pool
        self._outgoing_calls = outgoing_calls
        self._is_looking = False

    def begin(self) -> None:
        """Begin to look: the pool is full."""
        if not self._is_looking:
            self._is_looking = True  # of two threads that both begin, both look: that does no harm
            LATER.call_after(LOOK_S, self._look)

    def _look(self) -> None:
        self._is_looking = False  # first: if the pool gets full from here on, it says so
        is_full = self._pool.is_full
        self._pool.presume({each.watcher for each in self._outgoing_calls() if each.watcher} if is_full else ())
        if is_full:
            self.begin()
