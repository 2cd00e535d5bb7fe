"""Segment of shared memory at its owner: a file with all its pages allocated, mapped once.

    [header: reader references][data: lengths of the parts][part]…[part]

Parts start at multiples of 64 bytes, in the order of the table of lengths. The mapping is like `mmap` of the standard
library, but keeps no descriptor open. Addresses are plain numbers here: a view must keep its mapping alive.
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
from unified.tensors.copy import Copy, address_of, copy_memory, num_cores

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
    """Part of a file, from its start, mapped into this process; unmapped when nobody refers to it any more.

    A `mmap` that is freed does this, not a finalizer. In a reference cycle the garbage collector calls all finalizers,
    in any order, before it frees an object: finalizers of objects in the memory could come after that of the memory.

    Args:
        descriptor: of the file; it may be closed afterwards.
        writable: otherwise a write ends the process.
        private: writes stay in this process and never reach the file.

    Raises:
        OSError: the system refuses: no memory, or too many mappings.
    """

    def __init__(self, descriptor: int, size: int, *, writable: bool = False, private: bool = False) -> None:
        self.size = size
        flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        self._place = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)  # its end unmaps the file
        self.address = address_of(memoryview(self._place))
        if _libc.mmap(self.address, size, access, flags | _MAP_FIXED, descriptor, 0) != self.address:
            error = ctypes.get_errno()
            raise OSError(error, f"mmap of {size} bytes: {os.strerror(error)}")

    def words(self, count: int) -> memoryview[int]:
        """Return the first `count` 8-byte words, to read and to write; each store is one store of the processor."""
        array: Any = (ctypes.c_uint64 * count).from_address(self.address)
        array.mapping = self
        return memoryview(array).cast("B").cast("Q")

    def view(self) -> memoryview:
        """Return the whole mapping as bytes."""
        array: Any = (ctypes.c_ubyte * self.size).from_address(self.address)
        array.mapping = self
        return memoryview(array).cast("B")

    def forget_writes(self) -> None:
        """Drop the written pages of a private mapping, so that it shows the file's pages again."""
        if self._was_written():
            _libc.madvise(self.address, self.size, mmap.MADV_DONTNEED)

    def _was_written(self) -> bool:
        """Return whether pages were written, or may have been: a check costs less than faulting all in again."""
        page = mmap.PAGESIZE
        entries = bytearray(self.size // page * _PAGEMAP_ENTRY)
        with contextlib.suppress(OSError), open("/proc/self/pagemap", "rb", buffering=0) as file:
            if os.preadv(file.fileno(), [entries], self.address // page * _PAGEMAP_ENTRY) == len(entries):
                return any(byte & (_PRESENT | _SWAPPED) and not byte & _OF_A_FILE for byte in set(entries[7::8]))
        return True


@functools.lru_cache(maxsize=256)
def array_type(mixin: type, size: int) -> Any:
    """Return the ctypes type for arrays of this length: one for each size of segment."""
    make: Any = type(ctypes.Array)
    return make(mixin.__name__, (mixin, ctypes.Array), {"_type_": ctypes.c_ubyte, "_length_": size})


SLACK_BYTES = 4096
"""Bytes of each segment beyond its size, for the lengths: otherwise a payload of exactly 64 MiB needs the next size."""
UNLOCKED_BYTES = 256 * 1024
"""Size from which a copy lets other threads run."""
_ALIGNMENT = 64
_STEP_BYTES = 16 * 1024 * 1024
"""Step in which memory is allocated: a signal restarts a step, and a profiler sends many signals."""


class Segment:
    """New segment for `capacity` bytes of parts; OSError: no room, no such directory, or a file of its name."""

    def __init__(self, directory: str, inbox_id: str, number: int, capacity: int, mark: int) -> None:
        self.path = os.path.join(directory, segment_name(inbox_id, number))
        size = HEADER_BYTES + capacity + SLACK_BYTES
        # No name until the header names the owner: a process that is killed meanwhile leaves nothing.
        descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(descriptor, first_words(mark), 0)
            for start in range(0, size, _STEP_BYTES):  # without this, a missing page would be a SIGBUS
                os.posix_fallocate(descriptor, start, min(_STEP_BYTES, size - start))
            self._mapping = Mapping(descriptor, size, writable=True)
            # Python follows the link only with a `src_dir_fd`, which has no effect on an absolute path.
            os.link(f"/proc/self/fd/{descriptor}", self.path, src_dir_fd=descriptor, follow_symlinks=True)
        finally:
            os.close(descriptor)
        self._view = self._mapping.view()
        self._words = self._mapping.words(NUM_WORDS)
        self._words[CAPACITY_WORD] = capacity
        self.references = ReaderReferences(self._words)
        self.data_address = self._mapping.address + HEADER_BYTES
        """Address of the data behind the header."""

    def fill(self, parts: Sequence[memoryview], layout: Sequence[tuple[int, int]]) -> None:
        """Copy the parts to their places in `layout`. Large copies use several threads, and let others run."""
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
        """Return all its data, to write to: a ctypes array that is also a `mixin`, and keeps the memory alive."""
        size = self._mapping.size - HEADER_BYTES
        array = array_type(mixin, size).from_address(self.data_address)
        array.mapping = self._mapping
        return array

    def remove(self) -> None:
        """Give the segment back to the system. Present readers keep the data; no new reader can begin."""
        self._words[CLOSED_WORD] = 1
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def abandon(self) -> None:
        """Remove the segment at the pool's end, or leave that to its last reader."""
        self._words[CLOSED_WORD] = 1
        remove_if_unreferenced(self.path, self.references)


def extents(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return start and length of each part, from the start of the data."""
    found: list[tuple[int, int]] = []
    start = 8 * len(sizes)
    for size in sizes:
        start = -(-start // _ALIGNMENT) * _ALIGNMENT
        found.append((start, size))
        start += size
    return found


def space_for(layout: Sequence[tuple[int, int]]) -> int:
    """Return the capacity that parts at these places need."""
    start, size = layout[-1]
    return max(1, start + size - SLACK_BYTES, sum(size for _, size in layout))
