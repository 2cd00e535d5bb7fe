"""One segment as its owner has it: a file of which every page exists, mapped once and for all.

    [header: claims][data: lengths of the parts][part]…[part]

Parts start at multiples of 64 bytes, in the order of their lengths.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Sequence
from typing import Any

from unified.bus.buffers import address_of
from unified.bus.shm.files import first_words, remove_if_unclaimed, segment_name
from unified.bus.shm.layout import CAPACITY_WORD, CLOSED_WORD, HEADER_BYTES, NUM_WORDS, Claims
from unified.bus.shm.mapping import Mapping, array_type
from unified.memory.copy import Copy, copy_memory, num_cores

SLACK_BYTES = 4096
"""Of each segment beyond its size, for the lengths: else a payload of exactly 64 MiB would need the next size."""
UNLOCKED_BYTES = 256 * 1024
"""For a copy of this size on it is worth while to let other threads run."""
_ALIGNMENT = 64
_STEP_BYTES = 16 * 1024 * 1024
"""Memory is asked for in steps: the system starts one anew when a signal comes, and a profiler sends many."""


class Segment:
    """A new segment.

    Args:
        directory, inbox_id, number: where, and its name.
        capacity: bytes of parts it is to hold.
        mark: of this process.

    Raises:
        OSError: there is no room, no such directory, or a file of this name.
    """

    def __init__(self, directory: str, inbox_id: str, number: int, capacity: int, mark: int) -> None:
        self.path = os.path.join(directory, segment_name(inbox_id, number))
        size = HEADER_BYTES + capacity + SLACK_BYTES
        # Without a name until it says whose it is: of a process that is killed meanwhile nothing is left.
        descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(descriptor, first_words(mark), 0)
            for start in range(0, size, _STEP_BYTES):  # memory that was promised and is not there would be a SIGBUS
                os.posix_fallocate(descriptor, start, min(_STEP_BYTES, size - start))
            self._mapping = Mapping(descriptor, size, writable=True)
            # Python follows the link only where it is given a folder, which means nothing for an absolute path.
            os.link(f"/proc/self/fd/{descriptor}", self.path, src_dir_fd=descriptor, follow_symlinks=True)
        finally:
            os.close(descriptor)
        self._view = self._mapping.view()
        self._words = self._mapping.words(NUM_WORDS)
        self._words[CAPACITY_WORD] = capacity
        self.claims = Claims(self._words)
        self.data_address = self._mapping.address + HEADER_BYTES
        """Of what follows the header."""

    def fill(self, parts: Sequence[memoryview], layout: Sequence[tuple[int, int]]) -> None:
        """Copy the parts in, where `places` says; during large copies other threads run, and take part in them."""
        struct.pack_into(f"<{len(parts)}Q", self._view, HEADER_BYTES, *(size for _, size in layout))
        large: list[Copy] = []
        for part, (start, size) in zip(parts, layout, strict=True):
            if size < UNLOCKED_BYTES and part.format == "B":
                self._view[HEADER_BYTES + start : HEADER_BYTES + start + size] = part
            else:
                large.append(Copy(self.data_address + start, address_of(part), size))
        if large:
            copy_memory(large, num_cores())

    def memory(self, mixin: type) -> Any:
        """All its data, to write to: a ctypes array that is also a `mixin`, and keeps the memory."""
        size = self._mapping.size - HEADER_BYTES
        array = array_type(mixin, size).from_address(self.data_address)
        array.mapping = self._mapping
        return array

    def remove(self) -> None:
        """Give it back to the system. Who still reads it keeps what is there; nobody can begin to."""
        self._words[CLOSED_WORD] = 1
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def abandon(self) -> None:
        """The pool ends: remove it, or leave that to the last of those who read it."""
        self._words[CLOSED_WORD] = 1
        remove_if_unclaimed(self.path, self.claims)


def places(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Start and length of each part, from the start of the data."""
    found: list[tuple[int, int]] = []
    start = 8 * len(sizes)
    for size in sizes:
        start = -(-start // _ALIGNMENT) * _ALIGNMENT
        found.append((start, size))
        start += size
    return found


def space_for(layout: Sequence[tuple[int, int]]) -> int:
    """The capacity that parts at these places need."""
    start, size = layout[-1]
    return max(1, start + size - SLACK_BYTES, sum(size for _, size in layout))
