"""Values to frames and back: a MessagePack body, and large buffers beside it that nobody copies.

Values that MessagePack can express go into the body as they are. Extension types carry the rest: tuples, sets,
bytearrays, numpy arrays and torch tensors by their raw bytes, and any other Python object as pickle protocol 5 with its
buffers out of band. A buffer of `OUT_OF_BAND_BYTES` or more becomes a frame of its own, and so does a large body.
Bodies may hold pickles, so only workers of one job, and a driver that calls its job, decode them; daemons do not.

The receiver gets:
- equal values of the same types; shared references inside one message become separate equal values, but tensors that
  share memory (tied weights) share memory again;
- read-only numpy arrays over a received frame or shared memory; ``.copy()`` them to write;
- torch tensors on the CPU, over such memory; writing is possible, and private (torch has no read-only tensors);
- for a small view of a large tensor, only the view; for a tensor with a history, the values and `requires_grad`;
- device tensors on the CPU, except CUDA tensors within one host (`unified.bus.codec.cuda`);
- a `SerializedValue` undecoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unified.bus.buffers import Buffer
from unified.bus.codec.decoder import ValueDecoder
from unified.bus.codec.encoder import BODY, SCALARS, Ext, TooDeep, ValueEncoder, is_plain, pack
from unified.bus.codec.pickling import raise_if_signal
from unified.bus.codec.serialized import SerializedValue as SerializedValue
from unified.bus.codec.tensors import OUT_OF_BAND_BYTES as OUT_OF_BAND_BYTES
from unified.errors import ProtocolError

LARGE_BODY_BYTES = 64 * 1024
"""A body of this size is a frame of its own, which may go through shared memory."""
_BARE = ValueDecoder(())


def encode(value: object, *, devices: bool = False) -> SerializedValue:
    """Encode a value as a body and the buffers beside it, to be sent, or carried, kept and handed on undecoded.
    UsageError: part of it cannot be pickled.

    The buffers are views of the caller's memory: do not change it before they are sent or detached. With `devices`,
    CUDA tensors stay on their device, and `unified.bus.codec.cuda.settle` must follow before anything is sent.
    """
    if is_plain((value,)):
        try:
            body = pack(value)
        except (OverflowError, UnicodeEncodeError):
            return _lifted(value, devices)
        return SerializedValue(body, []) if len(body) < LARGE_BODY_BYTES else _made(body, [])
    return _lifted(value, devices)


def encode_arguments(args: Sequence[Any], kwargs: dict[str, Any], *, devices: bool = False) -> SerializedValue:
    """Encode ``[args, kwargs]`` of a call, as `encode` does; this decodes to a list and a dict."""
    if not SCALARS.issuperset(map(type, args)) or not SCALARS.issuperset(map(type, kwargs.values())):
        return encode([list(args), kwargs], devices=devices)
    try:
        body = pack((args, kwargs))
    except (OverflowError, UnicodeEncodeError):
        return encode([list(args), kwargs], devices=devices)
    return SerializedValue(body, []) if len(body) < LARGE_BODY_BYTES else _made(body, [])


def decode(body: Buffer, buffers: Sequence[Buffer] = ()) -> Any:
    """Decode the value in a body and its buffers. Decode the same buffers only once: tensors may take them over.

    ProtocolError: the value is corrupt, or holds an object whose class cannot be imported here.
    """
    return _decode(ValueDecoder(buffers) if buffers else _BARE, body)


def deserialize(value: SerializedValue) -> Any:
    """Decode as `decode` does, but leave the value as it is: tensors get memory of their own each time."""
    return _decode(ValueDecoder(value.buffers, is_only=False) if value.buffers else _BARE, value.body)


def _lifted(value: object, devices: bool) -> SerializedValue:
    for is_careful in (False, True):
        writer = ValueEncoder(devices=devices, is_careful=is_careful)
        try:
            return _made(pack(writer.lift(value)), writer.outgoing.buffers)
        except (OverflowError, UnicodeEncodeError):
            continue  # the value contains a large int, or a str that is no text
        except (TooDeep, RecursionError):
            break  # too deep, or the value contains itself: pickle remembers what it has seen
    writer = ValueEncoder(devices=devices)
    return _made(pack(writer.pickled(value)), writer.outgoing.buffers)


def _made(body: bytes, buffers: list[Buffer]) -> SerializedValue:
    if len(body) < LARGE_BODY_BYTES:
        return SerializedValue(body, buffers)
    return SerializedValue(pack(Ext(BODY, pack(len(buffers)))), [*buffers, body])


def _decode(reader: ValueDecoder, body: Buffer) -> Any:
    try:
        return reader.unpack(body)
    except ProtocolError:
        raise
    except BaseException as error:  # a pickle may raise SystemExit
        raise_if_signal(error)
        raise ProtocolError(f"the body of a bus message cannot be decoded: {type(error).__name__}: {error}") from error
    finally:
        if reader is not _BARE:
            reader.close()
