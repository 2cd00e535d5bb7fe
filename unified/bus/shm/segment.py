"""Segment of shared memory as its owner has it: a file of which every page exists, mapped once and for all.

    [header: reader references][data: lengths of the parts][part]…[part]

Parts start at multiples of 64 bytes, in the order of their lengths. The mapping does what `mmap` of the standard
library does, without a descriptor kept open for each. Addresses are plain numbers here: whoever makes a view of a
mapping must keep the mapping alive as long as the view.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import struct
from collections.abc import Sequence
from typing import Any

from unified.bus.shm.files import first_words, remove_if_unreferenced, segment_name
from unified.bus.shm.layout import CAPACITY_WORD, CLOSED_WORD, HEADER_BYTES, NUM_WORDS, ReaderReferences
from unified.memory.copy import Copy, address_of, copy_memory, num_cores

_MAP_FIXED = 0x10
"""Flag to replace what is mapped there."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
)  # fmt: skip
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_PAGEMAP_ENTRY = 8
_PRESENT, _SWAPPED, _OF_A_FILE = 0x80, 0x40, 0x20
"""Bits of the top byte of an entry of /proc/self/pagemap."""


class Mapping:
    """Part of a file in this process's memory, from its start; unmapped when nobody refers to it any more.

    Not by a finalizer: of objects that refer to each other the garbage collector calls all finalizers before it frees
    any, in no order, so that those of what lies in the memory could come after that of the memory. A `mmap` is freed.

    Args:
        descriptor: of the file; it may be closed afterwards.
        writable: else touching it for a write ends the process.
        private: writes stay in this process and never reach the file.

    Raises:
        OSError: the system refuses: no memory, or too many mappings.
    """

    def __init__(self, descriptor: int, size: int, *, writable: bool = False, private: bool = False) -> None:
        self.size = size
        flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        self._place = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)  # unmaps what is put there
        self.address = address_of(memoryview(self._place))
        if _libc.mmap(self.address, size, access, flags | _MAP_FIXED, descriptor, 0) != self.address:
            error = ctypes.get_errno()
            raise OSError(error, f"mmap of {size} bytes: {os.strerror(error)}")

    def words(self, count: int) -> memoryview[int]:
        """The first `count` 8-byte words, to read and to write; each store is one store of the processor."""
        array: Any = (ctypes.c_uint64 * count).from_address(self.address)
        array.mapping = self
        return memoryview(array).cast("B").cast("Q")

    def view(self) -> memoryview:
        """All of it, as bytes."""
        array: Any = (ctypes.c_ubyte * self.size).from_address(self.address)
        array.mapping = self
        return memoryview(array).cast("B")

    def forget_writes(self) -> None:
        """Drop the pages of a private mapping that were written to, so that the file's show again."""
        if self._was_written():
            _libc.madvise(self.address, self.size, mmap.MADV_DONTNEED)

    def _was_written(self) -> bool:
        """Return whether pages were written, or may have been: to look costs less than to fault all in again."""
        page = mmap.PAGESIZE
        entries = bytearray(self.size // page * _PAGEMAP_ENTRY)
        with contextlib.suppress(OSError), open("/proc/self/pagemap", "rb", buffering=0) as file:
            if os.preadv(file.fileno(), [entries], self.address // page * _PAGEMAP_ENTRY) == len(entries):
                return any(byte & (_PRESENT | _SWAPPED) and not byte & _OF_A_FILE for byte in set(entries[7::8]))
        return True


@functools.lru_cache(maxsize=256)
def array_type(mixin: type, size: int) -> Any:
    """Return the ctypes type for arrays of this length, of which there are as many as sizes of segments."""
    make: Any = type(ctypes.Array)
    return make(mixin.__name__, (mixin, ctypes.Array), {"_type_": ctypes.c_ubyte, "_length_": size})


SLACK_BYTES = 4096
"""Bytes of each segment beyond its size, for the lengths: else a payload of exactly 64 MiB needed the next size."""
UNLOCKED_BYTES = 256 * 1024
"""Size of a copy from which on it is worth while to let other threads run."""
_ALIGNMENT = 64
_STEP_BYTES = 16 * 1024 * 1024
"""Memory is asked for in steps: the system starts one anew when a signal comes, and a profiler sends many."""


class Segment:
    """New segment for so many bytes of parts; OSError: there is no room, no such directory, or a file of its name."""

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
        self.references = ReaderReferences(self._words)
        self.data_address = self._mapping.address + HEADER_BYTES
        """Address of what follows the header."""

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
        """Return all its data, to write to: a ctypes array that is also a `mixin`, and keeps the memory."""
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
        """Remove it at the pool's end, or leave that to the last of those who read it."""
        self._words[CLOSED_WORD] = 1
        remove_if_unreferenced(self.path, self.references)


def extents(sizes: Sequence[int]) -> list[tuple[int, int]]:
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
