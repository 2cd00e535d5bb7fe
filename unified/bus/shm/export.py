"""Export of the buffers of one message into shared memory, with a descriptor for each reader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from unified.bus.buffers import Buffer
from unified.bus.shm.allocation import InPlaceAllocation
from unified.bus.shm.layout import ReaderReferences
from unified.bus.shm.reader import BorrowedBuffer
from unified.bus.shm.slots import Slot


class ReaderReference(NamedTuple):
    owner: str
    """Inbox id of the process that made the segment; empty: the sender."""
    segment: int
    references: ReaderReferences
    tag: int
    number: int
    is_sole: bool


Part = int | tuple[int, int]
"""A part of a slot by its number, or any range of a slot's data: start and length in bytes."""


class Source(NamedTuple):
    """Place in shared memory of a buffer."""

    origin: InPlaceAllocation | BorrowedBuffer | None
    """An allocation, or a borrowed buffer; None: the slot into which the message was copied."""
    part: Part


class ExportedBuffers(NamedTuple):
    """Buffers of a message for one reader."""

    shared: list[Any] | None
    """For the envelope; see `unified.bus.shm.reader`. None: all go as frames."""
    frames: list[Buffer]
    """Buffers that go by the wire."""


class Export:
    """Message in shared memory, made by `SharedPool.export`; to be released when all its readers have their grants."""

    def __init__(self, buffers: Sequence[Buffer], sources: list[Source | None], slot: Slot | None, num_readers: int):
        self.buffers = buffers
        self.sources = sources
        self.slot = slot
        self.num_readers = num_readers

    def release(self) -> None:
        """Grant it to nobody else. The slot is used again when its readers have released it."""
        slot, self.slot = self.slot, None
        if slot is not None:
            slot.is_pinned = False

    def __del__(self) -> None:
        self.release()


def add_frame(shared: list[Any]) -> None:
    """Add a buffer that goes by the wire to a message's descriptor."""
    if shared and type(shared[-1]) is int:
        shared[-1] += 1
    else:
        shared.append(1)


def add_part(shared: list[Any], entry: ReaderReference, part: Part) -> None:
    """Add a buffer in shared memory to a message's descriptor."""
    last = shared[-1] if shared else 0
    start = [entry.owner, entry.segment, entry.tag, entry.number]
    if type(part) is tuple:
        shared.append([*start, list(part), 1, entry.is_sole])
    elif type(last) is list and last[:4] == start and type(last[4]) is int and last[4] + last[5] == part:
        last[5] += 1
    else:
        shared.append([*start, part, 1, entry.is_sole])
