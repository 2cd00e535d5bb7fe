"""What a queue's core decides: answers to its handles, and what a journal has to remember."""

from __future__ import annotations

import msgspec

from unified.queue.core.outcomes import Outcome
from unified.queue.core.state import Item
from unified.values import Value


class AnswerPut(Value, frozen=True, kw_only=True):
    """End the question of a put."""

    ticket: int
    outcome: Outcome
    num_in: int
    """How many of its items have gone in."""


class AnswerGet(Value, frozen=True, kw_only=True):
    """End the question of a get; there are items only with DONE."""

    ticket: int
    outcome: Outcome
    items: list[Item] = []


class SaveHandle(Value, frozen=True, kw_only=True):
    handle: int
    worker: str
    incarnation: int


class DropHandle(Value, frozen=True, kw_only=True):
    """And all that is remembered of its puts."""

    handle: int


class SavePut(Value, frozen=True, kw_only=True):
    """How far a put has come, and how it ended; WAITING: it has not."""

    handle: int
    number: int
    num_in: int
    outcome: Outcome


class DropPuts(Value, frozen=True, kw_only=True):
    """Of one handle, those with a lower number."""

    handle: int
    below: int


class SaveItems(Value, frozen=True, kw_only=True):
    """They went in."""

    items: list[Item]


class DropItems(Value, frozen=True, kw_only=True):
    """They were acknowledged."""

    item_ids: list[int]


class SaveLease(Value, frozen=True, kw_only=True):
    """These items are with a consumer."""

    handle: int
    consumer: int
    number: int
    item_ids: list[int]
    num_done: int = 0
    """So many before these are acknowledged; only in what comes back from a journal."""


class DropLease(Value, frozen=True, kw_only=True):
    """These items are back in the queue."""

    item_ids: list[int]


class SaveClosed(Value, frozen=True, kw_only=True):
    """No more puts, for ever."""


Record = SaveHandle | DropHandle | SavePut | DropPuts | SaveItems | DropItems | SaveLease | DropLease | SaveClosed
"""For the journal of a durable queue; the cores of others return none."""
Action = AnswerPut | AnswerGet | Record


class Memory(msgspec.Struct, kw_only=True):
    """What a journal remembers of a queue whose owner died."""

    handles: list[SaveHandle] = []
    puts: list[SavePut] = []
    items: list[Item] = []
    """By id, those on lease among them."""
    leases: list[SaveLease] = []
    is_closed: bool = False
