"""What is to be written, as pieces of memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, cast

from unified.errors import UsageError
from unified.storage.backend import Source

READ_NBYTES = 4 << 20


def pieces_of(data: Source) -> Iterator[memoryview]:
    """`data` as byte views in order, none of them empty; buffers are not copied.

    Raises:
        UsageError: it is none of what can be written.
    """
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
    """How many bytes `pieces_of` would give, where that is known before reading them."""
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
    """The same bytes in copies of exactly these sizes, the last one shorter. `sizes` must not end before `pieces` do.

    Copies, so that whoever makes the pieces may use their memory again for the next one.

    Args:
        spare: blocks that are not needed any more, put there by other threads: they are used again where they fit, for
            new memory has to come from the system.
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
