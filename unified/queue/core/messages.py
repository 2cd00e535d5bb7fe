"""What can happen to a queue: everything its core is ever told.

A *handle* is one `DataQueue` object in one worker. A *consumer* is one thread that takes through one handle. A *ticket*
names one question that waits for its one answer.
"""

from __future__ import annotations

from typing import Any

from unified.values import Value


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

    ticket: int
    handle: int
    number: int
    """Of this put, counted by the handle."""
    below: int
    """The handle has the answers of all its puts with lower numbers than this, or wants none any more: they need not be
    remembered, and what has not gone in of them is dropped."""
    items: list[tuple[Any, int]] | None
    """What is put, each with its size in bytes. None: the owner has them from an earlier ask."""
    wait_s: float | None = None
    """How long the answer may wait for room; None: for ever."""
    is_last: bool = False
    """When that time is over the handle gives up, and what has not gone in is dropped; else it will ask again."""


class GetAsked(Value, frozen=True, kw_only=True):
    """A consumer wants items. A second ask with the same number is the same get, and is given the same items."""

    ticket: int
    handle: int
    consumer: int
    number: int
    """Of this get, counted by the consumer."""
    received: int
    """The consumer is done with what its gets up to this number gave it. Later ones never reached it."""
    max_items: int
    wait_s: float | None = None
    """How long the answer may wait for an item; None: for ever."""


class TakeDone(Value, frozen=True, kw_only=True):
    """A consumer is done with what its get of this number gave it."""

    handle: int
    consumer: int
    number: int
    count: int | None = None
    """With the first so many of it; None: with all."""


class TakeReturned(Value, frozen=True, kw_only=True):
    """A consumer gives up its get of this number, served or not: what it got goes back."""

    handle: int
    consumer: int
    number: int
    received: int
    """As in `GetAsked`: to give back what it has seen, a consumer says the number before."""


class ConsumerEnded(Value, frozen=True, kw_only=True):
    """A consumer's thread ended in order, and will take no more."""

    handle: int
    consumer: int
    received: int
    """As in `GetAsked`."""


class LifeEnded(Value, frozen=True, kw_only=True):
    """This life of a worker is over, and every one before it."""

    worker: str
    incarnation: int


class CloseAsked(Value, frozen=True, kw_only=True):
    """Nothing more is to be put in."""


class TimePassed(Value, frozen=True, kw_only=True):
    """The earliest deadline may have come."""


Event = (
    HandleAttached
    | HandleClosed
    | PutAsked
    | GetAsked
    | TakeDone
    | TakeReturned
    | ConsumerEnded
    | LifeEnded
    | CloseAsked
    | TimePassed
)
