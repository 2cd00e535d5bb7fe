"""Pool of shared memory: payloads are copied into slots once, and granted to readers of this host, within a quota.

Without shared memory (no room, no such directory, switched off) payloads go by the wire, and one log line says why.
"""

from __future__ import annotations

import atexit
import errno
import itertools
import logging
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from unified.bus.buffers import Buffer
from unified.bus.shm.allocation import FORWARD_BYTES, InPlaceAllocation, allocate, allocation_at, has_allocations
from unified.bus.shm.export import Export, ExportedBuffers, ReaderReference, Source, add_frame, add_part
from unified.bus.shm.files import DIRECTORY, is_alive, own_mark
from unified.bus.shm.layout import MIN_WIDTH, NUM_ENTRIES
from unified.bus.shm.reader import BorrowedBuffer, borrowed_behind
from unified.bus.shm.segment import Segment, extents, space_for
from unified.bus.shm.slots import Plan, Slot, SlotTable
from unified.errors import UsageError
from unified.tensors.copy import address_of
from unified.threads import OwnedLock, TimerThread, own_pid

LIMIT_VARIABLE = "UNIFIED_SHM_LIMIT"
SHARE_OF_MOUNT = 0.25
RESERVE_OF_MOUNT = 0.05
"""Share that stays free for others: NCCL and data loaders use the same directory."""


def default_limit(directory: str = DIRECTORY, env: Mapping[str, str] | None = None) -> int:
    """Bytes that one process may hold in slots: ``UNIFIED_SHM_LIMIT``, else a quarter of the mount. 0: no pool.
    UsageError: the variable is no number of bytes."""
    env = os.environ if env is None else env
    given = env.get(LIMIT_VARIABLE, "")
    if given:
        if not given.isdecimal():
            raise UsageError(f"{LIMIT_VARIABLE}={given!r} is not a number of bytes (0 switches shared memory off).")
        return int(given)
    try:
        found = os.statvfs(directory)
    except OSError:
        return 0
    return int(found.f_blocks * found.f_frsize * SHARE_OF_MOUNT)


logger = logging.getLogger(__name__)
THRESHOLD_BYTES = 64 * 1024
"""Size from which a payload, all buffers of a message together, is worth a slot."""
ALLOCATION_READERS = NUM_ENTRIES // (1 + MIN_WIDTH)
"""Most readers of an allocation at one time."""
PAUSE_S = 1.0
"""Pause after the system refused a segment, before the next attempt."""


_pools: weakref.WeakSet[SharedPool] = weakref.WeakSet()
TRIM_S = 2.0


class Trimmer(TimerThread):
    """Timer that gives idle memory back, `TRIM_S` after somebody asked."""

    def soon(self) -> None:
        """Give memory back in `TRIM_S`, unless that is scheduled already."""
        self.set(time.monotonic() + TRIM_S)


