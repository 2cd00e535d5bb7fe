"""Messages on a byte stream: ``[sizes][envelope][body][buffer…]``. Pure: bytes in, messages out.

A message starts with the sizes of its envelope and body and the number of its buffers, then comes the size of each
buffer. A claimed size alone allocates nothing: memory grows with the received bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from unified.bus.buffers import Buffer
from unified.errors import ProtocolError
from unified.protocol.envelope import MAX_ENVELOPE_BYTES

_HEAD = struct.Struct("<III")
MAX_BUFFERS = 65_536
_new = tuple.__new__
"""Makes a NamedTuple in half the time."""
JOINED_BYTES = 16 * 1024
"""Size up to which a copy is cheaper than a longer list for the kernel."""
FIRST_BYTES = 1024 * 1024
"""First memory of a larger frame, doubled whenever it is full."""


class Frames(NamedTuple):
    """One message as it came."""

    envelope: Buffer
    body: Buffer
    buffers: list[Buffer]


class RemoteMessage(NamedTuple):
    """One message as it came through ZeroMQ; its buffers are views of what was received."""

    envelope: bytes
    body: bytes
    buffers: list[Buffer]
    is_relayed: bool


def pack(envelope: bytes, body: Buffer, buffers: Sequence[Buffer]) -> list[Buffer]:
    """Return a message as pieces to be written one after the other."""
    if not buffers:
        size = len(body)
        head = _HEAD.pack(len(envelope), size, 0) + envelope
        return [head + body] if size <= JOINED_BYTES else [head, body]
    sizes = [memoryview(buffer).nbytes for buffer in buffers]
    head = _HEAD.pack(len(envelope), len(body), len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes)
    return [head + envelope, body, *buffers]


class FrameReader:
    """Cuts a stream into messages. Feed it the received bytes, in order.

    Attributes:
        error: reason why the rest cannot be read; then the connection is useless.

    If `wanted` is not None, receive the next bytes into it, and report their number with `filled`.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._large: _Large | None = None
        self.error: ProtocolError | None = None

    def feed(self, data: bytes) -> list[Frames]:
        """Return the messages that end in `data`."""
        if self._rest:
            data = self._rest + data
            self._rest = b""
        found: list[Frames] = []
        view = memoryview(data)
        start, length = 0, len(data)
        while length - start >= 12:
            envelope_size, body_size, num_buffers = _HEAD.unpack_from(data, start)
            if envelope_size > MAX_ENVELOPE_BYTES or num_buffers > MAX_BUFFERS:
                self.error = ProtocolError(
                    f"a message with an envelope of {envelope_size} bytes and {num_buffers} buffers is refused."
                )
                return found
            at = start + 12 + num_buffers * 8
            end = at + envelope_size + body_size
            if num_buffers:
                if at + envelope_size > length:
                    break
                sizes = struct.unpack_from(f"<{num_buffers}Q", data, start + 12)
                end += sum(sizes)
            elif at + envelope_size > length:
                break
            else:
                sizes = ()
            body_at = at + envelope_size
            if end > length:
                if end - start > JOINED_BYTES:
                    self._large = _Large(data[at:body_at], [body_size, *sizes], view[body_at:])
                    return found
                break
            buffers: list[Buffer] = []
            next_at = body_at + body_size
            for size in sizes:
                buffers.append(view[next_at : next_at + size])
                next_at += size
            found.append(_new(Frames, (data[at:body_at], view[body_at : body_at + body_size], buffers)))
            start = end
        self._rest = data[start:]
        return found

    @property
    def wanted(self) -> memoryview | None:
        """Memory for the next bytes; None: use `feed`. Release it before any other call here."""
        return None if self._large is None else self._large.wanted()

    def filled(self, count: int) -> list[Frames]:
        """Note that `count` bytes were received into `wanted`; return the message, if it is complete now."""
        large = self._large
        if large is None or not large.advance(count):
            return []
        self._large = None
        return [large.frames()]


class _Large:
    """Message of which a part is missing: its frames get memory as they fill."""

    def __init__(self, envelope: bytes, sizes: list[int], there: memoryview) -> None:
        self._envelope = envelope
        self._sizes = sizes
        self._done: list[bytearray] = []
        self._current = bytearray()
        self._filled = 0
        self._open_next()
        while len(there):
            target = self.wanted()
            count = min(len(target), len(there))
            target[:count] = there[:count]
            there = there[count:]
            target.release()
            self.advance(count)

    def wanted(self) -> memoryview:
        if self._filled == len(self._current):
            size = self._sizes[len(self._done)]
            self._current.extend(bytes(min(self._filled, size - self._filled)))
        return memoryview(self._current)[self._filled :]

    def advance(self, count: int) -> bool:
        """Note that `count` bytes were received; return whether that was all."""
        self._filled += count
        if self._filled < self._sizes[len(self._done)]:
            return False
        self._done.append(self._current)
        return self._open_next()

    def frames(self) -> Frames:
        body, *buffers = (memoryview(each) for each in self._done)
        return Frames(self._envelope, body, list(buffers))

    def _open_next(self) -> bool:
        while len(self._done) < len(self._sizes):
            size = self._sizes[len(self._done)]
            self._current, self._filled = bytearray(min(size, FIRST_BYTES)), 0
            if size:
                return False
            self._done.append(self._current)
        return True
