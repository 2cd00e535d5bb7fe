"""Spinning: a thread that waits for an answer looks for it for a moment before it sleeps.

On one host an answer is often there within some tens of microseconds, and to fall asleep and be woken takes as long.
Where spinning does not pay (the other side takes long, or has no core of its own to run on) it is soon given up, and
only tried again from time to time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
SPIN_S = 0.0002
"""Several times the cost of sleeping and waking: so the answer to a call with a payload of a megabyte is seen as well.
With 40 µs such calls took a third longer, and single items through a queue twice as long."""
_PATIENCE = 3
"""Number of failures in a row that are borne."""
_MOST_LEFT_OUT = 64


class Spin:
    """Spin state of one thread, or of several in turn, that wait for one kind of thing.

    Args:
        num_cores: that this process may use, if it is not to be found out; with one, who looks keeps the other side
            from running.
    """

    def __init__(self, num_cores: int = 0) -> None:
        self._is_possible = (num_cores or len(os.sched_getaffinity(0))) > 1
        self._num_failed = 0
        self._num_to_leave_out = 0

    def is_worth_it(self) -> bool:
        """Return whether to look this time; if so, `note` is to be told what came of it."""
        if self._num_to_leave_out:
            self._num_to_leave_out -= 1
            return False
        return self._is_possible

    def note(self, is_found: bool) -> None:
        """Take in whether it came while somebody looked."""
        self._num_failed = 0 if is_found else min(self._num_failed + 1, 16)
        if self._num_failed > _PATIENCE:
            self._num_to_leave_out = min(2 ** (self._num_failed - _PATIENCE), _MOST_LEFT_OUT)

    def look(self, look: Callable[[int], list[T]]) -> list[T]:
        """Return what `look(0)` finds within `SPIN_S`; nothing, without looking, where that is not worth it."""
        if not self.is_worth_it():
            return []
        found = look(0)
        if not found:
            until = time.perf_counter() + SPIN_S
            while not found and time.perf_counter() < until:
                found = look(0)
        self.note(bool(found))
        return found
