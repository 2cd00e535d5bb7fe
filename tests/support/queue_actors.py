"""Producers and consumers as `DataQueue` makes them, without threads: they ask, wait, ask again, and die."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from unified.queue.core.messages import GetAsked, Outcome, PutAsked


class Worker(msgspec.Struct, eq=False):
    """One life of a worker, with one handle."""

    name: str
    incarnation: int
    handle: int


class PendingPut(msgspec.Struct):
    number: int
    items: list[str]
    request_id: int | None = None
    """None: the question or its answer was lost, so it has to be asked again."""
    was_answered: bool = False
    """With WAITING: the owner has the items."""


class Producer(msgspec.Struct, eq=False):
    """Puts one after the other, or several at once."""

    worker: Worker
    number: int = 0
    pending: dict[int, PendingPut] = {}

    def ask(self, put: PendingPut, request_id: int, wait_s: float | None, is_last: bool) -> PutAsked:
        put.request_id = request_id
        return PutAsked(
            request_id=request_id,
            handle=self.worker.handle,
            number=put.number,
            below=min(self.pending, default=self.number),
            items=None if put.was_answered else [(item, 1) for item in put.items],
            wait_s=wait_s,
            is_last=is_last,
        )


class Consumer(msgspec.Struct, eq=False):
    """A thread that takes. It is done with what it has when it asks for more."""

    worker: Worker
    consumer: int
    number: int = 0
    received: int = 0
    has: list[str] = []
    """What it received and is not done with."""
    num_done: int = 0
    """Of the same take, before these."""
    has_ended: bool = False
    """It was told that the queue is closed."""
    is_asking: bool = False
    request_id: int | None = None
    """Of the get that it waits for; None while `is_asking`: ask again."""
    unheard: list[str] = []
    """What it is done with, and the owner may not know so."""

    def ask(self, request_id: int, max_items: int, wait_s: float | None) -> GetAsked:
        if not self.is_asking:
            self.number += 1
            self.is_asking = True
        self.request_id = request_id
        return GetAsked(
            request_id=request_id,
            handle=self.worker.handle,
            consumer=self.consumer,
            number=self.number,
            received=self.received,
            max_items=max_items,
            wait_s=wait_s,
        )


class Answer(NamedTuple):
    """On its way to whoever holds the ticket."""

    request_id: int
    outcome: Outcome
    num_in: int
    items: list[str]
