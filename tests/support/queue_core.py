"""A queue's core with everything around it that the network and the disk can do to it: for tests without either."""

import copy
from typing import Any

from tests.support.invariants.queue import check, ids
from unified.queue.core.messages import (
    Action,
    AnswerGet,
    AnswerPut,
    DropHandle,
    DropItems,
    DropLease,
    DropPuts,
    Event,
    GetAsked,
    HandleAttached,
    Item,
    JournalState,
    Outcome,
    PutAsked,
    Record,
    SaveClosed,
    SaveHandle,
    SaveItems,
    SaveLease,
    SavePut,
    TakeDone,
)
from unified.queue.core.queue import QueueCore


class JournalModel:
    """What a journal has to remember, kept in plain dicts."""

    def __init__(self) -> None:
        self.handles: dict[int, SaveHandle] = {}
        self.puts: dict[tuple[int, int], SavePut] = {}
        self.items: dict[int, Item] = {}
        self.leases: dict[int, tuple[SaveLease, int]] = {}
        """By item: who has it, and which of that take it is."""
        self.is_closed = False

    def write(self, record: Record) -> None:
        match record:
            case SaveHandle():
                self.handles[record.handle] = record
            case DropHandle(handle=handle):
                self.handles.pop(handle, None)
                self.puts = {key: put for key, put in self.puts.items() if key[0] != handle}
            case SavePut():
                self.puts[record.handle, record.number] = record
            case DropPuts(handle=handle, below=below):
                self.puts = {key: put for key, put in self.puts.items() if key[0] != handle or key[1] >= below}
            case SaveItems(items=items):
                self.items.update({item.item_id: copy.copy(item) for item in items})
            case SaveLease(item_ids=item_ids):
                self.leases.update({item_id: (record, i) for i, item_id in enumerate(item_ids)})
            case DropItems(item_ids=item_ids):
                for item_id in item_ids:
                    del self.items[item_id], self.leases[item_id]
            case DropLease(item_ids=item_ids):
                for item_id in item_ids:
                    del self.leases[item_id]
            case SaveClosed():
                self.is_closed = True

    def memory(self) -> JournalState:
        takes: dict[tuple[int, int], dict[int, int]] = {}
        for item_id, (lease, index) in self.leases.items():
            takes.setdefault((lease.handle, lease.consumer), {})[index] = item_id
        leases = []
        for (handle, consumer), by_index in takes.items():
            first = min(by_index)
            number = self.leases[by_index[first]][0].number
            item_ids = [by_index[index] for index in sorted(by_index)]
            leases.append(SaveLease(handle=handle, consumer=consumer, number=number, item_ids=item_ids, num_done=first))
        return JournalState(
            handles=list(self.handles.values()),
            puts=list(self.puts.values()),
            items=[copy.copy(self.items[item_id]) for item_id in sorted(self.items)],
            leases=leases,
            is_closed=self.is_closed,
        )


class Story:
    """A queue that is told one thing after the other. Items are strings of one byte each."""

    def __init__(self, size: int = 3, max_bytes: int | None = None, *, is_durable: bool = False) -> None:
        self.options: dict[str, Any] = {"name": "q", "size": size, "max_bytes": max_bytes, "is_durable": is_durable}
        self.now = 100.0
        self.core = QueueCore(self.now, **self.options)
        self.journal = JournalModel()
        self.open: set[int] = set()
        """Tickets without an answer."""
        self._request_id = 0

    def tell(self, event: Event, after_s: float = 0.0) -> list[Action]:
        self.now += after_s
        if isinstance(event, PutAsked | GetAsked):
            self.open.add(event.request_id)
        actions = self.core.step(self.now, event)
        assert check(self.core) == []
        for action in actions:
            if isinstance(action, AnswerPut | AnswerGet):
                self.open.remove(action.request_id)  # KeyError: a request was answered twice, or never given out
            else:
                self.journal.write(action)
        return actions

    def attach(self, handle: int, worker: str = "", incarnation: int = 0) -> None:
        self.tell(HandleAttached(handle=handle, worker=worker or f"w{handle}", incarnation=incarnation))

    def put(
        self, handle: int, number: int, *items: str, wait_s: float | None = None, below: int = 0, **options: Any
    ) -> list[tuple[int, Any]]:
        """Ask, and the answers that this brought: pairs of request id and what `said` makes of it."""
        self._request_id += 1
        event = PutAsked(
            request_id=self._request_id,
            handle=handle,
            number=number,
            below=below,
            items=[(item, 1) for item in items],
            wait_s=wait_s,
            **options,
        )
        return said(self.tell(event))

    def get(
        self,
        consumer: int,
        number: int,
        max_items: int = 1,
        *,
        received: int | None = None,
        wait_s: float | None = None,
    ) -> list[tuple[int, Any]]:
        """Ask for consumer 12 through handle 1, and so on. If not said, all earlier gets were received."""
        self._request_id += 1
        event = GetAsked(
            request_id=self._request_id,
            handle=consumer // 10,
            consumer=consumer,
            number=number,
            received=number - 1 if received is None else received,
            max_items=max_items,
            wait_s=wait_s,
        )
        return said(self.tell(event))

    def done(self, consumer: int, number: int, count: int | None = None) -> list[tuple[int, Any]]:
        return said(self.tell(TakeDone(handle=consumer // 10, consumer=consumer, number=number, count=count)))

    def restart(self) -> None:
        """The owner dies, and its next incarnation has nothing but the journal. Nobody's question is answered."""
        self.open.clear()
        self.core = QueueCore(self.now, **self.options, memory=self.journal.memory())
        assert check(self.core) == []

    @property
    def waiting(self) -> list[str]:
        buffer = self.core.buffer
        by_id = {item.item_id: item for item in [*buffer._fresh, *(item for _, item in buffer._returned)]}
        return [by_id[item_id].payload for item_id in ids(buffer)]


def said(actions: list[Action]) -> list[tuple[int, Any]]:
    """The answers among actions: by request id, the items that it brought, or how it ended and how many went in."""
    found: list[tuple[int, Any]] = []
    for action in actions:
        match action:
            case AnswerGet(request_id=request_id, outcome=Outcome.DONE, items=items):
                found.append((request_id, [item.payload for item in items]))
            case AnswerGet(request_id=request_id, outcome=outcome):
                found.append((request_id, outcome))
            case AnswerPut(request_id=request_id, outcome=outcome, num_in=num_in):
                found.append((request_id, (outcome, num_in)))
    return found
