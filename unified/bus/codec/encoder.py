"""Encoder of values: a MessagePack body, extension types for the rest, and large buffers as frames beside the body."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from unified.bus.codec.numpy_arrays import NUMBER_KINDS, array_bytes, is_raw
from unified.bus.codec.pickling import dump_object
from unified.bus.codec.serialized import SerializedValue
from unified.bus.codec.tensors import OUT_OF_BAND_BYTES, Outgoing, is_dense

Ext = msgspec.msgpack.Ext
MAX_DEPTH = 32
"""Containers nested deeper than this are pickled whole."""
TUPLE, SET, FROZENSET, BYTES, BYTEARRAY, COMPLEX, ARRAY, TENSOR, OBJECT = range(1, 10)
INT, TEXT, NUMBER, SERIALIZED, BODY, DEVICE, MAP = range(10, 17)
"""Codes of the extension types. MessagePack's own is negative."""
SCALARS = frozenset({type(None), bool, int, float, str})
pack = msgspec.msgpack.Encoder().encode
"""MessagePack, lossless for results of `ValueEncoder.lift`; ints beyond 64 bits and lone surrogates are errors."""


class TooDeep(Exception):
    """The value is nested deeper than `MAX_DEPTH`, or contains itself."""


def is_plain(items: Iterable[Any], depth: int = MAX_DEPTH) -> bool:
    """Return whether MessagePack can express all items, and gives the same types back."""
    for item in items:
        kind = type(item)
        if kind in SCALARS:
            continue
        if kind is list:
            if not SCALARS.issuperset(map(type, item)) and not (depth and is_plain(item, depth - 1)):
                return False
        elif kind is dict:
            if not SCALARS.issuperset(map(type, item)):
                return False
            if not SCALARS.issuperset(map(type, item.values())) and not (depth and is_plain(item.values(), depth - 1)):
                return False
        elif kind is not bytes or len(item) >= OUT_OF_BAND_BYTES:
            return False
    return True


class ValueEncoder:
    """Encodes one value, and collects its buffers (`Outgoing`). With `is_careful`, it checks every int and str for
    values that MessagePack cannot express."""

    def __init__(self, *, devices: bool = False, is_careful: bool = False) -> None:
        self.outgoing = Outgoing(devices=devices)
        self._is_careful = is_careful
        self._depth = 0

    def lift(self, value: Any) -> Any:
        """Replace all parts of a value that MessagePack would change, refuse or copy by extensions.

        TooDeep: pickle it instead. UsageError: part of it cannot be pickled.
        """
        kind = type(value)
        if kind in SCALARS:
            return self._scalar(value) if self._is_careful else value
        lift = _LIFTS.get(kind)
        return self._other(value, kind) if lift is None else lift(self, value)

    def pickled(self, value: object) -> Any:
        data, numbers, kinds = dump_object(value, self.outgoing)
        return Ext(OBJECT, pack([self.outgoing.aside(data), numbers, kinds]))

    def _scalar(self, value: Any) -> Any:
        if type(value) is int and not -(2**63) <= value < 2**64:
            return Ext(INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        if type(value) is str and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                return Ext(TEXT, value.encode("utf-8", "surrogatepass"))
        return value

    def _items(self, items: Iterable[Any]) -> list[Any]:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise TooDeep
        lifted = [self.lift(item) for item in items]
        self._depth -= 1
        return lifted

    def _is_flat(self, items: Iterable[Any]) -> bool:
        return not self._is_careful and SCALARS.issuperset(map(type, items))

    def _list(self, value: list[Any]) -> Any:
        return value if self._is_flat(value) else self._items(value)

    def _dict(self, value: dict[Any, Any]) -> Any:
        values = list(value.values()) if self._is_flat(value.values()) else self._items(value.values())
        if self._is_flat(value):
            return dict(zip(value, values, strict=True))
        return Ext(MAP, pack([self._items(value), values]))  # keys such as tuples

    def _tuple(self, value: tuple[Any, ...]) -> Any:
        return Ext(TUPLE, pack(value if self._is_flat(value) else self._items(value)))

    def _set(self, value: set[Any] | frozenset[Any]) -> Any:
        code = SET if type(value) is set else FROZENSET
        return Ext(code, pack(list(value) if self._is_flat(value) else self._items(value)))

    def _bytes(self, value: bytes) -> Any:
        return value if len(value) < OUT_OF_BAND_BYTES else Ext(BYTES, pack([self.outgoing.add(value), len(value)]))

    def _bytearray(self, value: bytearray) -> Any:
        return Ext(BYTEARRAY, pack([self.outgoing.aside(memoryview(value)), len(value)]))

    def _memoryview(self, value: memoryview) -> Any:
        plain = value.cast("B") if value.c_contiguous and value.nbytes else value.tobytes()
        return Ext(BYTES, pack([self.outgoing.aside(plain), value.nbytes]))

    def _complex(self, value: complex) -> Any:
        return Ext(COMPLEX, pack([value.real, value.imag]))

    def _serialized(self, value: SerializedValue) -> Any:
        first = len(self.outgoing.buffers)
        self.outgoing.buffers += value.buffers
        return Ext(SERIALIZED, pack([self.outgoing.aside(value.body), first, len(value.buffers)]))

    def _other(self, value: Any, kind: type) -> Any:
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if numpy is not None and issubclass(kind, (numpy.ndarray, numpy.generic)):
            if kind is numpy.ndarray and is_raw(value.dtype):
                return self._array(numpy, value)
            if kind.__module__ == "numpy" and kind is not numpy.ndarray and is_raw(value.dtype, NUMBER_KINDS):
                return Ext(NUMBER, pack([value.dtype.str, value.tobytes()]))
        elif torch is not None and kind is torch.Tensor:
            return self._tensor(torch, value)
        return self.pickled(value)

    def _array(self, numpy: Any, array: Any) -> Any:
        data, dtype, shape, fortran = array_bytes(numpy, array)
        return Ext(ARRAY, pack([dtype, shape, fortran, self.outgoing.aside(data)]))

    def _tensor(self, torch: Any, tensor: Any) -> Any:
        if not is_dense(torch, tensor):
            return self.pickled(tensor)
        if self.outgoing.stays_on_device(tensor):
            return Ext(DEVICE, pack([self.outgoing.device_tensor(tensor), tensor.requires_grad]))
        where, shape, dtype = self.outgoing.tensor(torch, tensor)
        return Ext(TENSOR, pack([dtype, shape, tensor.requires_grad, where]))


_LIFTS: dict[type, Callable[[ValueEncoder, Any], Any]] = {
    list: ValueEncoder._list,
    dict: ValueEncoder._dict,
    tuple: ValueEncoder._tuple,
    set: ValueEncoder._set,
    frozenset: ValueEncoder._set,
    bytes: ValueEncoder._bytes,
    bytearray: ValueEncoder._bytearray,
    memoryview: ValueEncoder._memoryview,
    complex: ValueEncoder._complex,
    SerializedValue: ValueEncoder._serialized,
    Ext: ValueEncoder.pickled,  # a user's Ext would be read as one of ours
    msgspec.Raw: ValueEncoder.pickled,
}
