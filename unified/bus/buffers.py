"""Buffers: the type of raw memory in messages, and the checks of one that came. A leaf of the bus, without ctypes."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

from unified.errors import ProtocolError

Buffer = bytes | bytearray | memoryview
MAX_DIMENSIONS = 64
"""numpy's own limit, and torch's."""


def check_size(data: Buffer, shape: list[int], itemsize: int) -> None:
    """ProtocolError unless `data` holds exactly the items that `shape` claims."""
    held = memoryview(data).nbytes
    if len(shape) > MAX_DIMENSIONS or any(type(size) is not int or size < 0 for size in shape):
        raise ProtocolError(f"a shape of {len(shape)} sizes, or of no sizes, is refused.")
    if math.prod(shape) * itemsize != held:
        raise ProtocolError(f"shape {shape} of {itemsize}-byte items does not fit a buffer of {held} bytes.")


def size_of(body: Buffer, buffers: list[Buffer]) -> int:
    """Return the bytes of a value, as both sides of a stream count them."""
    return len(body) + sum(len(each) if isinstance(each, (bytes, bytearray)) else each.nbytes for each in buffers)


def needed(module: str) -> Any:
    """Import numpy or torch because a value of it came."""
    try:
        return import_module(module)
    except ImportError:
        raise ProtocolError(
            f"a value of {module} came, and {module} is not installed here: pip install 'unified-runtime[torch]'."
        ) from None
