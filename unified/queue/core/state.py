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
"""Seconds: a rate counts all events within one step as simultaneous."""


class Lease(msgspec.Struct, eq=False):
    """The items that a consumer has taken and is not done with."""

    number: int
    """The number of the get that took it."""
    items: list[Item]
    num_done: int = 0
    """The number of first items that are acknowledged, and no longer in `items`."""


class Consumer(msgspec.Struct, eq=False):
    """One thread that takes through one handle."""

    consumer: int
    handle: int
    number: int = -1
    """The number of its newest get."""
    lease: Lease | None = None


class WaitingGet(msgspec.Struct, eq=False):
    request_id: int
    consumer: Consumer
    number: int
    max_items: int
    deadline: float | None


class Handle(msgspec.Struct, eq=False):
    """One `DataQueue` object in one incarnation of a worker."""

    handle: int
    worker: str
    incarnation: int
    consumers: dict[int, Consumer] = {}
    below: int = 0
    """The handle has the answers of all its puts with lower numbers."""
    waiting_puts: OrderedDict[int, WaitingPut] = msgspec.field(default_factory=OrderedDict)
    """Puts that wait, by number."""
    ended_puts: OrderedDict[int, tuple[Outcome, int]] = msgspec.field(default_factory=OrderedDict)
    """Ended puts, by number: the outcome and how many items went in. Kept until the handle has the answer."""
    begun_puts: dict[int, int] = {}
    """Puts that waited when an earlier incarnation of the owner ended, by number: how many of their items are in."""


class WaitingPut(msgspec.Struct, eq=False):
    request_id: int | None
    """None: no request is open at the moment; the put keeps its place."""
    handle: Handle
    number: int
    items: list[tuple[Any, int]]
    num_in: int = 0
    deadline: float | None = None
    is_last: bool = False


class ItemBuffer:
    """The items that wait to be taken, lowest id first; bounded by `size` items and, unless None, `max_bytes`.
    Returned items may exceed both."""

    def __init__(self, size: int, max_bytes: int | None) -> None:
        self.size = size
        self.max_bytes = max_bytes
        self.nbytes = 0
        self.next_id = 0
        self._fresh: deque[Item] = deque()
        self._returned: list[tuple[int, Item]] = []
        """Items that consumers returned: a heap by id, all older than the fresh ones."""

    def __len__(self) -> int:
        return len(self._fresh) + len(self._returned)

    def has_room(self, nbytes: int) -> bool:
        """Return whether there is room for one more item. An empty queue has room for an item of any size."""
        depth = len(self._fresh) + len(self._returned)
        return depth < self.size and (not depth or self.max_bytes is None or self.nbytes + nbytes <= self.max_bytes)

    def add(self, payload: object, nbytes: int, now: float) -> Item:
        item = Item(self.next_id, payload, nbytes, now)
        self.next_id += 1
        self.nbytes += nbytes
        self._fresh.append(item)
        return item

    def give_back(self, items: Iterable[Item]) -> None:
        """Give back items that were taken, each to its own place."""
        for item in items:
            heapq.heappush(self._returned, (item.item_id, item))
            self.nbytes += item.nbytes

    def take(self, count: int) -> list[Item]:
        """Take the first `count` items, or as many as there are."""
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
        """The item that will be taken next."""
        return self._returned[0][1] if self._returned else self._fresh[0] if self._fresh else None

    def restore(self, waiting: list[Item], leased: list[Item]) -> None:
        """Restore the items of an earlier incarnation, by id: waiting items, and leased items, which may still come
        back."""
        newest_leased = max((item.item_id for item in leased), default=-1)
        self.give_back(item for item in waiting if item.item_id < newest_leased)
        for item in waiting:
            if item.item_id > newest_leased:
                self._fresh.append(item)
                self.nbytes += item.nbytes
        self.next_id = max((item.item_id + 1 for item in (*waiting, *leased)), default=0)


class Rate:
    """Events per second over about the last `WINDOW_S` seconds; the newest events count most."""

    def __init__(self, now: float) -> None:
        self._begun = now
        self._at = now
        self._weight = 0.0
        """The weight, at time `_at`, of all earlier events."""
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
    """The most items that it holds; leased items do not count."""
    depth: int
    """Items that wait to be taken."""
    nbytes: int
    """Encoded bytes of the waiting items."""
    leased: int
    """Items that a consumer has taken and is not done with."""
    num_put: int
    """Items that have gone in since the owner's incarnation began."""
    num_taken: int
    """Items handed out since then. An item that came back and went out again counts twice."""
    puts_per_s: float
    """Items per second that went in."""
    gets_per_s: float
    """Items per second that were handed out."""
    oldest_age_s: float
    """Seconds since the item that will be taken next was put; 0 when there is none."""
    waiting_producers: int
    """Puts that wait for room."""
    waiting_consumers: int
    """Gets that wait for an item."""
    handles: int
    """`DataQueue` objects that have used the queue and still may."""
    is_closed: bool
    is_durable: bool


class QueueState:
    """The state that producers and consumers share: buffer, handles, and the actions of the current step."""

    def __init__(self, buffer: ItemBuffer, *, is_durable: bool) -> None:
        self.buffer = buffer
        self.is_durable = is_durable
        self.is_closed = False
        self.handles: dict[int, Handle] = {}
        self.actions: list[Action] = []
        self.next_deadline: float | None = None

    def save(self, record: Record) -> None:
        if self.is_durable:
            self.actions.append(record)

    def deadline(self, now: float, wait_s: float | None) -> float | None:
        """Return the deadline of a wait of `wait_s`, and note it in `next_deadline`. None: no wait, or no limit."""
        if wait_s is None or wait_s <= 0:
            return None
        deadline = now + wait_s
        if self.next_deadline is None or deadline < self.next_deadline:
            self.next_deadline = deadline
        return deadline
