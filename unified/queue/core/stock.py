"""The items that wait to be taken, lowest id first."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable

from unified.queue.core.state import Item


class Stock:
    """Bounded by `size` items and, unless None, `max_bytes`. What comes back may go beyond both."""

    def __init__(self, size: int, max_bytes: int | None) -> None:
        self.size = size
        self.max_bytes = max_bytes
        self.nbytes = 0
        self.next_id = 0
        self._fresh: deque[Item] = deque()
        self._returned: list[tuple[int, Item]] = []
        """A heap. All of them are older than the fresh ones: they were taken once."""

    def __len__(self) -> int:
        return len(self._fresh) + len(self._returned)

    def has_room(self, nbytes: int) -> bool:
        """For one more item. An empty queue has room for one of any size."""
        depth = len(self._fresh) + len(self._returned)
        return depth < self.size and (not depth or self.max_bytes is None or self.nbytes + nbytes <= self.max_bytes)

    def add(self, payload: object, nbytes: int, now: float) -> Item:
        """A new item, at the end."""
        item = Item(self.next_id, payload, nbytes, now)
        self.next_id += 1
        self.nbytes += nbytes
        self._fresh.append(item)
        return item

    def give_back(self, items: Iterable[Item]) -> None:
        """Items that were taken: each goes back to its own place."""
        for item in items:
            heapq.heappush(self._returned, (item.item_id, item))
            self.nbytes += item.nbytes

    def take(self, count: int) -> list[Item]:
        """The first `count` items, or as many as there are."""
        items: list[Item] = []
        while self._returned and len(items) < count:
            items.append(heapq.heappop(self._returned)[1])
        fresh = self._fresh
        while fresh and len(items) < count:
            items.append(fresh.popleft())
        for item in items:
            self.nbytes -= item.nbytes
        return items

    @property
    def oldest(self) -> Item | None:
        """The one that will be taken next."""
        return self._returned[0][1] if self._returned else self._fresh[0] if self._fresh else None

    def restore(self, waiting: list[Item], leased: list[Item]) -> None:
        """Items of an earlier life, by id: those that wait, and those that may yet come back among them."""
        newest_leased = max((item.item_id for item in leased), default=-1)
        self.give_back(item for item in waiting if item.item_id < newest_leased)
        for item in waiting:
            if item.item_id > newest_leased:
                self._fresh.append(item)
                self.nbytes += item.nbytes
        self.next_id = max((item.item_id + 1 for item in (*waiting, *leased)), default=0)

    def ids(self) -> list[int]:
        """In the order in which they will be taken; for tests."""
        return [item_id for item_id, _ in sorted(self._returned)] + [item.item_id for item in self._fresh]
