"""Large buffers over ZeroMQ: they go ahead of their message in pieces, and its receiver joins these as they come.

No frame on tcp is longer than a piece (`unified.security.frames`). Each piece is a message of its own: the relay passes
it on, and the receiver copies it to its place, before later pieces come. So neither needs extra memory for all of them.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import threading
import time
import weakref
from collections.abc import Sequence

import msgspec

from unified.bus.buffers import Buffer
from unified.bus.shm.reader import PayloadGoneError
from unified.bus.transport.framing import RemoteMessage
from unified.errors import ProtocolError
from unified.protocol.envelope import (
    Envelope,
    Kind,
    PieceRange,
    PieceSeries,
    decode_piece,
    encode_envelope,
    encode_record,
)
from unified.security.frames import PIECE_BYTES

_ROUNDED_BYTES = 1 << 21
"""Sizes of memory are multiples of a large page, so that one suits buffers of nearly the same size."""
_IDLE_S = 5.0
"""Time after which idle memory is given back to the system."""
_UNFINISHED_S = 600.0
"""Time without a further piece after which a series is given up, if its sender's end is not reported: a piece takes a
minute on a poor line, and a sender may be stopped for a while."""
_numbers = itertools.count(1)


class LargeMessage(list[list[Buffer]]):
    """Messages that carry one message with large buffers, and these buffers by their numbers in it."""

    def __init__(self, number: int, large: dict[int, memoryview]) -> None:
        self.number = number
        self.large = large
        self.nbytes = sum(each.nbytes for each in large.values())


def split(envelope: Envelope, body: Buffer, buffers: Sequence[Buffer]) -> list[list[Buffer]]:
    """Return a message as a `LargeMessage`: pieces of its large buffers, then the rest; or the message alone."""
    views = {index: memoryview(each) for index, each in enumerate(buffers)}
    large = {index: each.cast("B") for index, each in views.items() if each.nbytes >= PIECE_BYTES}
    if not large:
        return [[encode_envelope(envelope), body, *buffers]]
    series = PieceSeries(next(_numbers), sum(each.nbytes for each in large.values()))
    head = encode_envelope(
        Envelope(
            envelope.version,
            Kind.PIECE,
            envelope.call_id,
            envelope.sender,
            envelope.worker,
            envelope.target,
            job=envelope.job,
            series=series,
        )
    )
    messages = LargeMessage(series.number, large)
    for index, view in large.items():
        for start in range(0, view.nbytes, PIECE_BYTES):
            piece = encode_record(PieceRange(index=index, start=start, nbytes=view.nbytes))
            messages.append([head, piece, view[start : start + PIECE_BYTES]])
    left = [b"" if index in large else each for index, each in enumerate(buffers)]
    messages.append([encode_envelope(msgspec.structs.replace(envelope, series=series)), body, *left])
    return messages


class PieceJoiner:
    """Joins pieces, in memory that is used again when nothing refers to it any more: a copy into used memory is several
    times as fast as into fresh memory, whose pages must be found."""

    def __init__(self) -> None:
        self._unfinished: dict[tuple[str, bool], _Unfinished] = {}
        """Newest series by sender and route (True: the relay); on one route, one series comes after the other."""
        self._deposited: dict[str, dict[int, _Unfinished]] = {}
        """Series that came whole beside ZeroMQ, by sender and number; several may come before their messages."""
        self._idle: list[tuple[mmap.mmap, float]] = []
        """Memory, and since when it is idle. Finalizers append, at any time on any thread, without the lock."""
        self._used: dict[int, mmap.mmap] = {}
        self._lock = threading.Lock()

    def lay(self, envelope: Envelope, message: RemoteMessage) -> None:
        """Copy a piece to its place; ProtocolError: it has none."""
        piece = decode_piece(message.body)
        if envelope.series is None or len(message.buffers) != 1:
            raise ProtocolError(f"a PIECE with {len(message.buffers)} buffers, of the series {envelope.series}")
        route = envelope.sender, message.is_relayed
        series = self._unfinished.get(route)
        if series is None or series.number < envelope.series.number:
            series = _Unfinished(envelope.series.number)
            with self._lock:
                self._unfinished[route] = series
        elif series.number > envelope.series.number:
            raise ProtocolError("a PIECE that came behind a newer series of its sender: its connection broke")
        buffer = series.buffers.get(piece.index)
        if buffer is None or piece.start == 0:  # its sender starts again if it found no room half-way
            buffer = series.buffers[piece.index] = _Laid(self.take(piece.nbytes))
        buffer.lay(piece, message.buffers[0])
        series.newest = time.monotonic()

    def deposit(self, sender: str, number: int, buffers: dict[int, memoryview]) -> None:
        """Keep the whole buffers of a message that follows, from any thread; not if its sender already sends pieces."""
        series = _Unfinished(number)
        series.buffers = {index: _Laid(view, view.nbytes) for index, view in buffers.items()}
        with self._lock:
            found = self._unfinished.get((sender, False))
            if found is None or found.number < number:
                self._deposited.setdefault(sender, {})[number] = series

    def collect(self, envelope: Envelope, message: RemoteMessage) -> list[Buffer]:
        """Return the buffers of a message, with those that went ahead; PayloadGoneError: not all of them came."""
        if envelope.series is None:
            return message.buffers
        route = envelope.sender, message.is_relayed
        with self._lock:
            deposited = self._deposited.get(envelope.sender, {}).pop(envelope.series.number, None)
            series = self._unfinished.get(route)
            if series is not None and series.number == envelope.series.number:
                del self._unfinished[route]
            else:
                series = deposited
        if series is None:
            raise PayloadGoneError("its large buffers were lost on the way")
        buffers = [*message.buffers]
        if series.num_whole_bytes != envelope.series.nbytes or max(series.buffers) >= len(buffers):
            raise PayloadGoneError("a part of its large buffers was lost on the way")
        for index, each in series.buffers.items():
            buffers[index] = each.view
        return buffers

    def forget(self, inbox_id: str) -> None:
        with self._lock:
            self._deposited.pop(inbox_id, None)
            for is_relayed in (False, True):
                self._unfinished.pop((inbox_id, is_relayed), None)

    def trim(self, now: float) -> bool:
        """Give back memory that is idle for long; return whether any is left, idle or used."""
        with self._lock:
            for route, series in list(self._unfinished.items()):
                if series.newest + _UNFINISHED_S <= now:
                    del self._unfinished[route]
            for sender, waiting in list(self._deposited.items()):
                for number, series in list(waiting.items()):
                    if series.newest + _UNFINISHED_S <= now:
                        del waiting[number]
                if not waiting:
                    del self._deposited[sender]
            for each in list(self._idle):
                if each[1] + _IDLE_S <= now:
                    self._idle.remove(each)
        return bool(self._idle or self._used)

    def take(self, nbytes: int) -> memoryview:
        """Return memory for a buffer, which is used again once nothing refers to it; ProtocolError: there is none."""
        import ctypes  # not needed by workers without large buffers

        size = -(-nbytes // _ROUNDED_BYTES) * _ROUNDED_BYTES
        with self._lock:
            fitting = next((each for each in self._idle if len(each[0]) == size), None)
            if fitting is not None:
                self._idle.remove(fitting)
        try:
            memory = fitting[0] if fitting else _map(size)
        except (OSError, OverflowError, ValueError) as error:
            raise ProtocolError(f"a buffer of {nbytes} bytes, for which there is no memory: {error}") from None
        self._used[id(memory)] = memory
        window = (ctypes.c_ubyte * nbytes).from_buffer(memory)
        weakref.finalize(window, self._put_back, memory).atexit = False
        return memoryview(window).cast("B")

    def _put_back(self, memory: mmap.mmap) -> None:
        del self._used[id(memory)]
        self._idle.append((memory, time.monotonic()))


class _Unfinished:
    """Series of which pieces are still to come."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.newest = time.monotonic()
        self.buffers: dict[int, _Laid] = {}

    @property
    def num_whole_bytes(self) -> int:
        return sum(each.view.nbytes for each in self.buffers.values() if each.num_filled == each.view.nbytes)


class _Laid:
    """One buffer, of which the first bytes are there."""

    def __init__(self, view: memoryview, num_filled: int = 0) -> None:
        from unified.tensors.copy import address_of

        self.view = view
        self.num_filled = num_filled
        self._address = address_of(view)

    def lay(self, piece: PieceRange, data: Buffer) -> None:
        """Copy a piece behind those that came before it."""
        from unified.tensors.copy import Copy, address_of, copy_memory

        nbytes, size = len(data), self.view.nbytes
        if (piece.start, piece.nbytes) != (self.num_filled, size) or piece.start + nbytes > size:
            raise ProtocolError(
                f"a PIECE of {nbytes} bytes at {piece.start} of {piece.nbytes}, after {self.num_filled} of {size}: "
                "some were lost on the way"
            )
        copy_memory([Copy(self._address + piece.start, address_of(data), nbytes)], 1)
        self.num_filled += nbytes


def _map(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
