"""Framing of control messages, for ZeroMQ sockets and for byte streams.

Over ZeroMQ a message is two frames, ``[header, body]``; a body of 4 MiB or more is cut into several frames. The header
is a short MessagePack array ``[protocol version, request id]``. An answer has the id of its request; messages without a
request have 0.
Over a stream (a socket pair between parent and child) a message is a 4-byte little-endian length and the body.

Nothing here touches a socket, and nothing is ever unpickled.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

from unified.errors import ProtocolError, UsageError, VersionMismatchError
from unified.security.frames import Buffer, cut, join

PROTOCOL_VERSION = 6
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for unreadable bytes. Text that is not UTF-8, and too deep nesting, have errors of their own."""
UNWRITABLE = (UnicodeEncodeError, OverflowError, TypeError, RecursionError)
"""Errors of msgspec for values that MessagePack cannot hold."""
MAX_MESSAGE = 64 * 1024 * 1024
"""Most bytes of a message to the master."""
MAX_STREAM_MESSAGE = 256 * 1024 * 1024
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_header = msgspec.msgpack.Decoder(tuple[int, int])

M = TypeVar("M")


class Control(NamedTuple, Generic[M]):
    """One decoded control message."""

    request_id: int
    message: M


class Codec(Generic[M]):
    """Codec that encodes any message, and decodes those of one direction of one conversation."""

    def __init__(self, union: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union)

    def encode(self, message: object, request_id: int = 0, *, version: int = PROTOCOL_VERSION) -> list[Buffer]:
        return [_encoder.encode((version, request_id)), *cut(_encoder.encode(message))]

    def encode_header(self, request_id: int = 0) -> bytes:
        """Return the first frame alone, for a message whose body is encoded already."""
        return _encoder.encode((PROTOCOL_VERSION, request_id))

    def encode_body(self, message: object) -> bytes:
        """Return the body alone, for any number of receivers."""
        return _encoder.encode(message)

    def decode(self, frames: Sequence[Buffer]) -> Control[M]:
        """Return the message in these frames; ProtocolError if it is none, VersionMismatchError if the peer's version
        is another."""
        if len(frames) < 2:
            raise ProtocolError(f"a control message has a header and a body, this one has {len(frames)} frames.")
        request_id = self.read_header(frames[0])
        return Control(request_id, self.decode_body(join(frames[1:])))

    def read_header(self, frame: Buffer) -> int:
        """Return the request id, after a check of the version."""
        try:
            version, request_id = _header.decode(frame)
        except UNREADABLE as error:
            raise ProtocolError(f"the header is not [version, request id]: {error}") from None
        if version != PROTOCOL_VERSION:
            raise VersionMismatchError(
                f"the peer speaks protocol version {version}, this side speaks {PROTOCOL_VERSION}: "
                "install the same release of unified-runtime on both."
            )
        return request_id

    def decode_body(self, frame: Buffer) -> M:
        try:
            return self._decoder.decode(frame)
        except UNREADABLE as error:
            raise ProtocolError(f"not a message of this conversation: {error}") from None


def check_sendable(message: object) -> None:
    """Raise UsageError, which names the value, for a record that MessagePack cannot hold."""
    try:
        _encoder.encode(message)
    except UNWRITABLE as error:
        raise unsendable(message, error) from None


def unsendable(message: object, error: Exception) -> UsageError:
    """Return the error for a message that cannot be sent; it names the bad value."""
    name = type(message).__name__
    return UsageError(f"{name} cannot be sent: {next(_unsendable(message, name), str(error))}.")


def _unsendable(value: object, where: str) -> Iterator[str]:
    match value:
        case str() if any("\ud800" <= character <= "\udfff" for character in value):
            yield f"{where} is {value!r}, which is not UTF-8"
        case int() if not -(2**63) <= value < 2**64:
            yield f"{where} is {value}, which takes more than 64 bits"
        case msgspec.Struct():
            for name in value.__struct_fields__:
                yield from _unsendable(getattr(value, name), f"{where}.{name}")
        case dict():
            for key, each in value.items():
                yield from _unsendable(key, f"a name in {where}")
                yield from _unsendable(each, f"{where}[{key!r}]")
        case list() | tuple() | set() | frozenset():
            for index, each in enumerate(value):
                yield from _unsendable(each, f"{where}[{index}]")


def encode_stream(message: object) -> bytes:
    """Return a message with its length in front, for a byte stream."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class StreamBuffer:
    """Buffer that collects bytes of a stream and cuts them into message bodies."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes in; return the bodies that are complete now."""
        self._bytes += data
        bodies: list[bytes] = []
        start = 0
        while len(self._bytes) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes, start)
            if length > MAX_STREAM_MESSAGE:
                raise ProtocolError(f"a stream message of {length} bytes is refused; at most {MAX_STREAM_MESSAGE}.")
            if len(self._bytes) - start - _LENGTH.size < length:
                break
            start += _LENGTH.size
            bodies.append(bytes(self._bytes[start : start + length]))
            start += length
        del self._bytes[:start]
        return bodies
