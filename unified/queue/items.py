"""Encoded items, as they travel and lie in a queue: only the producer encodes them, and only the consumer decodes them.

A small item is its bytes. An item with large parts is a `SerializedValue`: its parts in the producer's shared memory
stay there as long as somebody holds the item, and reach the consumer without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from unified.bus.codec.codec import decode, deserialize, encode
from unified.bus.codec.serialized import SerializedValue

Packed = bytes | SerializedValue


def pack(value: object) -> Packed:
    """Encode an item now; UsageError names a part of it that cannot be sent."""
    encoded = encode(value)
    return encoded if encoded.buffers else encoded.body


def kept(packed: Packed) -> Packed:
    """Return the item without memory that the caller may still change."""
    return packed if type(packed) is bytes else packed.detach()  # type: ignore[union-attr]


def unpack(packed: Packed, *, is_only: bool) -> Any:
    """Return the item's value. With `is_only` nobody else in this process has the item, so its tensors may use the
    received memory itself."""
    if isinstance(packed, SerializedValue):
        return decode(packed.body, packed.buffers) if is_only else deserialize(packed)
    return decode(packed)


def nbytes(packed: Packed) -> int:
    return len(packed) if isinstance(packed, bytes) else packed.nbytes


def nbytes_of_largest(packed: Packed) -> int:
    if isinstance(packed, bytes):
        return len(packed)
    return max([len(packed.body), *(memoryview(buffer).nbytes for buffer in packed.buffers)])


def weighed(items: Iterable[Packed]) -> list[tuple[Packed, int]]:
    """Pair each item with its size, as a queue's core wants them."""
    return [(item, len(item) if type(item) is bytes else nbytes(item)) for item in items]
