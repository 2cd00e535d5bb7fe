"""Table of the pool's slots: free ones, and those that go back to the system. No I/O: numbers, sizes and references.

A slot is *pinned* while its owner may still grant it, then *held* until its entries are clear, then *idle* and kept for
the next payload: a copy into memory that was touched before is ten times as fast as into fresh memory. A slot that was
allocated in place (`unified.bus.shm.allocation`) stays pinned as long as its maker has a view of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from unified.bus.shm.layout import ReaderReferences, Use

KIB = 1024
SMALLEST_SLOT = 128 * KIB
IDLE_S = 10.0
"""Time after which a slot that nobody needed goes back to the system."""
REAP_EVERY_S = 2.0
"""Interval at which held slots are searched for readers that died."""
MAX_SLOTS = 1024
"""Most slots: each is a file, and a mapping in each process that uses it; a process may have 65 530 mappings."""
SNUG = 2
"""Largest ratio of a slot's size to the size that its payload needs, while a new slot can be made."""


def size_class(nbytes: int) -> int:
    """Return the size of the slot for `nbytes`: powers of two up to 1 MiB, then four steps to each doubling."""
    size = SMALLEST_SLOT
    while size < nbytes and size < 1024 * KIB:
        size *= 2
    if size >= nbytes:
        return size
    step = 1 << ((nbytes - 1).bit_length() - 3)
    step = max(step, 1024 * KIB)
    return -(-nbytes // step) * step


class Slot(msgspec.Struct, eq=False):
    """Account of one segment at its owner."""

    number: int
    capacity: int
    references: ReaderReferences
    readers: list[str] = []
    """Readers of this use, by row."""
    is_pinned: bool = False
    """True while it may still be granted. Its exporter clears it with a plain store."""
    idle_since: float = 0.0


class Plan(NamedTuple):
    """Plan for a new slot: give up these, then make one of this size."""

    capacity: int
    given_up: list[Slot]


class SlotTable:
    """The slots of one pool, `limit_bytes` together at most. Not safe for threads: the pool holds a lock."""

    def __init__(self, limit_bytes: int, max_slots: int = MAX_SLOTS) -> None:
        self._limit_bytes = limit_bytes
        self._max_slots = max_slots
        self._idle: dict[int, list[Slot]] = {}
        self._held: deque[Slot] = deque()
        """Held and pinned slots, roughly the oldest first."""
        self._abandoned: list[Slot] = []
        self._num_slots = 0
        self.total_bytes = 0
        self._next_reap = 0.0

    def __len__(self) -> int:
        return self._num_slots

    def take(self, nbytes: int, now: float, *, snug: bool = True) -> Slot | None:
        """Take a free slot for `nbytes`, and pin it; None: none is free. With `snug`, take no far larger one."""
        largest = SNUG * size_class(nbytes) if snug else self._limit_bytes
        slot = self._take_idle(nbytes, largest) if self._idle else self._take_oldest(nbytes, largest)
        if slot is not None:
            return slot
        for _ in range(len(self._held)):
            slot = self._held.popleft()
            use = self._settle(slot, now)
            if use is Use.HELD:
                self._held.append(slot)
            elif use is Use.FREE and nbytes <= slot.capacity <= largest:
                return self._take_idle(slot.capacity, slot.capacity)
        return None

    def plan(self, nbytes: int) -> Plan | None:
        """Reserve room for a new slot: `add` or `cancel` must follow. None: the quota is full."""
        capacity = size_class(nbytes)
        idle = sorted((slot for slots in self._idle.values() for slot in slots), key=lambda slot: slot.idle_since)
        evicted: list[Slot] = []
        kept_bytes = self.total_bytes - sum(slot.capacity for slot in self._abandoned)
        missing_bytes = kept_bytes + capacity - self._limit_bytes
        missing_slots = self._num_slots - len(self._abandoned) + 1 - self._max_slots
        while missing_bytes > 0 or missing_slots > 0:
            if len(evicted) == len(idle):
                return None
            slot = idle[len(evicted)]
            evicted.append(slot)
            missing_bytes -= slot.capacity
            missing_slots -= 1
        for slot in evicted:
            self._remove_idle(slot)
        abandoned, self._abandoned = self._abandoned, []
        given_up = self._give_up(abandoned + evicted)
        self.total_bytes += capacity
        self._num_slots += 1
        return Plan(capacity, given_up)

    def add(self, slot: Slot) -> None:
        """Add the new slot of a plan, and pin it."""
        slot.is_pinned = True
        self._held.append(slot)

    def cancel(self, plan: Plan) -> None:
        """Cancel a plan: its slot could not be made."""
        self.total_bytes -= plan.capacity
        self._num_slots -= 1

    def grant(self, slot: Slot, reader: str) -> int | None:
        """Grant a pinned slot to one more reader and return the entry; None if there is none left."""
        entry = slot.references.grant(len(slot.readers))
        if entry is not None:
            slot.readers.append(reader)
            return entry
        for row in self._over(slot):
            slot.readers[row] = reader
            return slot.references.grant(row)
        return None

    def can_grant(self, slot: Slot, num_readers: int) -> bool:
        """Return whether a pinned slot has entries for `num_readers` more readers."""
        missing = num_readers - (slot.references.num_rows - len(slot.readers))
        return missing <= 0 or sum(1 for _ in self._over(slot)) >= missing

    def forget(self, reader: str) -> None:
        """Mark grants in flight to a reader believed dead as lost."""
        for slot in self._held:
            for row, other in enumerate(slot.readers):
                if other == reader:
                    slot.references.lose_row(row)

    def trim(self, now: float, is_alive: Callable[[int], bool]) -> list[Slot]:
        """Take out the slots to give back to the system: abandoned ones, and those idle for long. Cheap."""
        is_due = now >= self._next_reap
        if is_due:
            self._next_reap = now + REAP_EVERY_S
        for _ in range(len(self._held)):
            slot = self._held.popleft()
            if is_due:
                slot.references.reap(len(slot.readers), is_alive)
            if self._settle(slot, now) is Use.HELD:
                self._held.append(slot)
        old = [slot for slots in self._idle.values() for slot in slots if now - slot.idle_since >= IDLE_S]
        for slot in old:
            self._remove_idle(slot)
        abandoned, self._abandoned = self._abandoned, []
        return self._give_up(abandoned + old)

    def drain(self) -> list[Slot]:
        """Take out every slot, for the end of the pool."""
        slots = [*self._held, *self._abandoned, *(slot for slots in self._idle.values() for slot in slots)]
        self._held.clear()
        self._abandoned.clear()
        self._idle.clear()
        self.total_bytes = self._num_slots = 0
        return slots

    def _over(self, slot: Slot) -> Iterator[int]:
        """Return the granted rows that can be granted again."""
        return (row for row in range(len(slot.readers)) if slot.references.is_over(row))

    def _settle(self, slot: Slot, now: float) -> Use:
        """Move a slot that is held no more to the idle or abandoned ones; return its state."""
        use = Use.HELD if slot.is_pinned else slot.references.use(len(slot.readers))
        if use is Use.ABANDONED:
            self._abandoned.append(slot)
        elif use is Use.FREE:
            slot.idle_since = now
            slot.readers = []
            self._idle.setdefault(slot.capacity, []).append(slot)
        return use

    def _take_oldest(self, nbytes: int, largest: int) -> Slot | None:
        """Take the slot that was used first, if it fits and is free: mostly it is, and no search is needed."""
        slot = self._held[0] if self._held else None
        if slot is None or slot.is_pinned or not nbytes <= slot.capacity <= largest:
            return None
        if slot.references.use(len(slot.readers)) is not Use.FREE:
            return None
        self._held.rotate(-1)
        slot.readers = []
        slot.is_pinned = True
        return slot

    def _take_idle(self, nbytes: int, largest: int) -> Slot | None:
        size = min((size for size in self._idle if nbytes <= size <= largest), default=0)
        if size == 0:
            return None
        slot = self._idle[size][-1]  # the last one used: more of it is in the processor's cache
        self._remove_idle(slot)
        slot.is_pinned = True
        self._held.append(slot)
        return slot

    def _remove_idle(self, slot: Slot) -> None:
        slots = self._idle[slot.capacity]
        slots.remove(slot)
        if not slots:
            del self._idle[slot.capacity]

    def _give_up(self, slots: list[Slot]) -> list[Slot]:
        self.total_bytes -= sum(slot.capacity for slot in slots)
        self._num_slots -= len(slots)
        return slots
