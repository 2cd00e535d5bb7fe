"""Values to frames and back: a MessagePack body, and large buffers beside it that nobody copies.

What MessagePack can say goes into the body as it is. Extension types carry the rest: tuples, sets, bytearrays, numpy
arrays and torch tensors by their raw bytes, and any other Python object as pickle protocol 5 with its buffers out of
band. A buffer of `OUT_OF_BAND_BYTES` or more becomes a frame of its own. Bodies may hold pickles, so only workers of
the same job decode them; daemons never do.

What arrives:
- equal values of the same types; shared references inside one message become separate equal values;
- numpy arrays over a received frame, read-only; ``.copy()`` to write;
- torch tensors on the CPU over a received frame (torch has no read-only tensors: writing is possible, and private);
- tensors of a device arrive on the CPU.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgpack

from unified.bus.pickling import dump_object, load_object
from unified.bus.tensors import Buffer, build_tensor, check_size, is_dense, needed, tensor_bytes
from unified.errors import ProtocolError, UsageError

OUT_OF_BAND_BYTES = 16 * 1024
"""Below this a frame of its own costs more than the copy that it saves."""
MAX_DEPTH = 32
"""Containers nested deeper than this are pickled whole. A level of extensions takes 40 kB of stack to decode."""

_TUPLE, _SET, _FROZENSET, _BYTES, _BYTEARRAY, _COMPLEX, _ARRAY, _TENSOR, _OBJECT, _INT = range(1, 11)
_SCALARS = frozenset({type(None), bool, int, float, str})
_ARRAY_KINDS = "biufc"


class Encoded(NamedTuple):
    """A value as frames."""

    body: bytes
    buffers: list[Buffer]

    @property
    def nbytes(self) -> int:
        return len(self.body) + sum(memoryview(buffer).nbytes for buffer in self.buffers)


class _TooDeep(Exception):
    pass


def encode(value: object) -> Encoded:
    """A value as a body and the buffers beside it.

    The buffers are views of the caller's own memory: it must not change before they are sent.

    Raises:
        UsageError: part of the value cannot be pickled; the message names it.
    """
    writer = _Writer()
    try:
        return Encoded(writer.pack(value), writer.buffers)
    except (_TooDeep, RecursionError):
        writer = _Writer()  # a value that contains itself, or nearly: pickle remembers what it has seen
    except ValueError as error:
        if isinstance(error, UsageError) or "recursion" not in str(error):
            raise
        writer = _Writer()
    return Encoded(_packer(writer.extend).pack(writer.pickled(value)), writer.buffers)


def decode(body: Buffer, buffers: Sequence[Buffer] = ()) -> Any:
    """The value in a body and its buffers.

    Raises:
        ProtocolError: it is corrupt, or holds an object whose class cannot be imported here.
    """
    try:
        return _Reader(buffers).unpack(body)
    except ProtocolError:
        raise
    except Exception as error:
        raise ProtocolError(f"the body of a bus message cannot be decoded: {type(error).__name__}: {error}") from error


def _packer(default: Callable[[Any], Any]) -> Any:
    return msgpack.Packer(default=default, strict_types=True, unicode_errors="surrogatepass", buf_size=1024)


class _Writer:
    """Encodes one value; collects its buffers."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._depth = 0

    def pack(self, value: object) -> bytes:
        packed: bytes = _packer(self.extend).pack(self._lift(value))
        return packed

    def _lift(self, value: Any) -> Any:
        """The value with all that MessagePack would change, or copy, replaced by extensions; leaves stay."""
        kind = type(value)
        if kind in _SCALARS:
            return value
        if kind is list:
            if _SCALARS.issuperset(map(type, value)):
                return value
            self._descend()
            lifted = [self._lift(item) for item in value]
            self._depth -= 1
            return lifted
        if kind is dict:
            if _SCALARS.issuperset(map(type, value.values())):
                return value
            self._descend()
            mapped = {key: self._lift(item) for key, item in value.items()}
            self._depth -= 1
            return mapped
        if kind is bytes:
            return value if len(value) < OUT_OF_BAND_BYTES else self._ext(_BYTES, self._aside(value))
        if kind is bytearray:
            return self._ext(_BYTEARRAY, self._aside(memoryview(value)))
        if kind is memoryview:
            return self._ext(_BYTES, self._aside(value if value.c_contiguous else value.tobytes()))
        if kind is msgpack.ExtType:  # the user's own would be read as one of ours
            return self.pickled(value)
        return value

    def extend(self, value: Any) -> Any:
        """MessagePack asks: a type that it cannot say."""
        kind = type(value)
        if kind is tuple:
            return self._container(_TUPLE, list(value))
        if kind is set:
            return self._container(_SET, list(value))
        if kind is frozenset:
            return self._container(_FROZENSET, list(value))
        if kind is complex:
            return self._ext(_COMPLEX, [value.real, value.imag])
        if kind is int:
            return msgpack.ExtType(_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if numpy is not None and kind is numpy.ndarray and _is_plain(value):
            return self._array(numpy, value)
        if torch is not None and kind is torch.Tensor and is_dense(torch, value):
            data, shape, dtype = tensor_bytes(torch, value)
            return self._ext(_TENSOR, [dtype, shape, value.requires_grad, self._aside(data)])
        return self.pickled(value)

    def pickled(self, value: object) -> Any:
        data, buffers = dump_object(value, OUT_OF_BAND_BYTES)
        first = len(self.buffers)
        self.buffers += buffers
        return self._ext(_OBJECT, [first, len(buffers), self._aside(data)])

    def _container(self, code: int, items: list[Any]) -> Any:
        self._descend()
        packed = msgpack.ExtType(code, self.pack(items))
        self._depth -= 1
        return packed

    def _array(self, numpy: Any, array: Any) -> Any:
        fortran = not array.flags.c_contiguous and array.flags.f_contiguous
        flat = numpy.ascontiguousarray(array.T if fortran else array).reshape(-1).view("u1")
        return self._ext(_ARRAY, [array.dtype.str, list(array.shape), fortran, self._aside(memoryview(flat))])

    def _aside(self, data: Buffer) -> int | bytes:
        """Small data itself, or the number of the frame that large data became."""
        if memoryview(data).nbytes < OUT_OF_BAND_BYTES:
            return bytes(data)
        self.buffers.append(data)
        return len(self.buffers) - 1

    def _ext(self, code: int, content: Any) -> Any:
        return msgpack.ExtType(code, msgpack.packb(content))

    def _descend(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _TooDeep


class _Reader:
    """Decodes one value. Whatever the bytes claim, nothing is read beyond the frames at hand."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._buffers = buffers
        self._depth = 0

    def unpack(self, body: Buffer) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH + 1:
            raise ProtocolError(f"extensions nested deeper than {MAX_DEPTH} are refused.")
        value = msgpack.unpackb(
            body, ext_hook=self._extension, raw=False, strict_map_key=False, unicode_errors="surrogatepass"
        )
        self._depth -= 1
        return value

    def _extension(self, code: int, data: bytes) -> Any:
        if code == _TUPLE:
            return tuple(self.unpack(data))
        if code == _SET:
            return set(self.unpack(data))
        if code == _FROZENSET:
            return frozenset(self.unpack(data))
        if code == _INT:
            return int.from_bytes(data, "little", signed=True)
        content = msgpack.unpackb(data)
        if code == _BYTES:
            return bytes(self._found(content))
        if code == _BYTEARRAY:
            return bytearray(self._found(content))
        if code == _COMPLEX:
            return complex(*content)
        if code == _ARRAY:
            return self._array(*content)
        if code == _TENSOR:
            dtype, shape, requires_grad, where = content
            return build_tensor(self._found(where), shape, dtype, requires_grad)
        if code == _OBJECT:
            first, count, where = content
            if first < 0 or count < 0 or first + count > len(self._buffers):
                raise ProtocolError(f"an object wants buffers {first} to {first + count} of {len(self._buffers)}.")
            return load_object(self._found(where), self._buffers[first : first + count])
        raise ProtocolError(f"extension type {code} is not known here.")

    def _found(self, where: int | bytes) -> Buffer:
        if isinstance(where, bytes):
            return where
        if not 0 <= where < len(self._buffers):
            raise ProtocolError(f"the body wants buffer {where} of {len(self._buffers)}.")
        return self._buffers[where]

    def _array(self, dtype_name: str, shape: list[int], fortran: bool, where: int | bytes) -> Any:
        numpy = needed("numpy")
        dtype = numpy.dtype(dtype_name)
        if dtype.kind not in _ARRAY_KINDS:
            raise ProtocolError(f"an array of dtype {dtype_name!r} is not sent by its bytes.")
        data = self._found(where)
        check_size(data, shape, dtype.itemsize)
        flat = (
            numpy.frombuffer(data, dtype=dtype, count=math.prod(shape)) if math.prod(shape) else numpy.empty(0, dtype)
        )
        if not flat.flags.aligned:
            flat = flat.copy()
        array = flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)
        array.flags.writeable = False
        return array


def _is_plain(array: Any) -> bool:
    """Its bytes and its dtype's short name say all; the rest (structured, object, dates, user dtypes) is pickled."""
    return array.dtype.kind in _ARRAY_KINDS and array.dtype.isbuiltin != 2
