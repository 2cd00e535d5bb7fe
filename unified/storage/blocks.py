"""Data to be written, as pieces and blocks of memory; large files bypass the page cache, several blocks at once."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, BinaryIO, cast

from unified.errors import UsageError
from unified.storage.backend import Source

BLOCK_NBYTES = 8 << 20
"""Size of a block: a multiple of any disk's alignment."""
NUM_IN_FLIGHT = 2
"""Number of blocks in flight: with two, a disk has the next one when it is done with one."""
COPY_NBYTES = 1 << 20
"""Bytes that are copied at a time: a copy blocks the other threads of Python."""
READ_NBYTES = 4 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)


def write_pieces(descriptor: int, pieces: Iterable[memoryview]) -> None:
    """Write a new file from its beginning. A piece may change once the next one is asked for.

    If the file system can do it, all but the last block goes to the disk directly, through `NUM_IN_FLIGHT` + 1 blocks
    of memory. Through the page cache, the system would copy the data on this thread, and write them to the disk only at
    ``fsync``. Only the last block, which may be the only one, goes that way.
    """
    with contextlib.ExitStack() as stack:
        block = mmap.mmap(-1, BLOCK_NBYTES)
        writer: _BlockWriter | None = None
        filled = start = 0
        for piece in pieces:
            taken = 0
            while taken < len(piece):
                if filled == BLOCK_NBYTES:
                    writer = writer or stack.enter_context(_BlockWriter(descriptor))
                    block = writer.exchange(block, start)
                    start, filled = start + BLOCK_NBYTES, 0
                count = min(len(piece) - taken, BLOCK_NBYTES - filled, COPY_NBYTES)
                block[filled : filled + count] = piece[taken : taken + count]
                taken, filled = taken + count, filled + count
        if writer is not None:
            writer.finish()
        _write_at(descriptor, memoryview(block)[:filled], start)


class _BlockWriter:
    """Writes whole blocks in threads of its own."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._threads = ThreadPoolExecutor(NUM_IN_FLIGHT, thread_name_prefix="unified-disk")
        self._running: set[Future[mmap.mmap]] = set()
        self._idle = [mmap.mmap(-1, BLOCK_NBYTES) for _ in range(NUM_IN_FLIGHT)]
        with contextlib.suppress(OSError):  # tmpfs and others have no direct writes
            self._set_direct(_DIRECT)

    def __enter__(self) -> _BlockWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._threads.shutdown(wait=True)  # nothing may write to the file after this

    def exchange(self, block: mmap.mmap, start: int) -> mmap.mmap:
        """Write a full block at `start`; return one that is free to be filled."""
        self._running.add(self._threads.submit(self._write, block, start))
        if not self._idle:
            self._collect()
        return self._idle.pop()

    def finish(self) -> None:
        """Wait for the blocks under way. After it, writes of any offset and length are allowed."""
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
            self._set_direct(0)  # the flag was accepted, but the write was not
            _write_at(self._descriptor, memoryview(block), start)
        return block

    def _set_direct(self, flag: int) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT | flag)


def _write_at(descriptor: int, view: memoryview, start: int) -> None:
    written = 0
    while written < len(view):
        written += os.pwrite(descriptor, view[written:], start + written)


def pieces_of(data: Source) -> Iterator[memoryview]:
    """Yield `data` as byte views in order, none of them empty; buffers are not copied."""
    if isinstance(data, str):
        raise UsageError("a text cannot be written to a store: encode it first, such as text.encode()")
    view = _view(data)
    if view is not None:
        if len(view):
            yield view
    elif hasattr(data, "read"):
        while piece := data.read(READ_NBYTES):
            if isinstance(piece, str):
                raise UsageError("this file was opened as text: open it with mode 'rb'")
            yield memoryview(piece)
    elif isinstance(data, Iterable):
        for item in cast(Iterable[Any], data):
            view = _view(item)
            if view is None:
                raise UsageError(f"a piece of what is to be written is a {type(item).__name__}, not bytes")
            if len(view):
                yield view
    else:
        raise UsageError(f"a {type(data).__name__} cannot be written: give bytes, a binary file, or pieces of bytes")


def size_of(data: Source) -> int | None:
    """Return the number of bytes that `pieces_of` will yield; None: it is not known before."""
    view = _view(data)
    if view is not None:
        return len(view)
    if not hasattr(data, "read"):
        return None
    file = cast(BinaryIO, data)
    if not hasattr(file, "seekable") or not file.seekable():
        return None
    here = file.tell()
    end = file.seek(0, os.SEEK_END)
    file.seek(here)
    return max(0, end - here)


def blocks_of(
    pieces: Iterable[memoryview], sizes: Iterable[int], spare: list[bytearray] | None = None
) -> Iterator[bytearray]:
    """Yield the bytes as copies of exactly these sizes, the last one shorter. `sizes` must not end before `pieces`.

    Copies allow the source of the pieces to reuse the memory of a piece for the next one.

    Args:
        spare: free blocks that other threads put there. Blocks of the right size are reused: new memory takes time.
    """
    wanted = iter(sizes)
    spare = [] if spare is None else spare
    block, filled = bytearray(next(wanted)), 0
    for piece in pieces:
        taken = 0
        while taken < len(piece):
            if filled == len(block):
                yield block
                block, filled = _block(next(wanted), spare), 0
            count = min(len(piece) - taken, len(block) - filled)
            block[filled : filled + count] = piece[taken : taken + count]
            taken, filled = taken + count, filled + count
    if filled:
        del block[filled:]
        yield block


def _block(size: int, spare: list[bytearray]) -> bytearray:
    while spare:
        block = spare.pop()
        if len(block) == size:
            return block
    return bytearray(size)


def _view(data: object) -> memoryview | None:
    try:
        view = memoryview(data)  # type: ignore[arg-type]
    except TypeError:
        return None
    if not view.contiguous:
        return memoryview(view.tobytes())
    return view.cast("B") if view.nbytes else memoryview(b"")
