"""Buffers: the type of raw memory in messages, and checks of received buffers. A leaf of the bus, without ctypes."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

from unified.errors import ProtocolError

Buffer = bytes | bytearray | memoryview
MAX_DIMENSIONS = 64
"""numpy's own limit, and torch's."""


def check_size(data: Buffer, shape: list[int], itemsize: int) -> None:
    """Raise ProtocolError unless `data` holds exactly the items that `shape` claims."""
    held = memoryview(data).nbytes
    if len(shape) > MAX_DIMENSIONS or any(type(size) is not int or size < 0 for size in shape):
        raise ProtocolError(f"a shape of {len(shape)} sizes is refused: at most {MAX_DIMENSIONS}, each 0 or more.")
    if math.prod(shape) * itemsize != held:
        raise ProtocolError(f"shape {shape} of {itemsize}-byte items does not fit a buffer of {held} bytes.")


def size_of(body: Buffer, buffers: list[Buffer]) -> int:
    """Return the bytes of a value, as both sides of a stream count them."""
    return len(body) + sum(len(each) if isinstance(each, (bytes, bytearray)) else each.nbytes for each in buffers)


def needed(module: str) -> Any:
    """Import numpy or torch for a received value; ProtocolError: it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        raise ProtocolError(
            f"a value of {module} came, and {module} is not installed here: pip install 'unified-runtime[torch]'."
        ) from None
