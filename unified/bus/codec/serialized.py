"""Serialized value: encoded once, carried and kept as bytes, and decoded only where somebody asks for it."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec

from unified.bus.buffers import Buffer, size_of
from unified.bus.shm.allocation import allocation_at, has_allocations


class SerializedValue(msgspec.Struct, eq=False):
    """A value as bytes and buffers. Inside any other value it travels as it is, and arrives undecoded.

    `unified.bus.codec.codec.encode` makes it, `deserialize` decodes it. Large buffers are those of the caller until
    it is sent: they must not change before, or `detach` it. What was received through shared memory stays there, and is
    handed on without a copy.
    """

    body: bytes
    buffers: list[Buffer]
    """The large ones beside it."""

    @property
    def nbytes(self) -> int:
        """The size of all that it holds."""
        return size_of(self.body, self.buffers) if self.buffers else len(self.body)

    def detach(self) -> SerializedValue:
        """The same with no memory that the caller may change: for one to be kept in the process that serialized it."""
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
        from unified.memory.copy import address_of  # which needs ctypes, and that is loaded by now

        if allocation_at(address_of(view), view.nbytes) is not None:  # nobody should
            return buffer
    return memoryview(bytes(view))


def _rebuild(body: bytes, *buffers: Buffer) -> SerializedValue:
    return SerializedValue(bytes(body), list(buffers))
