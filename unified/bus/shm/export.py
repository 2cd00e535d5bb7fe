"""Export of the buffers of one message into shared memory, with a descriptor for each reader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from unified.bus.buffers import Buffer
from unified.bus.shm.allocation import InPlaceAllocation
from unified.bus.shm.layout import ReaderReferences
from unified.bus.shm.reader import BorrowedBuffer
from unified.bus.shm.slots import Slot


class ReaderReference(NamedTuple):
    """One reader's reference to one use of a slot."""

    owner: str
    """Inbox id of the process that made the segment; empty: the sender."""
    segment: int
    references: ReaderReferences
    tag: int
    number: int
    is_sole: bool


Part = int | tuple[int, int]
"""A part of a slot by its number, or any range of a slot's data: where it starts, and its bytes."""


class Source(NamedTuple):
    """Place of a buffer that need not go by the wire."""

    origin: InPlaceAllocation | BorrowedBuffer | None
    """An allocation, or a borrowed buffer; None: the slot into which the message was copied."""
    part: Part


class ExportedBuffers(NamedTuple):
    """Buffers of a message for one reader."""

    shared: list[Any] | None
    """For the envelope; see `unified.bus.shm.reader`. None: all go as frames."""
    frames: list[Buffer]
    """Buffers that go by the wire."""
    cells: list[ReaderReference]


class Granter(Protocol):
    """The pool, as an export sees it."""

    def cell_for(
        self, exported: Export, origin: InPlaceAllocation | BorrowedBuffer | None, reader: str
    ) -> ReaderReference | None: ...


class Export:
    """Message in shared memory, made by `SharedPool.export`; to be released when all its readers were granted it."""

    def __init__(
        self,
        pool: Granter,
        buffers: Sequence[Buffer],
        sources: list[Source | None],
        slot: Slot | None,
        num_readers: int,
    ) -> None:
        self.slot = slot
        self.num_readers = num_readers
        self._pool = pool
        self._buffers = buffers
        self._sources = sources

    def grant(self, reader: str) -> ExportedBuffers:
        """Refer to the buffers for the inbox `reader`. The result must be sent, or `revoke`d.

        Beyond `num_readers`, and where no cell is left, all are frames.
        """
        shared: list[Any] = []
        frames: list[Buffer] = []
        cells: dict[int, ReaderReference | None] = {}
        for buffer, source in zip(self._buffers, self._sources, strict=True):
            cell = None
            if source is not None:
                key = id(source.origin)
                if key not in cells:
                    cells[key] = self._pool.cell_for(self, source.origin, reader)
                cell = cells[key]
            if source is None or cell is None:
                frames.append(buffer)
                _add_frame(shared)
            else:
                _add_part(shared, cell, source.part)
        taken = [cell for cell in cells.values() if cell is not None]
        return ExportedBuffers(shared if taken else None, frames, taken)

    def revoke(self, granted: ExportedBuffers) -> None:
        """Take back what was granted and will not be sent."""
        for cell in granted.cells:
            cell.references.revoke(cell.number)

    def release(self) -> None:
        """Grant it to nobody else. The slot is used again when its readers have let go."""
        slot, self.slot = self.slot, None
        if slot is not None:
            slot.is_pinned = False

    def __del__(self) -> None:
        self.release()


def _add_frame(shared: list[Any]) -> None:
    if shared and type(shared[-1]) is int:
        shared[-1] += 1
    else:
        shared.append(1)


def _add_part(shared: list[Any], cell: ReaderReference, part: Part) -> None:
    last = shared[-1] if shared else 0
    start = [cell.owner, cell.segment, cell.tag, cell.number]
    if type(part) is tuple:
        shared.append([*start, list(part), 1, cell.is_sole])
    elif type(last) is list and last[:4] == start and type(last[4]) is int and last[4] + last[5] == part:
        last[5] += 1
    else:
        shared.append([*start, part, 1, cell.is_sole])
