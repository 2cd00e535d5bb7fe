"""Events that a queue's core is told, and the actions that it decides: answers to handles, and records for a journal.

A *handle* is one `DataQueue` object in one worker. A *consumer* is one thread that takes through one handle. A
*request id* names one question that waits for its one answer.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec

from unified.values import Value


class Outcome(IntEnum):
    """The result of a put or a get. The numbers travel and are kept in journals: they must not change."""

    DONE = 0
    """All items are in; or, here are items."""
    WAITING = 1
    """Time is over and nothing was given up: ask again. A put keeps its place."""
    FULL = 2
    """The put's time is over, and what had not gone in was dropped."""
    CLOSED = 3
    UNKNOWN = 4
    """The handle has to attach first: this owner does not know it. Or its incarnation is over."""


class Item(msgspec.Struct, gc=False):
    """One item. Its id is its place in the queue: lower ones go first, and an item that comes back keeps its own."""

    item_id: int
    payload: Any
    """The encoded item, opaque here."""
    nbytes: int
    put_at: float


class HandleAttached(Value, frozen=True, kw_only=True):
    """A handle says whose it is, before its first put or get; saying it again changes nothing."""

    handle: int
    worker: str
    incarnation: int


class HandleClosed(Value, frozen=True, kw_only=True):
    """The handle will ask nothing more, and waits for nothing."""

    handle: int


class PutAsked(Value, frozen=True, kw_only=True):
    """A handle wants to put items in. A second ask with the same number is the same put."""

    request_id: int
    handle: int
    number: int
    """The number of this put, counted by the handle."""
    below: int
    """The handle has the answers of all its puts with lower numbers, or wants none any more: they need not be
    remembered, and what has not gone in of them is dropped."""
    items: list[tuple[Any, int]] | None
    """The items, each with its size in bytes. None: the owner has them from an earlier ask."""
    wait_s: float | None = None
    """Seconds that the answer may wait for room; None: for ever."""
    is_last: bool = False
    """True: at the end of that time the handle gives up, and what has not gone in is dropped; else it will ask again.
    """


class GetAsked(Value, frozen=True, kw_only=True):
    """A consumer wants items. A second ask with the same number is the same get, and is given the same items."""

    request_id: int
    handle: int
    consumer: int
    number: int
    """The number of this get, counted by the consumer."""
    received: int
    """The consumer is done with what its gets up to this number gave it. Later ones never reached it."""
    max_items: int
    wait_s: float | None = None
    """Seconds that the answer may wait for an item; None: for ever."""


class TakeDone(Value, frozen=True, kw_only=True):
    """A consumer is done with what its get of this number gave it."""

    handle: int
    consumer: int
    number: int
    count: int | None = None
    """The number of items that are done, from the first on; None: all."""


class TakeReturned(Value, frozen=True, kw_only=True):
    """A consumer gives up its get of this number, served or not: what it got goes back."""

    handle: int
    consumer: int
    number: int
    received: int
    """The same as in `GetAsked`: to give back what it has seen, a consumer says the number before."""


class ConsumerEnded(Value, frozen=True, kw_only=True):
    """A consumer's thread ended in order, and will take no more."""

    handle: int
    consumer: int
    received: int
    """The same as in `GetAsked`."""


class IncarnationEnded(Value, frozen=True, kw_only=True):
    """An incarnation of a worker is over, and every one before it."""

    worker: str
    incarnation: int


class CloseAsked(Value, frozen=True, kw_only=True):
    """A user closes the queue: nothing more is to be put in."""


class QueueTick(Value, frozen=True, kw_only=True):
    """The earliest deadline may have come."""


Event = (
    HandleAttached
    | HandleClosed
    | PutAsked
    | GetAsked
    | TakeDone
    | TakeReturned
    | ConsumerEnded
    | IncarnationEnded
    | CloseAsked
    | QueueTick
)


class AnswerPut(Value, frozen=True, kw_only=True):
    """End the question of a put."""

    request_id: int
    outcome: Outcome
    num_in: int
    """The number of its items that have gone in."""


class AnswerGet(Value, frozen=True, kw_only=True):
    """End the question of a get; there are items only with DONE."""

    request_id: int
    outcome: Outcome
    items: list[Item] = []


class SaveHandle(Value, frozen=True, kw_only=True):
    handle: int
    worker: str
    incarnation: int


class DropHandle(Value, frozen=True, kw_only=True):
    """A handle is gone, with all that is remembered of its puts."""

    handle: int


class SavePut(Value, frozen=True, kw_only=True):
    """The progress of a put, and how it ended; WAITING: it has not."""

    handle: int
    number: int
    num_in: int
    outcome: Outcome


class DropPuts(Value, frozen=True, kw_only=True):
    """The puts of one handle with lower numbers are forgotten."""

    handle: int
    below: int


class SaveItems(Value, frozen=True, kw_only=True):
    """Items went in."""

    items: list[Item]


class DropItems(Value, frozen=True, kw_only=True):
    """Items were acknowledged."""

    item_ids: list[int]


class SaveLease(Value, frozen=True, kw_only=True):
    """Items are with a consumer."""

    handle: int
    consumer: int
    number: int
    item_ids: list[int]
    num_done: int = 0
    """The number of items before these that are acknowledged; only in what comes back from a journal."""


class DropLease(Value, frozen=True, kw_only=True):
    """Items are back in the queue."""

    item_ids: list[int]


class SaveClosed(Value, frozen=True, kw_only=True):
    """The queue is closed for ever."""


Record = SaveHandle | DropHandle | SavePut | DropPuts | SaveItems | DropItems | SaveLease | DropLease | SaveClosed
"""Records for the journal of a durable queue; the cores of others return none."""
Action = AnswerPut | AnswerGet | Record


class JournalState(msgspec.Struct, kw_only=True):
    """The state that a journal remembers of a queue whose owner died."""

    handles: list[SaveHandle] = []
    puts: list[SavePut] = []
    items: list[Item] = []
    """All items by id, those on lease among them."""
    leases: list[SaveLease] = []
    is_closed: bool = False
