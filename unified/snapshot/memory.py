"""Buffers of snapshots: memory without a file, which exists while any process has a descriptor of it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

from unified.tensors.copy import MAX_THREADS, num_cores

_MADV_POPULATE_READ = 22
_LENGTH_FIXED = 0x0002 | 0x0004  # F_SEAL_SHRINK and F_SEAL_GROW
_ADD_SEALS = 1033


SLICE_BYTES = 32 << 20
"""Size of the slices whose pages a thread maps at a time."""


def make_buffer(nbytes: int) -> int:
    """Return the descriptor of a buffer of so many bytes, whose length nobody can change any more.

    Memory is taken only as it is written.
    """
    import fcntl

    descriptor = os.memfd_create("unified-snapshot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, _ADD_SEALS, _LENGTH_FIXED)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class MappedBuffer:
    def __init__(self, descriptor: int) -> None:
        """Map a buffer, and take ownership of the descriptor. OSError: the system has no memory."""
        try:
            self.memory = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        with contextlib.suppress(OSError):
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        self._has_pages = False

    def find_pages(self) -> None:
        """Have the kernel find and map all pages, at the first call, so that a copy into them meets no page fault.

        Pages of shared memory that are mapped for reading can be written, too. For existing pages this mapping takes a
        third of the time.
        """
        if not self._has_pages:
            self._has_pages = True
            if not _find_pages(self.memory):
                _ = self.memory[:: mmap.PAGESIZE]  # a kernel before 5.14


def _find_pages(memory: mmap.mmap) -> bool:
    """Have the kernel map all pages, in a few threads, which is faster than page faults; False: it cannot."""
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None)  # its calls let other threads run

    def find(start: int) -> int:
        nbytes = min(SLICE_BYTES, len(memory) - start)
        return int(libc.madvise(ctypes.c_void_p(begin + start), ctypes.c_size_t(nbytes), _MADV_POPULATE_READ))

    with ThreadPoolExecutor(min(MAX_THREADS, num_cores()), thread_name_prefix="snapshot-pages") as pool:
        return not any(pool.map(find, range(0, len(memory), SLICE_BYTES)))
