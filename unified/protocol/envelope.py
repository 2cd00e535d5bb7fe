"""Envelope of a bus message: its first frame, and all that a relay reads.

A message is ``[envelope][body][buffer…]``. `unified.bus.codec.codec` handles body and buffers, except for WAITS, BULK
and the bodies of this file: HELLO (an `Inbox`), UNDELIVERABLE (an `Undelivered`) and PIECE (a `PieceRange`).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Literal

import msgspec

from unified.errors import ProtocolError, VersionMismatchError
from unified.protocol.framing import UNREADABLE
from unified.protocol.records import Inbox
from unified.values import Value

Bytes = bytes | bytearray | memoryview
BUS_VERSION = 5
OUTSIDE = "outside:"
"""Prefix of the names of callers that are no workers, such as the driver of a job; no worker's name begins with it."""
MAX_ENVELOPE_BYTES = 8192
"""Longest first frame that is decoded: names are short, so a longer frame is no envelope."""


class Kind(IntEnum):
    CALL = 1
    """Call. Body: arguments. It ends in one RESULT or ERROR."""
    RESULT = 2
    """Result of a call. Body: the value."""
    ERROR = 3
    """Error of a call. Body: the exception."""
    CANCEL = 4
    """Cancellation: the caller no longer wants the answer to `call_id`."""
    UNDELIVERABLE = 5
    """Notice from a relay to a sender whose message it could not forward. Body: `Undelivered`."""
    HELLO = 6
    """First message on a new direct connection. Body: the sender's `Inbox`, so that answers can come back even
    before the directory lists it."""
    STREAM = 7
    """Start of a stream: the handler is a generator, and ITEMs follow until a RESULT or an ERROR."""
    ITEM = 8
    """Item of a stream. Body: one value."""
    MORE = 9
    """Credit from the caller, which can take `count` more ITEMs."""
    WAITS = 10
    """Notice from the callee that a call is blocked, and what it waits for (`unified.bus.calls.deadlock.graph`)."""
    PIECE = 11
    """Piece of a large buffer of a message that follows. Body: a `PieceRange`; its one buffer has the bytes."""
    BULK = 12
    """Notice of a connection for large buffers that the sender makes. Body: its id and key."""


class PieceSeries(msgspec.Struct, frozen=True, array_like=True):
    """Series of pieces: one message's large buffers, sent ahead of it. The message has empty frames in their place."""

    number: int
    """Number of the series, which grows with each series of the sender."""
    nbytes: int
    """Size of all pieces."""


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """First frame of a message. Sender and target are inbox ids, so it is for one incarnation only."""

    version: int
    kind: Kind
    call_id: int
    """Number chosen by the caller; with the caller's inbox id it names the call."""
    sender: str
    worker: str
    """Name of the sender, for people."""
    target: str
    method: str = ""
    timeout_s: float | None = None
    """Seconds left when it was sent (clocks of two hosts differ); None: no deadline."""
    trace_id: str = ""
    """Trace id: the same for a call and for the calls that its handler makes."""
    chain: list[int] = []
    """Ids of the calls whose handlers led to this one, oldest first; each has a meaning only for its callee."""
    job: str = ""
    """Id of the job; messages of another job are refused."""
    shared: list[Any] | None = None
    """Places of the buffers in shared memory (see `unified.bus.shm.reader`); None: all follow as frames."""
    count: int = 0
    """CALL: number among its sender's calls to all targets, unchanged when it is sent again. MORE: number of items that
    it allows. ITEM: number in its stream. RESULT of a stream: number of items before it."""
    series: PieceSeries | None = None
    """PIECE: series that it belongs to. Other messages: series that went ahead of them."""


class Undelivered(Value, frozen=True, kw_only=True):
    """Reason why a relay did not forward a message."""

    kind: Kind
    target: str
    code: Literal["unknown-target", "overloaded"]


class PieceRange(Value, frozen=True, kw_only=True):
    """Buffer and offset of a piece. The pieces of a series come in order, and each has bytes of one buffer."""

    index: int
    """Number of the buffer in its message."""
    start: int
    """Offset in the buffer."""
    nbytes: int
    """Size of the whole buffer."""


_encoder = msgspec.msgpack.Encoder()
_envelope = msgspec.msgpack.Decoder(Envelope)
_any = msgspec.msgpack.Decoder(list)
_inbox = msgspec.msgpack.Decoder(Inbox)
_undelivered = msgspec.msgpack.Decoder(Undelivered)
_piece = msgspec.msgpack.Decoder(PieceRange)


def encode_envelope(envelope: Envelope) -> bytes:
    return _encoder.encode(envelope)


def decode_envelope(frame: Bytes) -> Envelope:
    """Read a first frame; ProtocolError if it is no envelope, VersionMismatchError if the peer has another version."""
    size = len(frame)
    if size > MAX_ENVELOPE_BYTES:
        raise ProtocolError(f"an envelope of {size} bytes is refused; at most {MAX_ENVELOPE_BYTES}.")
    try:
        envelope = _envelope.decode(frame)
    except UNREADABLE as error:
        _check_version(_first_number(frame))
        raise ProtocolError(f"the first frame is not an envelope: {error}") from None
    _check_version(envelope.version)
    return envelope


def encode_record(record: Inbox | Undelivered | PieceRange) -> bytes:
    """Return the body of a HELLO, of an UNDELIVERABLE or of a PIECE."""
    return _encoder.encode(record)


def decode_hello(body: Bytes) -> Inbox:
    """Read the body of a HELLO; ProtocolError if it is none."""
    try:
        return _inbox.decode(body)
    except UNREADABLE as error:
        raise ProtocolError(f"not the body of a HELLO: {error}") from None


def decode_undelivered(body: Bytes) -> Undelivered:
    """Read the body of an UNDELIVERABLE; ProtocolError if it is none."""
    try:
        return _undelivered.decode(body)
    except UNREADABLE as error:
        raise ProtocolError(f"not the body of an UNDELIVERABLE: {error}") from None


def decode_piece(body: Bytes) -> PieceRange:
    """Read the body of a PIECE; ProtocolError if it is none."""
    try:
        return _piece.decode(body)
    except UNREADABLE as error:
        raise ProtocolError(f"not the body of a PIECE: {error}") from None


def _first_number(frame: Bytes) -> object:
    try:
        return next(iter(_any.decode(frame)), None)
    except UNREADABLE:
        return None


def _check_version(version: object) -> None:
    if type(version) is int and version != BUS_VERSION:
        raise VersionMismatchError(
            f"the peer speaks bus version {version}, this side speaks {BUS_VERSION}: "
            "install the same release of unified-runtime on both."
        )
