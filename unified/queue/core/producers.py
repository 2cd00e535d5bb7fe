"""The line of puts: first come, first served, each put once however often it is asked for.

Only the head of the line goes in, item by item as there is room; so the items of one put are neighbours, and a put of
more items than the queue holds goes through it piece by piece.
"""

from __future__ import annotations

from collections import OrderedDict

from unified.queue.core.messages import AnswerPut, DropPuts, Outcome, PutAsked, SaveItems, SavePut
from unified.queue.core.state import Handle, Rate, Turn, WaitingPut


class Producers:
    """Puts that wait, and those that are remembered in case they are asked for again."""

    def __init__(self, turn: Turn, now: float) -> None:
        self._turn = turn
        self.line: OrderedDict[tuple[int, int], WaitingPut] = OrderedDict()
        """By handle and number."""
        self.rate = Rate(now)

    def ask(self, now: float, event: PutAsked) -> WaitingPut | None:
        """The put in the line, to be let in; None if it was answered already."""
        handle = self._turn.handles.get(event.handle)
        if handle is None:
            self._answer(event.ticket, Outcome.UNKNOWN, 0)
            return None
        self._forget(handle, event.below)
        ended = handle.ended_puts.get(event.number)
        if ended is None and event.number < handle.below:  # late: it was answered, and the handle has the answer
            ended = (Outcome.WAITING, 0)
        if ended is not None:
            self._answer(event.ticket, *ended)
            return None
        put = handle.waiting_puts.get(event.number)
        if put is None:
            return self._enter(now, handle, event)
        if put.ticket is not None:  # the same handle asks again: its first question was lost on the way
            self._answer(put.ticket, Outcome.WAITING, put.num_in)
        self._attend(now, put, event)
        return put

    def _enter(self, now: float, handle: Handle, event: PutAsked) -> WaitingPut | None:
        if event.items is None:  # an earlier life of the owner had them
            self._answer(event.ticket, Outcome.UNKNOWN, 0)
            return None
        num_in = handle.begun_puts.pop(event.number, 0)
        put = WaitingPut(event.ticket, handle, event.number, event.items, num_in)
        handle.waiting_puts[event.number] = put
        self.line[event.handle, event.number] = put
        if self._turn.is_closed:
            self.end(put, Outcome.CLOSED)
            return None
        self._attend(now, put, event)
        return put

    def _attend(self, now: float, put: WaitingPut, event: PutAsked) -> None:
        put.ticket, put.is_last = event.ticket, event.is_last
        put.deadline = self._turn.deadline(now, event.wait_s)

    def let_in(self, now: float) -> None:
        """Take in what there is room for."""
        stock = self._turn.stock
        while self.line:
            put = next(iter(self.line.values()))
            items, index, total = put.items, put.num_in, len(put.items)
            new = []
            while index < total and stock.has_room(items[index][1]):
                new.append(stock.add(*items[index], now))
                index += 1
            put.num_in = index
            if new:
                self.rate.add(now, len(new))
                self._turn.save(SaveItems(items=new))
            if index < total:
                if new:
                    self._save(put, Outcome.WAITING)
                return
            self.end(put, Outcome.DONE)

    def end(self, put: WaitingPut, outcome: Outcome) -> None:
        """Out of the line. How it ended is kept for whoever asks again."""
        handle = put.handle
        del self.line[handle.handle, put.number]
        del handle.waiting_puts[put.number]
        handle.ended_puts[put.number] = (outcome, put.num_in)
        self._save(put, outcome)
        if put.ticket is not None:
            self._answer(put.ticket, outcome, put.num_in)
            put.ticket = None

    def end_all(self, outcome: Outcome) -> None:
        for put in list(self.line.values()):
            self.end(put, outcome)

    def drop(self, handle: Handle) -> None:
        """The handle is gone. Its waiting puts were never acknowledged, so what is not in need not go in."""
        for put in list(handle.waiting_puts.values()):
            self.end(put, Outcome.UNKNOWN)

    def expire(self, put: WaitingPut) -> None:
        """Its time is over."""
        if put.is_last:
            self.end(put, Outcome.FULL)
        elif put.ticket is not None:
            self._answer(put.ticket, Outcome.WAITING, put.num_in)
            put.ticket = put.deadline = None

    def expire_due(self, now: float) -> None:
        for put in [each for each in self.line.values() if each.deadline is not None and each.deadline <= now]:
            self.expire(put)

    def _forget(self, handle: Handle, below: int) -> None:
        handle.below = max(handle.below, below)
        waiting = handle.waiting_puts
        while waiting and next(iter(waiting)) < below:  # given up without an answer: the owner was not heard in time
            self.end(next(iter(waiting.values())), Outcome.FULL)
        ended = handle.ended_puts
        has_known = False
        while ended and next(iter(ended)) < below:
            ended.popitem(last=False)
            has_known = True
        if has_known:
            self._turn.save(DropPuts(handle=handle.handle, below=below))

    def _answer(self, ticket: int, outcome: Outcome, num_in: int) -> None:
        self._turn.actions.append(AnswerPut(ticket=ticket, outcome=outcome, num_in=num_in))

    def _save(self, put: WaitingPut, outcome: Outcome) -> None:
        self._turn.save(SavePut(handle=put.handle.handle, number=put.number, num_in=put.num_in, outcome=outcome))
