"""Mapped memory: what `mmap` of the standard library does, without a descriptor kept open for each mapping.

Addresses are plain numbers here. Whoever makes a view of a mapping must keep the mapping alive as long as the view.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from typing import Any

from unified.bus.buffers import address_of

_MAP_FIXED = 0x10
"""Put it in the place of what is mapped there."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
)  # fmt: skip
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_PAGEMAP_ENTRY = 8
_PRESENT, _SWAPPED, _OF_A_FILE = 0x80, 0x40, 0x20
"""In the top byte of an entry of /proc/self/pagemap."""


class Mapping:
    """Part of a file in this process's memory, from its start; unmapped when nobody refers to it any more.

    Not by a finalizer: of objects that refer to each other the garbage collector calls all finalizers before it frees
    any, in no order, so that those of what lies in the memory could come after that of the memory. A `mmap` is freed.

    Args:
        descriptor: of the file; it may be closed afterwards.
        size: bytes.
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
        """Of a private mapping: drop the pages that were written to, so that the file's show again."""
        if self._was_written():
            _libc.madvise(self.address, self.size, mmap.MADV_DONTNEED)

    def _was_written(self) -> bool:
        """To fault all pages in again costs more than to look; where looking fails they may all have been written."""
        page = mmap.PAGESIZE
        entries = bytearray(self.size // page * _PAGEMAP_ENTRY)
        with contextlib.suppress(OSError), open("/proc/self/pagemap", "rb", buffering=0) as file:
            if os.preadv(file.fileno(), [entries], self.address // page * _PAGEMAP_ENTRY) == len(entries):
                return any(byte & (_PRESENT | _SWAPPED) and not byte & _OF_A_FILE for byte in set(entries[7::8]))
        return True


@functools.lru_cache(maxsize=256)
def array_type(mixin: type, size: int) -> Any:
    """ctypes has one type for each length of an array; there are as many as there are sizes of segments."""
    make: Any = type(ctypes.Array)
    return make(mixin.__name__, (mixin, ctypes.Array), {"_type_": ctypes.c_ubyte, "_length_": size})
