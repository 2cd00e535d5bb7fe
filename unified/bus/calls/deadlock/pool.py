"""Finds out which threads of the pool wait for calls and have not said so: `concurrent.futures.wait` and `as_completed`
know nothing of the bus. Looks only while there is work that no thread is free for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from unified.bus.calls.retry import LATER
from unified.bus.executor import HandlerPool

LOOK_S = 0.25


class Watched(Protocol):
    """An open call."""

    @property
    def watcher(self) -> int:
        """Ident of the thread that waits for it without having said so; 0: none."""


class PoolWatch:
    """Has others stand in for such threads.

    Args:
        asked: the open calls of this worker.
    """

    def __init__(self, pool: HandlerPool, asked: Callable[[], Iterable[Watched]]) -> None:
        self._pool = pool
        self._asked = asked
        self._is_looking = False

    def begin(self) -> None:
        """The pool is full."""
        if not self._is_looking:
            self._is_looking = True  # of two threads that both begin, both look: that does no harm
            LATER.call_after(LOOK_S, self._look)

    def _look(self) -> None:
        self._is_looking = False  # first: if the pool gets full from here on, it says so
        is_full = self._pool.is_full
        self._pool.presume({each.watcher for each in self._asked() if each.watcher} if is_full else ())
        if is_full:
            self.begin()
