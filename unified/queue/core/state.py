"""What a queue's state is made of."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

from unified.queue.core.outcomes import Outcome


class Item(msgspec.Struct, gc=False):
    """One item. Its id is its place in the queue: lower ones go first, and an item that comes back keeps its own."""

    item_id: int
    payload: Any
    """Opaque here."""
    nbytes: int
    put_at: float


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

    ticket: int
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

    ticket: int | None
    """None: nobody asks for it at the moment; it keeps its place."""
    handle: Handle
    number: int
    items: list[tuple[Any, int]]
    num_in: int = 0
    deadline: float | None = None
    is_last: bool = False
