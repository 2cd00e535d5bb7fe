"""Decoder of values, from a body and its buffers. It reads only bytes that are there, even if the body claims more."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from unified.bus.buffers import Buffer, check_size
from unified.bus.codec.encoder import (
    ARRAY,
    BODY,
    BYTEARRAY,
    BYTES,
    COMPLEX,
    DEVICE,
    FROZENSET,
    INT,
    MAP,
    MAX_DEPTH,
    NUMBER,
    OBJECT,
    SERIALIZED,
    SET,
    TENSOR,
    TEXT,
    TUPLE,
)
from unified.bus.codec.numpy_arrays import build_array, build_number
from unified.bus.codec.pickling import DEVICE_TENSOR, TENSOR_MEMORY, are_refused
from unified.bus.codec.serialized import SerializedValue
from unified.bus.codec.tensors import Windows, build_tensor
from unified.errors import ProtocolError

_unpack = msgspec.msgpack.Decoder().decode
"""Decoder of the content of an extension: plain lists."""


class ValueDecoder:
    """Decodes one value with these buffers beside its body; then `close` it. Without buffers it decodes any number of
    values. For `is_only` see `Windows`."""

    def __init__(self, buffers: Sequence[Buffer], *, is_only: bool = True) -> None:
        self._buffers = buffers
        self._windows = Windows(is_only=is_only)
        self._taken: set[int] = set()
        self._memories: dict[int, Buffer] = {}
        """Memory of tensors, by the number of their buffer: tied tensors stay tied."""
        self._decoders: dict[int, Callable[[Any], Any]] = {}

    def unpack(self, body: Any, depth: int = 0) -> Any:
        """Decode the value in a body, or in an extension `depth` levels deep."""
        decode = self._decoders.get(depth)
        if decode is None:
            if depth > MAX_DEPTH + 1:
                raise ProtocolError(f"extensions nested deeper than {MAX_DEPTH} are refused.")
            decode = msgspec.msgpack.Decoder(ext_hook=partial(self._extension, depth)).decode
            self._decoders[depth] = decode
        return decode(body)

    def close(self) -> None:
        """Release the buffers now, and not at a garbage collection: shared memory is used again sooner."""
        self._decoders.clear()

    def _extension(self, depth: int, code: int, data: memoryview) -> Any:
        if code == TUPLE:
            return tuple(self.unpack(data, depth + 1))
        if code == OBJECT:
            where, numbers, kinds = _unpack(data)
            return self._object(self._found(where), numbers, kinds)
        if code == ARRAY:
            dtype, shape, fortran, where = _unpack(data)
            return build_array(self._found(where), dtype, shape, fortran)
        if code == TENSOR:
            return self._tensor(*_unpack(data))
        if code == SET:
            return set(self.unpack(data, depth + 1))
        if code == FROZENSET:
            return frozenset(self.unpack(data, depth + 1))
        if code == MAP:
            keys, values = self.unpack(data, depth + 1)
            return dict(zip(keys, values, strict=True))
        if code == INT:
            return int.from_bytes(data, "little", signed=True)
        if code == TEXT:
            return str(data, "utf-8", "surrogatepass")
        content = _unpack(data)
        if code == BYTES:
            return bytes(self._whole(*content))
        if code == BYTEARRAY:
            return bytearray(self._whole(*content))
        if code == COMPLEX:
            return complex(*content)
        if code == NUMBER:
            return build_number(*content)
        if code == SERIALIZED:
            return self._serialized(*content)
        if code == BODY:
            return self.unpack(self._lock(content), depth + 1)
        if code == DEVICE:
            number, requires_grad = content
            return self._device(number).requires_grad_(requires_grad)
        raise ProtocolError(f"extension type {code} is not known here.")

    def _found(self, where: Any) -> Buffer:
        return where if isinstance(where, bytes) else self._lock(where)

    def _whole(self, where: Any, nbytes: int) -> Buffer:
        data = self._found(where)
        check_size(data, [nbytes], 1)
        return data

    def _buffer(self, number: int) -> Buffer:
        if not 0 <= number < len(self._buffers):
            raise ProtocolError(f"the body wants buffer {number} of {len(self._buffers)}.")
        return self._buffers[number]

    def _lock(self, number: int) -> Buffer:
        """Return a buffer that a body may name only once: otherwise it could cause a million copies."""
        buffer = self._buffer(number)
        if number in self._taken:
            raise ProtocolError(f"the body wants buffer {number} twice.")
        self._taken.add(number)
        return buffer

    def _memory(self, number: int) -> Buffer:
        """Return a buffer that any number of tensors may write to."""
        memory = self._memories.get(number)
        if memory is None:
            memory = self._memories[number] = self._windows.writable(self._buffer(number))
        return memory

    def _object(self, data: Buffer, numbers: list[int], kinds: bytes) -> Any:
        """Load an object that `dump_object` pickled. Arrays over its buffers are read-only."""
        if are_refused():
            raise ProtocolError("it holds a Python object, but this program reads only plain data and arrays")
        if len(numbers) != len(kinds):
            raise ProtocolError(f"a pickle wants {len(numbers)} buffers of {len(kinds)} kinds.")
        wanted: list[Any] = []
        for number, kind in zip(numbers, kinds, strict=True):
            if kind == DEVICE_TENSOR:
                wanted.append(self._device(number))
            elif kind == TENSOR_MEMORY:
                wanted.append(self._memory(number))
            else:
                wanted.append(memoryview(self._lock(number)).toreadonly())
        return pickle.loads(data, buffers=wanted)

    def _tensor(self, dtype: str, shape: list[int], requires_grad: bool, where: int | bytes) -> Any:
        data = where if isinstance(where, bytes) else self._memory(where)
        return build_tensor(data, shape, dtype, requires_grad)

    def _device(self, number: int) -> Any:
        """Rebuild a CUDA tensor, or its copy on the CPU, from its two frames."""
        from unified.bus.codec.cuda import rebuild

        return rebuild(self._lock(number), self._lock(number + 1), self._windows)

    def _serialized(self, where: int | bytes, first: int, count: int) -> SerializedValue:
        if not 0 <= first <= first + count <= len(self._buffers):
            raise ProtocolError(f"a serialized value wants buffers {first} to {first + count} of {len(self._buffers)}.")
        return SerializedValue(
            bytes(self._found(where)), [self._lock(number) for number in range(first, first + count)]
        )
