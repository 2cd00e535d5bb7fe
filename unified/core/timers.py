"""A keyed table of deadlines. A core arms and cancels by key; its shell sleeps until the earliest."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=object)


def earliest(*deadlines: float | None) -> float | None:
    """Return the earliest of the deadlines that are not None; None: there is none."""
    return min((deadline for deadline in deadlines if deadline is not None), default=None)


class TimerTable(Generic[K]):
    """Deadlines by key, on the caller's clock. Arming a key again moves it; equal deadlines keep their arming order."""

    def __init__(self) -> None:
        self._deadline: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._count = 0

    def arm(self, key: K, deadline: float) -> None:
        self._count += 1
        self._deadline[key] = (deadline, self._count)
        heapq.heappush(self._heap, (deadline, self._count, key))
        if len(self._heap) > 2 * len(self._deadline) + 64:  # many were cancelled long before they were due
            self._heap = [(*when, each) for each, when in self._deadline.items()]
            heapq.heapify(self._heap)

    def cancel(self, key: K) -> None:
        """Forget a key; an unknown key is no error."""
        self._deadline.pop(key, None)

    def __iter__(self) -> Iterator[K]:
        return iter(self._deadline)

    def __contains__(self, key: K) -> bool:
        return key in self._deadline

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline, or None when nothing is armed."""
        while self._heap and self._deadline.get(self._heap[0][2]) != self._heap[0][:2]:
            heapq.heappop(self._heap)  # cancelled, or moved
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[K]:
        """Take out and return the keys whose deadline has come, earliest first."""
        keys: list[K] = []
        while (deadline := self.next_deadline) is not None and deadline <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._deadline[key]
            keys.append(key)
        return keys