class SharedPool:
    """Slots that this process owns. Safe for threads; off in a forked child of its process.

    Args:
        inbox_id: of this incarnation; part of the names of the files.
        quota_bytes: limit on all slots together; None: `default_limit`. 0: the pool is off.
    """

    def __init__(self, inbox_id: str, *, quota_bytes: int | None = None, directory: str = DIRECTORY) -> None:
        self._inbox_id = inbox_id
        self._directory = directory
        self._limit_bytes = default_limit(directory) if quota_bytes is None else quota_bytes
        self._table = SlotTable(self._limit_bytes)
        self._lock = OwnedLock()
        self._segments: dict[int, Segment] = {}
        self._numbers = itertools.count()
        self._forwards: dict[tuple[str, int, int], tuple[str, ReaderReference]] = {}
        """Forwarded references to other processes' slots, and their readers (may die), by owner, segment and entry."""
        self._mark = own_mark()
        self._pid = own_pid()
        self._is_closed = False
        self._refused_until = 0.0
        self._has_warned = False
        _pools.add(self)

    def export(self, buffers: Sequence[Buffer], num_readers: int = 1) -> Export | None:
        """Copy the buffers of a message into a slot, once for all its readers; None if they all go by the wire.

        Buffers in shared memory, received or allocated there, are not copied again. During the copy other threads run.

        `num_readers` readers will be granted the message; a sole one may write to its tensors in place.
        """
        if not buffers or not self._is_on():
            return None
        sources: list[Source | None] = [None] * len(buffers)
        copied: list[int] = []
        parts: list[memoryview] = []
        nbytes = 0
        for index, buffer in enumerate(buffers):
            view = memoryview(buffer)
            source = self._found(view, num_readers)
            if source is not None:
                sources[index] = source
            else:
                copied.append(index)
                parts.append(view)
                nbytes += view.nbytes
        slot = self._filled(parts, num_readers) if nbytes >= THRESHOLD_BYTES else None
        if slot is not None:
            for place, index in enumerate(copied):
                sources[index] = Source(None, place)
        elif len(copied) == len(buffers):
            return None
        return Export(buffers, sources, slot, num_readers)

    def grant(self, exported: Export, reader: str) -> ExportedBuffers:
        """Grant the buffers of a message to the inbox `reader`; the result must be sent there.

        All buffers are frames for a reader beyond the number that was exported for, or if no entry is left.
        """
        shared: list[Any] = []
        frames: list[Buffer] = []
        entries: dict[int, ReaderReference | None] = {}
        for buffer, source in zip(exported.buffers, exported.sources, strict=True):
            entry = None
            if source is not None:
                key = id(source.origin)
                if key not in entries:
                    entries[key] = self._entry_for(exported, source.origin, reader)
                entry = entries[key]
            if source is None or entry is None:
                frames.append(buffer)
                add_frame(shared)
            else:
                add_part(shared, entry, source.part)
        return ExportedBuffers(shared if any(entries.values()) else None, frames)

    def allocate(self, nbytes: int) -> memoryview | None:
        """Return memory in a slot, to be written to and sent without a copy; None: there is none, or `nbytes` is small.

        The memory is not cleared. Its slot is used again when no view of it is left, here or in a reader.
        """
        if nbytes < THRESHOLD_BYTES or not self._is_on():
            return None
        found = self._slot_for(nbytes)
        if found is None:
            return None
        slot, segment = found
        try:
            slot.references.begin(0, ALLOCATION_READERS)
            return allocate(self, slot, segment, nbytes)
        except BaseException:
            slot.is_pinned = False
            raise

    def forget(self, reader: str) -> None:
        """Mark grants in flight to a reader believed dead as lost. Call this also when its connection broke.

        If the reader is alive, it finds that the message is gone; data that it reads already stays.
        """
        if self._pid != own_pid():
            return
        with self._lock:
            self._table.forget(reader)
            for other, entry in self._forwards.values():
                if other == reader:
                    entry.references.lose(entry.number, entry.tag, self._mark)

    def trim(self, now: float) -> bool:
        """Give long-idle slots back to the system; return whether any are left. Call this every second or two."""
        if not self._is_on():
            return False
        with self._lock:
            gone = self._taken_off(self._table.trim(now, is_alive))
            self._forwards = {key: each for key, each in self._forwards.items() if self._is_in_flight(each[1])}
            is_any_left = bool(len(self._table) or self._forwards)
        _remove(gone)
        return is_any_left

    def close(self) -> None:
        """Remove every segment that nobody reads; each other segment is removed by its last reader."""
        if self._pid != own_pid():
            return
        with self._lock:
            self._is_closed = True
            for slot in self._table.drain():
                self._segments.pop(slot.number).abandon()

    def _entry_for(
        self, exported: Export, origin: InPlaceAllocation | BorrowedBuffer | None, reader: str
    ) -> ReaderReference | None:
        """Return a reader's reference to the memory of a buffer of a message; None: none is available."""
        with self._lock:
            if isinstance(origin, BorrowedBuffer):
                return self._forward(origin, reader)
            if origin is not None:
                return self._grant(origin.slot, reader, is_sole=False)
            slot = exported.slot
            if slot is None or len(slot.readers) >= exported.num_readers:
                return None
            return self._grant(slot, reader, is_sole=exported.num_readers == 1)

    def _grant(self, slot: Slot, reader: str, *, is_sole: bool) -> ReaderReference | None:
        entry, references = self._table.grant(slot, reader), slot.references
        return None if entry is None else ReaderReference("", slot.number, references, references.tag, entry, is_sole)

    def _forward(self, borrowed: BorrowedBuffer, reader: str) -> ReaderReference | None:
        reference = borrowed.reference
        number = reference.forward(self._mark)
        if number is None:
            return None
        segment = reference.segment
        entry = ReaderReference(segment.owner, segment.number, segment.references, reference.tag, number, False)
        self._forwards[segment.owner, segment.number, number] = (reader, entry)
        return entry

    def _is_in_flight(self, entry: ReaderReference) -> bool:
        return entry.references.is_in_flight(entry.number, entry.tag, self._mark)

    def _is_on(self) -> bool:
        return self._limit_bytes > 0 and not self._is_closed and self._pid == own_pid() and not self._lock._is_owned()

    def _found(self, view: memoryview, num_readers: int) -> Source | None:
        """Find the place of a buffer that lies in shared memory and can be handed on as it is."""
        if view.nbytes < FORWARD_BYTES:
            return None
        borrowed = borrowed_behind(view)
        if borrowed is not None:
            return Source(borrowed, borrowed.part_of(view)) if borrowed.reference.can_forward(num_readers) else None
        if not has_allocations():
            return None
        address = address_of(view)
        allocation = allocation_at(address, view.nbytes)
        if allocation is None or allocation.pool is not self:
            return None
        with self._lock:
            can_grant = self._table.can_grant(allocation.slot, num_readers)
        return Source(allocation, (address - allocation.address, view.nbytes)) if can_grant else None

    def _filled(self, parts: Sequence[memoryview], num_readers: int) -> Slot | None:
        """Copy the parts into a slot and return it, pinned; None: none is available."""
        layout = extents([part.nbytes for part in parts])
        found = self._slot_for(space_for(layout))
        if found is None:
            return None
        slot, segment = found
        try:
            slot.references.begin(len(parts), num_readers)
            segment.fill(parts, layout)
        except BaseException:
            slot.is_pinned = False
            raise
        return slot

    def _slot_for(self, nbytes: int) -> tuple[Slot, Segment] | None:
        """Return a pinned slot: one that exists, a new one, or a far larger one."""
        now = time.monotonic()
        with self._lock:
            slot = self._table.take(nbytes, now)
            if slot is not None:
                return slot, self._segments[slot.number]
            plan = self._table.plan(nbytes) if now >= self._refused_until else None
            gone = self._taken_off(plan.given_up if plan is not None else self._table.trim(now, is_alive))
        _remove(gone)
        made = self._make(plan) if plan is not None else None
        if made is not None:
            return made
        with self._lock:
            slot = self._table.take(nbytes, now, snug=False)
            if slot is not None:
                return slot, self._segments[slot.number]
        if plan is None:
            self._warn(f"the quota of {self._limit_bytes} bytes is in use")
        return None

    def _make(self, plan: Plan) -> tuple[Slot, Segment] | None:
        number = next(self._numbers)
        try:
            found = os.statvfs(self._directory)
            if found.f_bavail * found.f_frsize - plan.capacity < found.f_blocks * found.f_frsize * RESERVE_OF_MOUNT:
                raise OSError(errno.ENOSPC, "too little room is left")
            segment = Segment(self._directory, self._inbox_id, number, plan.capacity, self._mark)
        except OSError as error:
            with self._lock:
                self._table.cancel(plan)
                self._refused_until = time.monotonic() + PAUSE_S
            self._warn(f"{self._directory}: {error.strerror or error}")
            return None
        slot = Slot(number, plan.capacity, segment.references)
        with self._lock:
            if self._is_closed:
                segment.remove()
                return None
            self._segments[number] = segment
            self._table.add(slot)
        return slot, segment

    def _taken_off(self, slots: list[Slot]) -> list[Segment]:
        return [self._segments.pop(slot.number) for slot in slots]

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "event=no-shared-memory reason=%r: large payloads go by the wire until then (logged once; see %s)",
                reason,
                LIMIT_VARIABLE,
            )


def _remove(segments: list[Segment]) -> None:
    """Remove segments, not under the lock, which every large message takes: giving memory back is slow."""
    while segments:
        segments.pop().remove()


@atexit.register
def _close_all() -> None:
    for pool in list(_pools):
        pool.close()
