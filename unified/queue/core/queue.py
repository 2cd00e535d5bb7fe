"""The decisions of a queue: who waits, who receives which items, what comes back. No socket, no clock, no thread.

Item ids rise in the order in which items go in; items leave in the order of their ids. After each step puts or gets
may wait, not both: an item that is there goes to a waiting get.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from unified.queue.core import messages
from unified.queue.core.consumers import Consumers
from unified.queue.core.producers import Producers
from unified.queue.core.state import Consumer, Handle, ItemBuffer, Lease, QueueState, QueueStats


class QueueCore:
    """One queue. `step(now, event)` takes any event in any state and says what to do; every request is answered once.

    Args:
        size: items that may wait to be taken; leased items do not count, and returned items may exceed it.
        max_bytes: encoded bytes of waiting items; None: no limit. One item always fits.
        is_durable: return the records that a journal needs.
        memory: the state from the journal of an earlier incarnation; `put_at` of its items is on the clock of `step`.
    """

    def __init__(
        self,
        now: float,
        *,
        name: str,
        size: int,
        max_bytes: int | None = None,
        is_durable: bool = False,
        memory: messages.JournalState | None = None,
    ) -> None:
        self.name = name
        self.buffer = ItemBuffer(size, max_bytes)
        self.state = QueueState(self.buffer, is_durable=is_durable)
        self.producers = Producers(self.state, now)
        self.consumers = Consumers(self.state, now)
        self._dead: dict[str, int] = {}
        """The newest incarnation of each worker that is known to be over."""
        self._handlers: dict[type, Callable[[float, Any], None]] = {
            messages.HandleAttached: self._on_attached,
            messages.HandleClosed: self._on_handle_closed,
            messages.PutAsked: self._on_put,
            messages.GetAsked: self._on_get,
            messages.TakeDone: partial(self._on_consumer, self.consumers.done),
            messages.TakeReturned: partial(self._on_consumer, self.consumers.returned),
            messages.ConsumerEnded: partial(self._on_consumer, self.consumers.end),
            messages.IncarnationEnded: self._on_incarnation_ended,
            messages.CloseAsked: self._on_close,
            messages.QueueTick: self._on_time,
        }
        if memory is not None:
            self._restore(memory)

    def step(self, now: float, event: messages.Event) -> list[messages.Action]:
        self._handlers[type(event)](now, event)
        self._settle(now)
        actions, self.state.actions = self.state.actions, []
        return actions

    @property
    def next_deadline(self) -> float | None:
        """The time at which `QueueTick` is due. An early tick does nothing."""
        return self.state.next_deadline

    @property
    def is_finished(self) -> bool:
        """True if the queue is closed and empty, and nothing can come back."""
        return self.state.is_closed and not len(self.buffer) and not self.consumers.num_leased

    def stats(self, now: float) -> QueueStats:
        oldest = self.buffer.oldest
        return QueueStats(
            name=self.name,
            size=self.buffer.size,
            depth=len(self.buffer),
            nbytes=self.buffer.nbytes,
            leased=self.consumers.num_leased,
            num_put=self.producers.rate.total,
            num_taken=self.consumers.rate.total,
            puts_per_s=self.producers.rate.per_second(now),
            gets_per_s=self.consumers.rate.per_second(now),
            oldest_age_s=0.0 if oldest is None else max(now - oldest.put_at, 0.0),
            waiting_producers=len(self.producers.waiting),
            waiting_consumers=len(self.consumers.waiting),
            handles=len(self.state.handles),
            is_closed=self.state.is_closed,
            is_durable=self.state.is_durable,
        )

    def _on_attached(self, now: float, event: messages.HandleAttached) -> None:
        state = self.state
        if event.handle in state.handles or event.incarnation <= self._dead.get(event.worker, -1):
            return  # requests of a dead incarnation are answered with UNKNOWN
        state.handles[event.handle] = Handle(event.handle, event.worker, event.incarnation)
        state.save(messages.SaveHandle(handle=event.handle, worker=event.worker, incarnation=event.incarnation))
        self._end_incarnations(event.worker, event.incarnation - 1)

    def _on_handle_closed(self, now: float, event: messages.HandleClosed) -> None:
        handle = self.state.handles.get(event.handle)
        if handle is not None:
            self._drop(handle)

    def _on_incarnation_ended(self, now: float, event: messages.IncarnationEnded) -> None:
        self._end_incarnations(event.worker, event.incarnation)

    def _on_put(self, now: float, event: messages.PutAsked) -> None:
        put = self.producers.ask(now, event)
        self._settle(now)
        may_wait = event.wait_s is None or event.wait_s > 0
        if not may_wait and put is not None and put.request_id is not None:
            self.producers.expire(put)

    def _on_get(self, now: float, event: messages.GetAsked) -> None:
        get = self.consumers.ask(now, event)
        self._settle(now)
        may_wait = event.wait_s is None or event.wait_s > 0
        if not may_wait and get is not None and self.consumers.waiting.get(event.consumer) is get:
            self.consumers.stop_waiting(get.consumer, messages.Outcome.WAITING)

    def _on_consumer(
        self,
        handle_event: Callable[[Consumer, Any], None],
        now: float,
        event: messages.TakeDone | messages.TakeReturned | messages.ConsumerEnded,
    ) -> None:
        handle = self.state.handles.get(event.handle)
        consumer = handle.consumers.get(event.consumer) if handle is not None else None
        if consumer is not None:
            handle_event(consumer, event)

    def _on_close(self, now: float, event: messages.CloseAsked) -> None:
        if not self.state.is_closed:
            self.state.is_closed = True
            self.state.save(messages.SaveClosed())
            self.producers.end_all(messages.Outcome.CLOSED)

    def _on_time(self, now: float, event: messages.QueueTick) -> None:
        self.producers.expire_due(now)
        self.consumers.expire_due(now)
        due = [put.deadline for put in self.producers.waiting.values()]
        due += [get.deadline for get in self.consumers.waiting.values()]
        self.state.next_deadline = min((at for at in due if at is not None), default=None)

    def _settle(self, now: float) -> None:
        """Let puts in and hand items out, until neither is possible."""
        producers, consumers = self.producers, self.consumers
        while True:
            if producers.waiting:
                producers.let_in(now)
            if not (consumers.waiting and consumers.hand_out(now) and producers.waiting):
                break
        if consumers.waiting and self.is_finished:
            consumers.end_all(messages.Outcome.CLOSED)

    def _end_incarnations(self, worker: str, incarnation: int) -> None:
        if incarnation <= self._dead.get(worker, -1):
            return
        self._dead[worker] = incarnation
        for handle in list(self.state.handles.values()):
            if handle.worker == worker and handle.incarnation <= incarnation:
                self._drop(handle)

    def _drop(self, handle: Handle) -> None:
        self.producers.drop(handle)
        self.consumers.drop(handle)
        del self.state.handles[handle.handle]
        self.state.save(messages.DropHandle(handle=handle.handle))

    def _restore(self, memory: messages.JournalState) -> None:
        self.state.is_closed = memory.is_closed
        handles = self.state.handles
        for each in memory.handles:
            handles[each.handle] = Handle(each.handle, each.worker, each.incarnation)
        for put in memory.puts:
            handle = handles[put.handle]
            if put.outcome is messages.Outcome.WAITING:
                handle.begun_puts[put.number] = put.num_in
            else:
                handle.ended_puts[put.number] = (put.outcome, put.num_in)
        waiting = {item.item_id: item for item in memory.items}
        leased = []
        for saved in memory.leases:
            items = [waiting.pop(item_id) for item_id in saved.item_ids]
            consumer = Consumer(saved.consumer, saved.handle, saved.number, Lease(saved.number, items, saved.num_done))
            handles[saved.handle].consumers[saved.consumer] = consumer
            leased += items
        self.consumers.num_leased = len(leased)
        self.buffer.restore(list(waiting.values()), leased)
