"""Which save is written next, which gives way, and when a failed one is tried again. Pure: `now` is an argument.

Saves are written one at a time, in the order in which they were asked for. Those that wait are bounded in number and
bytes: when a new one would not fit, the oldest of them give way to it, or their caller waits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from random import Random
from typing import Generic, Literal, TypeVar

from unified.core.backoff import Backoff
from unified.errors import InvariantError

WhenFull = Literal["newest", "wait"]
"""`newest`: the oldest waiting save gives way. `wait`: the caller of the new one waits until there is room."""

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Save(Generic[T]):
    """One that was asked for; `item` is what it writes."""

    step: int
    nbytes: int
    item: T


@dataclass(frozen=True)
class Failure:
    """A save that is not tried again."""

    step: int
    num_tries: int
    error: Exception


class SaveQueue(Generic[T]):
    """Not safe for threads: its shell has a lock.

    Args:
        max_waiting: how many saves may wait, beside the one that is being written.
        max_waiting_bytes: their bytes in sum; a single save may wait whatever its size.
        when_full: see `WhenFull`.
        max_tries: of one save.
        backoff: between them.
        rng: spreads the tries of several ranks; None for one alone.
    """

    def __init__(
        self,
        *,
        max_waiting: int,
        max_waiting_bytes: int,
        when_full: WhenFull,
        max_tries: int,
        backoff: Backoff,
        rng: Random | None = None,
    ) -> None:
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self.when_full = when_full
        self._max_tries = max_tries
        self._backoff = backoff
        self._rng = rng
        self._waiting: deque[Save[T]] = deque()
        self._current: Save[T] | None = None
        self._num_tries = 0
        self._failures: list[Failure] = []
        self.try_at = 0.0
        """When the current save is to be tried again."""

    @property
    def is_idle(self) -> bool:
        """Nothing is being written and nothing waits."""
        return self._current is None and not self._waiting

    @property
    def failures(self) -> list[Failure]:
        """That nobody was told of yet, in order."""
        return list(self._failures)

    @property
    def waiting_bytes(self) -> int:
        return sum(save.nbytes for save in self._waiting)

    @property
    def steps(self) -> list[int]:
        """Being written and waiting, in order."""
        return [save.step for save in (self._current, *self._waiting) if save is not None]

    def has_room(self, nbytes: int) -> bool:
        """Whether a save can be accepted now: with `newest` always."""
        return self.when_full == "newest" or self._fits(nbytes)

    def make_room(self, step: int, nbytes: int) -> list[Save[T]]:
        """Before a save is offered, so that what it needs can be taken from those that give way to it.

        Returns:
            Those that gave way: the waiting one of the same step, and with `newest` the oldest until the new one fits.
        """
        given_way = [each for each in self._waiting if each.step == step]
        for each in given_way:
            self._waiting.remove(each)
        if self.when_full == "newest":
            while not self._fits(nbytes):
                given_way.append(self._waiting.popleft())
        return given_way

    def offer(self, save: Save[T]) -> list[Save[T]]:
        """Accept a save; those that gave way to it."""
        given_way = self.make_room(save.step, save.nbytes)
        self._waiting.append(save)
        return given_way

    def next(self) -> Save[T] | None:
        """The save to write, which stays the current one until it `succeeded` or finally `failed`."""
        if self._current is None and self._waiting:
            self._current, self._num_tries, self.try_at = self._waiting.popleft(), 0, 0.0
        return self._current

    def succeeded(self) -> None:
        """The current save was written."""
        if self._current is None:
            raise InvariantError("A save succeeded that was not begun.")
        self._current = None

    def failed(self, now: float, error: Exception, *, is_final: bool = False) -> bool:
        """The current save was not written.

        Args:
            now: seconds, of any clock.
            is_final: trying again is of no use.

        Returns:
            Whether it is tried again, at `try_at`; otherwise it is among the failures.
        """
        if self._current is None:
            raise InvariantError("A save failed that was not begun.")
        self._num_tries += 1
        if is_final or self._num_tries >= self._max_tries:
            self._failures.append(Failure(self._current.step, self._num_tries, error))
            self._current = None
            return False
        self.try_at = now + self._backoff.delay_s(self._num_tries, self._rng)
        return True

    def take_failures(self) -> list[Failure]:
        """Those that nobody was told of yet."""
        failures, self._failures = self._failures, []
        return failures

    def check(self) -> list[str]:
        """Rules that are broken; none, if all is well."""
        broken = []
        if len(self._waiting) > max(1, self._max_waiting):
            broken.append(f"{len(self._waiting)} saves wait, {self._max_waiting} may")
        if len(self._waiting) > 1 and self.waiting_bytes > self._max_waiting_bytes:
            broken.append(f"{self.waiting_bytes} bytes wait, {self._max_waiting_bytes} may")
        if len({save.step for save in self._waiting}) != len(self._waiting):
            broken.append("two saves of one step wait")
        return broken

    def _fits(self, nbytes: int) -> bool:
        if not self._waiting:
            return True
        return len(self._waiting) < self._max_waiting and self.waiting_bytes + nbytes <= self._max_waiting_bytes
