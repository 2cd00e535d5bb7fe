"""Waiting gets, in order, and the lease of each consumer.

A consumer has one lease at most. The lease ends with the consumer's next get, when the consumer is done with the items,
or when it returns them. Returned items go back to their own places, so they are taken next.
"""

from __future__ import annotations

from collections import OrderedDict

from unified.queue.core import messages
from unified.queue.core.state import Consumer, Handle, Lease, QueueState, Rate, WaitingGet


class Consumers:
    """The gets that wait, and the leases."""

    def __init__(self, state: QueueState, now: float) -> None:
        self._state = state
        self.waiting: OrderedDict[int, WaitingGet] = OrderedDict()
        """The gets that wait, by consumer."""
        self.num_leased = 0
        self.rate = Rate(now)

    def ask(self, now: float, event: messages.GetAsked) -> WaitingGet | None:
        """Return the get that waits now, to be served; None if it was answered already."""
        handle = self._state.handles.get(event.handle)
        if handle is None:
            self._answer(event.request_id, messages.Outcome.UNKNOWN)
            return None
        consumer = handle.consumers.get(event.consumer)
        if consumer is None:
            consumer = handle.consumers[event.consumer] = Consumer(event.consumer, event.handle)
        if event.number < consumer.number:  # a newer get came first: nobody waits for this answer
            self._answer(event.request_id, messages.Outcome.WAITING)
            return None
        lease = consumer.lease
        if lease is not None and lease.number == event.number:  # its first answer was lost
            rest = lease.items[event.max_items :]  # the consumer may ask for fewer this time
            lease.items = lease.items[: event.max_items]
            self._return(rest)
            self._answer(event.request_id, messages.Outcome.DONE, lease.items)
            return None
        self.stop_waiting(consumer, messages.Outcome.WAITING)
        self._end_lease(consumer, event.received)
        consumer.number = event.number
        deadline = self._state.deadline(now, event.wait_s)
        get = WaitingGet(event.request_id, consumer, event.number, event.max_items, deadline)
        self.waiting[event.consumer] = get
        return get

    def hand_out(self, now: float) -> bool:
        """Give items to waiting gets while there are items; return whether any were given.

        The waiting gets share the items, so that one large get does not leave the others idle.
        """
        buffer = self._state.buffer
        has_given = False
        while self.waiting and (depth := len(buffer)):
            share = -(-depth // len(self.waiting))
            _, get = self.waiting.popitem(last=False)
            items = buffer.take(min(get.max_items, share))
            get.consumer.lease = Lease(get.number, items)
            self.num_leased += len(items)
            self.rate.add(now, len(items))
            if self._state.is_durable:
                item_ids = [item.item_id for item in items]
                record = messages.SaveLease(
                    handle=get.consumer.handle, consumer=get.consumer.consumer, number=get.number, item_ids=item_ids
                )
                self._state.actions.append(record)
            self._answer(get.request_id, messages.Outcome.DONE, items)
            has_given = True
        return has_given

    def done(self, consumer: Consumer, event: messages.TakeDone) -> None:
        lease = consumer.lease
        if lease is None or lease.number != event.number:
            return
        count = len(lease.items) if event.count is None else max(event.count - lease.num_done, 0)
        done = lease.items[:count]
        lease.items = lease.items[count:]
        lease.num_done += len(done)
        self._acknowledge(done)
        if not lease.items:
            consumer.lease = None

    def returned(self, consumer: Consumer, event: messages.TakeReturned) -> None:
        consumer.number = max(consumer.number, event.number + 1)  # reject this get if it comes late
        get = self.waiting.get(event.consumer)
        if get is not None and get.number <= event.number:
            self.stop_waiting(consumer, messages.Outcome.WAITING)
        if consumer.lease is not None and consumer.lease.number <= event.number:
            self._end_lease(consumer, event.received)

    def end(self, consumer: Consumer, event: messages.ConsumerEnded) -> None:
        """End a consumer that takes no more, and is done with the items it received."""
        self.stop_waiting(consumer, messages.Outcome.WAITING)
        self._end_lease(consumer, event.received)
        del self._state.handles[consumer.handle].consumers[consumer.consumer]

    def drop(self, handle: Handle) -> None:
        """Drop a handle that is gone: leased items go back, waiting gets end."""
        for consumer in handle.consumers.values():
            self.stop_waiting(consumer, messages.Outcome.UNKNOWN)
            self._give_back(consumer)

    def stop_waiting(self, consumer: Consumer, outcome: messages.Outcome) -> None:
        get = self.waiting.pop(consumer.consumer, None)
        if get is not None:
            self._answer(get.request_id, outcome)

    def expire_due(self, now: float) -> None:
        for get in [each for each in self.waiting.values() if each.deadline is not None and each.deadline <= now]:
            self.stop_waiting(get.consumer, messages.Outcome.WAITING)

    def end_all(self, outcome: messages.Outcome) -> None:
        for get in list(self.waiting.values()):
            self.stop_waiting(get.consumer, outcome)

    def _end_lease(self, consumer: Consumer, received: int) -> None:
        lease = consumer.lease
        if lease is None:
            return
        if lease.number <= received:
            consumer.lease = None
            self._acknowledge(lease.items)
        else:  # the answer never arrived, so nobody has seen the items
            self._give_back(consumer)

    def _acknowledge(self, items: list[messages.Item]) -> None:
        self.num_leased -= len(items)
        if self._state.is_durable and items:
            self._state.actions.append(messages.DropItems(item_ids=[item.item_id for item in items]))

    def _give_back(self, consumer: Consumer) -> None:
        lease, consumer.lease = consumer.lease, None
        if lease is not None:
            self._return(lease.items)

    def _return(self, items: list[messages.Item]) -> None:
        """Return the items to their places in the queue."""
        self.num_leased -= len(items)
        self._state.buffer.give_back(items)
        if self._state.is_durable and items:
            self._state.actions.append(messages.DropLease(item_ids=[item.item_id for item in items]))

    def _answer(self, request_id: int, outcome: messages.Outcome, items: list[messages.Item] | None = None) -> None:
        self._state.actions.append(messages.AnswerGet(request_id=request_id, outcome=outcome, items=items or []))
