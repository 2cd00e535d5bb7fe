"""State of one queue: handles, leases, waiting puts and gets, the items that wait, rates and statistics."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

import msgspec

from unified.queue.core.messages import Action, Item, Outcome, Record
from unified.values import Value

WINDOW_S = 10.0
STEP_S = 1.0
"""What happens within so long is counted as having happened together."""


class Lease(msgspec.Struct, eq=False):
    """What a consumer has taken and is not done with."""

    number: int
    """Of the get that took it."""
    items: list[Item]
    num_done: int = 0
    """So many of its first items are acknowledged, and no longer in `items`."""


class Consumer(msgspec.Struct, eq=False):
    """One thread that takes through one handle."""

    consumer: int
    handle: int
    number: int = -1
    """Of its newest get."""
    lease: Lease | None = None


class WaitingGet(msgspec.Struct, eq=False):
    """A consumer in the line for items."""

    request_id: int
    consumer: Consumer
    number: int
    max_items: int
    deadline: float | None


class Handle(msgspec.Struct, eq=False):
    """One `DataQueue` object in one life of a worker."""

    handle: int
    worker: str
    incarnation: int
    consumers: dict[int, Consumer] = {}
    below: int = 0
    """It has the answers of all its puts with lower numbers."""
    waiting_puts: OrderedDict[int, WaitingPut] = msgspec.field(default_factory=OrderedDict)
    """By number."""
    ended_puts: OrderedDict[int, tuple[Outcome, int]] = msgspec.field(default_factory=OrderedDict)
    """By number: how they ended and how many items went in, until the handle has said that it knows."""
    begun_puts: dict[int, int] = {}
    """By number, of puts that were in the line when an earlier life of the owner ended: how many items are in."""


class WaitingPut(msgspec.Struct, eq=False):
    """A put in the line for room."""

    request_id: int | None
    """None: nobody asks for it at the moment; it keeps its place."""
    handle: Handle
    number: int
    items: list[tuple[Any, int]]
    num_in: int = 0
    deadline: float | None = None
    is_last: bool = False


class ItemBuffer:
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


class Rate:
    """Things per second over about the last `WINDOW_S` seconds, the newest counting most."""

    def __init__(self, now: float) -> None:
        self._begun = now
        self._at = now
        self._weight = 0.0
        """Of all that happened before `_at`, as of then."""
        self._since = 0
        self.total = 0

    def add(self, now: float, count: int) -> None:
        if now - self._at > STEP_S:
            self._weight = self._faded(now)
            self._at, self._since = now, 0
        self._since += count
        self.total += count

    def per_second(self, now: float) -> float:
        seen = WINDOW_S * -math.expm1((self._begun - now) / WINDOW_S)
        return self._faded(now) / max(seen, STEP_S)

    def _faded(self, now: float) -> float:
        return (self._weight + self._since) * math.exp((self._at - now) / WINDOW_S)


class QueueStats(Value, frozen=True, kw_only=True):
    """A queue, at one moment. Rates are over about the last ten seconds."""

    name: str
    size: int
    """How many items it holds at most; those that are leased do not count."""
    depth: int
    """Items that wait to be taken."""
    nbytes: int
    """Of these, encoded."""
    leased: int
    """Items that a consumer has taken and is not done with."""
    num_put: int
    """Items that have gone in since the owner's life began."""
    num_taken: int
    """Items that were handed out since then, those that came back and went out again counted again."""
    puts_per_s: float
    """Items."""
    gets_per_s: float
    """Items."""
    oldest_age_s: float
    """Since the item that will be taken next was put; 0 when there is none."""
    waiting_producers: int
    """Puts that wait for room."""
    waiting_consumers: int
    """Gets that wait for an item."""
    handles: int
    """`DataQueue` objects that have used it and still may."""
    is_closed: bool
    is_durable: bool


class QueueState:
    """State that both lines work on.

    Args:
        is_durable: collect the records that a journal needs.
    """

    def __init__(self, buffer: ItemBuffer, *, is_durable: bool) -> None:
        self.buffer = buffer
        self.is_durable = is_durable
        self.is_closed = False
        self.handles: dict[int, Handle] = {}
        self.actions: list[Action] = []
        self.next_deadline: float | None = None
        """When time is to be told. It may come early, and then finds nothing to do."""

    def save(self, record: Record) -> None:
        if self.is_durable:
            self.actions.append(record)

    def deadline(self, now: float, wait_s: float | None) -> float | None:
        """A deadline so far from now, about which the shell will be told; none for who does not wait at all."""
        if wait_s is None or wait_s <= 0:
            return None
        deadline = now + wait_s
        if self.next_deadline is None or deadline < self.next_deadline:
            self.next_deadline = deadline
        return deadline

    def take_actions(self) -> list[Action]:
        actions, self.actions = self.actions, []
        return actions
