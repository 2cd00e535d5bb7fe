"""Events for a queue's core, and the actions that it decides: answers to handles, and records for a journal.

A *handle* is one `DataQueue` object in one worker. A *consumer* is one thread that takes through one handle. A
*request id* identifies one request, which has one answer.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec

from unified.values import Value


class Outcome(IntEnum):
    """The result of a put or a get. The numbers travel and are kept in journals: they must not change."""

    DONE = 0
    """A put: all its items are in. A get: here are items."""
    WAITING = 1
    """The wait time is over and nothing was given up: ask again. A put keeps its place."""
    FULL = 2
    """The put's time is over, and its items that were not in were dropped."""
    CLOSED = 3
    UNKNOWN = 4
    """The owner does not know the handle: it must attach first, or its incarnation is over."""


class Item(msgspec.Struct, gc=False):
    """One item. Its id is its place in the queue: lower ids go first, and a returned item keeps its id."""

    item_id: int
    payload: Any
    """The encoded item, opaque here."""
    nbytes: int
    put_at: float


class HandleAttached(Value, frozen=True, kw_only=True):
    """A handle names its worker and incarnation, before its first put or get. A second time changes nothing."""

    handle: int
    worker: str
    incarnation: int


class HandleClosed(Value, frozen=True, kw_only=True):
    """The handle sends no more requests, and waits for no answer."""

    handle: int


class PutAsked(Value, frozen=True, kw_only=True):
    """A handle wants to put items in. A second request with the same number is the same put."""

    request_id: int
    handle: int
    number: int
    """The number of this put, counted by the handle."""
    below: int
    """The handle has the answers of all its puts with lower numbers, or gave these puts up: the owner forgets them, and
    drops their items that are not in."""
    items: list[tuple[Any, int]] | None
    """The items, each with its size in bytes. None: the owner has them from an earlier request."""
    wait_s: float | None = None
    """Seconds that the answer may wait for room; None: for ever."""
    is_last: bool = False
    """True: after `wait_s` the handle gives up, and items that are not in are dropped. False: it will ask again."""


class GetAsked(Value, frozen=True, kw_only=True):
    """A consumer wants items. A second request with the same number is the same get, and receives the same items."""

    request_id: int
    handle: int
    consumer: int
    number: int
    """The number of this get, counted by the consumer."""
    received: int
    """The consumer is done with the items of its gets up to this number. Items of later gets never reached it."""
    max_items: int
    wait_s: float | None = None
    """Seconds that the answer may wait for an item; None: for ever."""


class TakeDone(Value, frozen=True, kw_only=True):
    """A consumer is done with items of its get with this number."""

    handle: int
    consumer: int
    number: int
    count: int | None = None
    """The number of items that are done, from the first on; None: all."""


class TakeReturned(Value, frozen=True, kw_only=True):
    """A consumer gives up its get with this number, answered or not: the items go back."""

    handle: int
    consumer: int
    number: int
    received: int
    """See `GetAsked.received`. A consumer that gives back items it has seen sends the number of the get before."""


class ConsumerEnded(Value, frozen=True, kw_only=True):
    """A consumer's thread ended normally, and takes no more."""

    handle: int
    consumer: int
    received: int
    """See `GetAsked.received`."""


class IncarnationEnded(Value, frozen=True, kw_only=True):
    """An incarnation of a worker is over, and all earlier ones."""

    worker: str
    incarnation: int


class CloseAsked(Value, frozen=True, kw_only=True):
    """A user closes the queue to further puts."""


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
    request_id: int
    outcome: Outcome
    num_in: int
    """The number of the put's items that have gone in."""


class AnswerGet(Value, frozen=True, kw_only=True):
    """Answer a get's request; there are items only with DONE."""

    request_id: int
    outcome: Outcome
    items: list[Item] = []


class SaveHandle(Value, frozen=True, kw_only=True):
    handle: int
    worker: str
    incarnation: int


class DropHandle(Value, frozen=True, kw_only=True):
    """A handle is gone; its puts are forgotten, too."""

    handle: int


class SavePut(Value, frozen=True, kw_only=True):
    """The progress and outcome of a put; WAITING: it has not ended."""

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
    """The number of earlier items of the get that are acknowledged; set only when read from a journal."""


class DropLease(Value, frozen=True, kw_only=True):
    """Items are back in the queue."""

    item_ids: list[int]


class SaveClosed(Value, frozen=True, kw_only=True):
    """The queue is closed, and stays closed."""


Record = SaveHandle | DropHandle | SavePut | DropPuts | SaveItems | DropItems | SaveLease | DropLease | SaveClosed
"""Records for the journal of a durable queue; cores of other queues return none."""
Action = AnswerPut | AnswerGet | Record


class JournalState(msgspec.Struct, kw_only=True):
    """The state of a queue in its journal, for the owner's next incarnation."""

    handles: list[SaveHandle] = []
    puts: list[SavePut] = []
    items: list[Item] = []
    """All items by id, leased ones included."""
    leases: list[SaveLease] = []
    is_closed: bool = False
