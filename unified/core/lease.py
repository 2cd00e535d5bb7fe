"""Who is alive: a lease for each key, renewed by what is heard from it."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

K = TypeVar("K", bound=object)


class LeaseTable(Generic[K]):
    """Deadlines that are renewed far more often than they pass.

    Renewing costs one dictionary write: the heap holds one entry for each key, and is corrected only when that entry
    comes up. So `next_check` may be earlier than any real deadline; a check that finds nothing is no error.
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._deadline: dict[K, float] = {}
        self._queued: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._count = 0

    def renew(self, key: K, now: float, *, lease_s: float | None = None) -> None:
        """Believe in `key` for `lease_s` seconds more (default: the table's)."""
        deadline = now + (self.lease_s if lease_s is None else lease_s)
        self._deadline[key] = deadline
        if key not in self._queued or deadline < self._queued[key][0]:
            self._push(key, deadline)

    def drop(self, key: K) -> None:
        """Forget a key; one that has no lease is no error."""
        self._deadline.pop(key, None)
        self._queued.pop(key, None)

    def deadline(self, key: K) -> float | None:
        """When this lease runs out; None if there is none."""
        return self._deadline.get(key)

    def __contains__(self, key: K) -> bool:
        return key in self._deadline

    def __len__(self) -> int:
        return len(self._deadline)

    @property
    def next_check(self) -> float | None:
        """Before this time no lease runs out; None when there are no leases."""
        while self._heap and self._queued.get(self._heap[0][2]) != self._heap[0][:2]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def expired(self, now: float) -> list[K]:
        """Take out and return the keys whose lease has run out, earliest first."""
        keys: list[K] = []
        while (check := self.next_check) is not None and check <= now:
            _, _, key = heapq.heappop(self._heap)
            deadline = self._deadline[key]
            if deadline > now:
                self._push(key, deadline)
            else:
                self.drop(key)
                keys.append(key)
        return keys

    def _push(self, key: K, deadline: float) -> None:
        self._count += 1
        self._queued[key] = (deadline, self._count)
        heapq.heappush(self._heap, (deadline, self._count, key))
