"""The queue of saves: decides which is written next, which is superseded, and when a failed one is tried again. Pure.

Saves are written one at a time, in the order of their requests. The waiting saves are bounded in number and bytes. A
new save that does not fit supersedes the oldest waiting one, or its caller waits. `now` is an argument.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Generic, Literal, TypeVar

from unified.core.backoff import Backoff
from unified.errors import InvariantError

WhenFull = Literal["newest", "wait"]
"""`newest`: a new save supersedes the oldest waiting one. `wait`: its caller waits until there is room."""

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class QueuedSave(Generic[T]):
    step: int
    nbytes: int
    item: T


@dataclass(frozen=True)
class FailedSave:
    """A save that is not tried again."""

    step: int
    num_tries: int
    error: Exception


@dataclass(kw_only=True, eq=False)
class SaveQueue(Generic[T]):
    """The queue of a `BackgroundSaver`, which locks it: not safe for threads."""

    max_waiting: int
    """Number of saves that may wait, beside the one that is being written."""
    max_waiting_bytes: int
    """Limit of the sum of their bytes; a single save of any size may wait."""
    when_full: WhenFull
    max_tries: int
    backoff: Backoff
    rng: Random | None = None
    """Spreads the tries of several ranks; None for one alone."""
    try_at: float = 0.0
    """The time at which the current save is to be tried again."""
    failures: list[FailedSave] = field(default_factory=list)
    """Failed saves that were not reported yet, in order."""
    _waiting: deque[QueuedSave[T]] = field(default_factory=deque)
    _current: QueuedSave[T] | None = None
    _num_tries: int = 0

    @property
    def waiting_bytes(self) -> int:
        return sum(save.nbytes for save in self._waiting)

    @property
    def steps(self) -> list[int]:
        """The steps of saves that are being written or wait, in order."""
        return [save.step for save in (self._current, *self._waiting) if save is not None]

    def has_room(self, nbytes: int) -> bool:
        """Return whether a save can be accepted now: with `newest` always."""
        return self.when_full == "newest" or self._fits(nbytes)

    def make_room(self, step: int, nbytes: int) -> list[QueuedSave[T]]:
        """Supersede saves before a new one is offered, so that the new one can reuse their memory.

        Returns:
            The superseded saves: the waiting one of the same step, and with `newest` the oldest until the new one fits.
        """
        superseded = [each for each in self._waiting if each.step == step]
        for each in superseded:
            self._waiting.remove(each)
        if self.when_full == "newest":
            while not self._fits(nbytes):
                superseded.append(self._waiting.popleft())
        return superseded

    def offer(self, save: QueuedSave[T]) -> list[QueuedSave[T]]:
        """Accept a save; return those that it supersedes."""
        superseded = self.make_room(save.step, save.nbytes)
        self._waiting.append(save)
        return superseded

    def next(self) -> QueuedSave[T] | None:
        """Return the save to write, which stays the current one until it `succeeded` or finally `failed`."""
        if self._current is None and self._waiting:
            self._current, self._num_tries, self.try_at = self._waiting.popleft(), 0, 0.0
        return self._current

    def succeeded(self) -> None:
        if self._current is None:
            raise InvariantError("A save succeeded that was not begun.")
        self._current = None

    def failed(self, now: float, error: Exception, *, is_final: bool = False) -> bool:
        """Note that the current save was not written.

        Args:
            now: seconds, of any clock.
            is_final: trying again is of no use.

        Returns:
            True: it is tried again, at `try_at`. False: it is among the failures.
        """
        if self._current is None:
            raise InvariantError("A save failed that was not begun.")
        self._num_tries += 1
        if is_final or self._num_tries >= self.max_tries:
            self.failures.append(FailedSave(self._current.step, self._num_tries, error))
            self._current = None
            return False
        self.try_at = now + self.backoff.delay_s(self._num_tries, self.rng)
        return True

    def take_failures(self) -> list[FailedSave]:
        """Return the failures that were not reported yet."""
        failures, self.failures = self.failures, []
        return failures

    def check(self) -> list[str]:
        """Return the invariants that are broken."""
        broken = []
        if len(self._waiting) > max(1, self.max_waiting):
            broken.append(f"{len(self._waiting)} saves wait, {self.max_waiting} may")
        if len(self._waiting) > 1 and self.waiting_bytes > self.max_waiting_bytes:
            broken.append(f"{self.waiting_bytes} bytes wait, {self.max_waiting_bytes} may")
        if len({save.step for save in self._waiting}) != len(self._waiting):
            broken.append("two saves of one step wait")
        return broken

    def _fits(self, nbytes: int) -> bool:
        if not self._waiting:
            return True
        return len(self._waiting) < self.max_waiting and self.waiting_bytes + nbytes <= self.max_waiting_bytes
