"""Waiting puts: first come, first served. A put goes in once, even if its request comes several times.

Only the first waiting put goes in, item by item, while there is room. So the items of one put are neighbours, and a
put of more items than the queue holds goes through piece by piece.
"""

from __future__ import annotations

from collections import OrderedDict

from unified.queue.core.messages import AnswerPut, DropPuts, Outcome, PutAsked, SaveItems, SavePut
from unified.queue.core.state import Handle, QueueState, Rate, WaitingPut


class Producers:
    """Waiting puts, and ended puts that are remembered in case the handle asks again."""

    def __init__(self, state: QueueState, now: float) -> None:
        self._state = state
        self.waiting: OrderedDict[tuple[int, int], WaitingPut] = OrderedDict()
        """The puts that wait, by handle and number."""
        self.rate = Rate(now)

    def ask(self, now: float, event: PutAsked) -> WaitingPut | None:
        """Return the put that waits now, to be let in; None if it was answered already."""
        handle = self._state.handles.get(event.handle)
        if handle is None:
            self._answer(event.request_id, Outcome.UNKNOWN, 0)
            return None
        self._forget(handle, event.below)
        ended = handle.ended_puts.get(event.number)
        if ended is None and event.number < handle.below:  # late: it was answered, and the handle has the answer
            ended = (Outcome.WAITING, 0)
        if ended is not None:
            self._answer(event.request_id, *ended)
            return None
        put = handle.waiting_puts.get(event.number)
        if put is None:
            return self._enter(now, handle, event)
        if put.request_id is not None:  # the handle asks again: its first request was lost
            self._answer(put.request_id, Outcome.WAITING, put.num_in)
        self._attend(now, put, event)
        return put

    def _enter(self, now: float, handle: Handle, event: PutAsked) -> WaitingPut | None:
        if event.items is None:  # an earlier incarnation of the owner had them
            self._answer(event.request_id, Outcome.UNKNOWN, 0)
            return None
        num_in = handle.begun_puts.pop(event.number, 0)
        put = WaitingPut(event.request_id, handle, event.number, event.items, num_in)
        handle.waiting_puts[event.number] = put
        self.waiting[event.handle, event.number] = put
        if self._state.is_closed:
            self.end(put, Outcome.CLOSED)
            return None
        self._attend(now, put, event)
        return put

    def _attend(self, now: float, put: WaitingPut, event: PutAsked) -> None:
        put.request_id, put.is_last = event.request_id, event.is_last
        put.deadline = self._state.deadline(now, event.wait_s)

    def let_in(self, now: float) -> None:
        """Take in items of waiting puts while there is room."""
        buffer = self._state.buffer
        while self.waiting:
            put = next(iter(self.waiting.values()))
            items, index, total = put.items, put.num_in, len(put.items)
            new = []
            while index < total and buffer.has_room(items[index][1]):
                new.append(buffer.add(*items[index], now))
                index += 1
            put.num_in = index
            if new:
                self.rate.add(now, len(new))
                self._state.save(SaveItems(items=new))
            if index < total:
                if new:
                    self._save(put, Outcome.WAITING)
                return
            self.end(put, Outcome.DONE)

    def end(self, put: WaitingPut, outcome: Outcome) -> None:
        """End a waiting put. Its outcome is kept, in case the handle asks again."""
        handle = put.handle
        del self.waiting[handle.handle, put.number]
        del handle.waiting_puts[put.number]
        ended = handle.ended_puts
        is_late = bool(ended) and next(reversed(ended)) > put.number
        ended[put.number] = (outcome, put.num_in)
        if is_late:  # `_forget` needs them in the order of their numbers
            for number in sorted(ended):
                ended.move_to_end(number)
        self._save(put, outcome)
        if put.request_id is not None:
            self._answer(put.request_id, outcome, put.num_in)
            put.request_id = None

    def end_all(self, outcome: Outcome) -> None:
        for put in list(self.waiting.values()):
            self.end(put, outcome)

    def drop(self, handle: Handle) -> None:
        """Drop a handle that is gone. Its waiting puts were never acknowledged, so their other items are dropped."""
        for put in list(handle.waiting_puts.values()):
            self.end(put, Outcome.UNKNOWN)

    def expire(self, put: WaitingPut) -> None:
        if put.is_last:
            self.end(put, Outcome.FULL)
        elif put.request_id is not None:
            self._answer(put.request_id, Outcome.WAITING, put.num_in)
            put.request_id = put.deadline = None

    def expire_due(self, now: float) -> None:
        for put in [each for each in self.waiting.values() if each.deadline is not None and each.deadline <= now]:
            self.expire(put)

    def _forget(self, handle: Handle, below: int) -> None:
        handle.below = max(handle.below, below)
        waiting = handle.waiting_puts
        while waiting and next(iter(waiting)) < below:  # the handle gave up: no answer in time
            self.end(next(iter(waiting.values())), Outcome.FULL)
        ended = handle.ended_puts
        has_known = False
        while ended and next(iter(ended)) < below:
            ended.popitem(last=False)
            has_known = True
        if has_known:
            self._state.save(DropPuts(handle=handle.handle, below=below))

    def _answer(self, request_id: int, outcome: Outcome, num_in: int) -> None:
        self._state.actions.append(AnswerPut(request_id=request_id, outcome=outcome, num_in=num_in))

    def _save(self, put: WaitingPut, outcome: Outcome) -> None:
        self._state.save(SavePut(handle=put.handle.handle, number=put.number, num_in=put.num_in, outcome=outcome))
