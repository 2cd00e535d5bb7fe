"""Large files past the page cache: blocks are on their way to the disk while the next one is filled."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

BLOCK_NBYTES = 8 << 20
"""A multiple of what any disk wants its writes aligned to."""
NUM_IN_FLIGHT = 2
"""Keeps a disk busy: it has the next block when it is done with one."""
COPY_NBYTES = 1 << 20
"""At most so much is copied at a time, since other threads of Python stand still meanwhile."""
_DIRECT = getattr(os, "O_DIRECT", 0)


def write_pieces(descriptor: int, pieces: Iterable[memoryview]) -> None:
    """Write a new file from its beginning. A piece may change once the next one is asked for.

    What is more than a block goes to the disk directly where the file system can do that, in `NUM_IN_FLIGHT` + 1 blocks
    of memory. By way of the page cache it would be copied by the system on this thread, and reach the disk at ``fsync``
    only. Not more than a block is left to that.

    Raises:
        OSError: as ``os.write``.
    """
    with contextlib.ExitStack() as stack:
        block = mmap.mmap(-1, BLOCK_NBYTES)
        writer: _Writer | None = None
        filled = start = 0
        for piece in pieces:
            taken = 0
            while taken < len(piece):
                if filled == BLOCK_NBYTES:
                    writer = writer or stack.enter_context(_Writer(descriptor))
                    block = writer.exchange(block, start)
                    start, filled = start + BLOCK_NBYTES, 0
                count = min(len(piece) - taken, BLOCK_NBYTES - filled, COPY_NBYTES)
                block[filled : filled + count] = piece[taken : taken + count]
                taken, filled = taken + count, filled + count
        if writer is not None:
            writer.finish()
        _write_at(descriptor, memoryview(block)[:filled], start)


class _Writer:
    """Writes whole blocks in threads of its own."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._threads = ThreadPoolExecutor(NUM_IN_FLIGHT, thread_name_prefix="unified-disk")
        self._running: set[Future[mmap.mmap]] = set()
        self._idle = [mmap.mmap(-1, BLOCK_NBYTES) for _ in range(NUM_IN_FLIGHT)]
        with contextlib.suppress(OSError):  # tmpfs and others have no direct writes
            self._set_direct(_DIRECT)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._threads.shutdown(wait=True)  # nothing may write to the file after this

    def exchange(self, block: mmap.mmap, start: int) -> mmap.mmap:
        """Write a full block at `start`; one that is free to be filled."""
        self._running.add(self._threads.submit(self._write, block, start))
        if not self._idle:
            self._collect()
        return self._idle.pop()

    def finish(self) -> None:
        """Wait for what is under way. From here on the file may be written at any place and length."""
        while self._running:
            self._collect()
        with contextlib.suppress(OSError):
            self._set_direct(0)

    def _collect(self) -> None:
        done, self._running = wait(self._running, return_when=FIRST_COMPLETED)
        self._idle += [each.result() for each in done]

    def _write(self, block: mmap.mmap, start: int) -> mmap.mmap:
        try:
            _write_at(self._descriptor, memoryview(block), start)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._set_direct(0)  # it was allowed, and does not work here
            _write_at(self._descriptor, memoryview(block), start)
        return block

    def _set_direct(self, flag: int) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT | flag)


def _write_at(descriptor: int, view: memoryview, start: int) -> None:
    written = 0
    while written < len(view):
        written += os.pwrite(descriptor, view[written:], start + written)
