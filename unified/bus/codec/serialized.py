"""A value that was encoded once and is decoded only where somebody opens it."""

from __future__ import annotations

import pickle
from typing import Any

from unified.bus.codec.tensors import Buffer
from unified.bus.shm.allocation import born_at, is_any_living


class Sealed:
    """A value as bytes and buffers. Inside any other value it travels as it is, and arrives unopened.

    `unified.bus.codec.codec.seal` makes it. Large buffers are those of the caller until it is sent: they must not
    change before, or `detach` it. What was received through shared memory stays there, and is handed on without a copy.

    Attributes:
        body: as `unified.bus.codec.codec.encode` made it.
        buffers: the large ones beside it.
    """

    __slots__ = ("body", "buffers")

    def __init__(self, body: bytes, buffers: list[Buffer]) -> None:
        self.body = body
        self.buffers = buffers

    @property
    def nbytes(self) -> int:
        """Of all that it holds."""
        return len(self.body) + sum(memoryview(buffer).nbytes for buffer in self.buffers)

    def open(self) -> Any:
        """The value; each call gives one of its own, which may be kept. Arrays in it are read-only and not copied.

        Raises:
            ProtocolError: it is corrupt, or holds an object whose class cannot be imported here.
        """
        from unified.bus.codec.codec import decode_again

        return decode_again(self.body, self.buffers)

    def detach(self) -> Sealed:
        """The same with no memory that the caller may change: for one to be kept in the process that sealed it."""
        return Sealed(self.body, [_kept(buffer) for buffer in self.buffers])

    def __reduce_ex__(self, protocol: Any) -> Any:
        wrap: Any = pickle.PickleBuffer if protocol >= 5 else bytes
        return _rebuild, (self.body, *(wrap(buffer) for buffer in self.buffers))

    def __repr__(self) -> str:
        return f"<Sealed: {self.nbytes} bytes>"


def _kept(buffer: Buffer) -> Buffer:
    view = memoryview(buffer)
    if isinstance(view.obj, bytes) or hasattr(view.obj, "open_window"):  # nobody can change it
        return buffer
    if is_any_living():
        from unified.bus.buffers import address_of  # which needs ctypes, and that is loaded by now

        if born_at(address_of(view), view.nbytes) is not None:  # nobody should
            return buffer
    return memoryview(bytes(view))


def _rebuild(body: bytes, *buffers: Buffer) -> Sealed:
    return Sealed(bytes(body), list(buffers))
