"""Serialized value: encoded once, carried and kept as bytes, and decoded only where somebody asks for it."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec

from unified.bus.buffers import Buffer, size_of
from unified.bus.shm.allocation import allocation_at, has_allocations


class SerializedValue(msgspec.Struct, eq=False):
    """A value as bytes and buffers. Inside another value it is sent as it is, and arrives undecoded.

    `unified.bus.codec.codec.encode` makes it, `deserialize` decodes it. Large buffers are the caller's memory: do not
    change them before the value is sent, or `detach` it. Buffers from shared memory are handed on without a copy.
    """

    body: bytes
    buffers: list[Buffer]
    """Large buffers beside the body."""

    @property
    def nbytes(self) -> int:
        """Size of the body and the buffers."""
        return size_of(self.body, self.buffers) if self.buffers else len(self.body)

    def detach(self) -> SerializedValue:
        """Return a copy without memory that the caller may change, to be kept in the process that made the value."""
        return SerializedValue(self.body, [_kept(buffer) for buffer in self.buffers])

    def __reduce_ex__(self, protocol: Any) -> Any:
        wrap: Any = pickle.PickleBuffer if protocol >= 5 else bytes
        return _rebuild, (self.body, *(wrap(buffer) for buffer in self.buffers))

    def __repr__(self) -> str:
        return f"<SerializedValue: {self.nbytes} bytes>"


def _kept(buffer: Buffer) -> Buffer:
    view = memoryview(buffer)
    if isinstance(view.obj, bytes) or hasattr(view.obj, "open_window"):  # nobody can change it
        return buffer
    if has_allocations():
        from unified.tensors.copy import address_of  # needs ctypes, which is loaded by now

        if allocation_at(address_of(view), view.nbytes) is not None:  # nobody should change it
            return buffer
    return memoryview(bytes(view))


def _rebuild(body: bytes, *buffers: Buffer) -> SerializedValue:
    return SerializedValue(bytes(body), list(buffers))
