"""Outgoing calls, from the moment they are made until they end, and their payloads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from unified.bus.calls.future import RpcFuture, call_in_words
from unified.bus.codec.codec import SerializedValue
from unified.bus.codec.cuda import settle
from unified.bus.codec.tensors import DeviceTensor
from unified.bus.shm.export import Export, ExportedBuffers
from unified.bus.shm.pool import SharedPool
from unified.bus.streams.stream import StreamFeed
from unified.bus.transport.unix_connection import UnixConnection
from unified.errors import RpcError
from unified.protocol.records import Inbox

_exporting = threading.Lock()


class OutgoingPayload:
    """Outgoing payload: a value encoded once, and laid into shared memory once, for one receiver or more.

    Args:
        num_readers: number of receivers.
    """

    __slots__ = ("_export", "_is_exported", "_num_readers", "content", "nbytes")

    def __init__(self, content: SerializedValue, num_readers: int = 1) -> None:
        self.content = content
        self.nbytes = content.nbytes
        self._num_readers = num_readers
        self._export: Export | None = None
        self._is_exported = False

    def settled(self, devices: Sequence[str], is_same_process: bool) -> OutgoingPayload:
        """Return the payload with its CUDA tensors as frames for one reader that sees these devices; itself if it has
        none."""
        if not has_device_tensors(self.content.buffers):
            return self
        frames = settle(self.content.buffers, devices, is_same_process=is_same_process)
        return OutgoingPayload(SerializedValue(self.content.body, frames))

    def grant(self, pool: SharedPool, reader: str) -> ExportedBuffers | None:
        """Return how the buffers reach the inbox `reader` of this host; None: as frames, all of them."""
        if self._num_readers == 1:
            exported = pool.export(self.content.buffers)
            granted = None if exported is None else exported.grant(reader)
            if exported is not None:
                exported.release()
            return granted
        with _exporting:
            if not self._is_exported:
                self._export = pool.export(self.content.buffers, self._num_readers)
                self._is_exported = True
        return None if self._export is None else self._export.grant(reader)  # let go of when this payload is


def has_device_tensors(buffers: Sequence[object]) -> bool:
    """Return True if some of the buffers lie on a device."""
    return any(isinstance(buffer, DeviceTensor) for buffer in buffers)


class OutboundCall(msgspec.Struct, eq=False):
    """A call that was made here and is open."""

    call_id: int
    future: RpcFuture[Any] | None
    """None once it has ended in a stream."""
    target: str
    method: str
    trace_id: str
    chain: list[int]
    """Tokens of the calls whose handlers led to this one, oldest first."""
    nbytes: int
    payload: OutgoingPayload | None
    """None once it was sent on a route that does not give calls back."""
    made_on: int
    """Ident of a thread."""
    is_relayed: bool = False
    place: int = 0
    """Place among all calls that were sent; 0 until this one was."""
    inbox: Inbox | None = None
    """Inbox of the life that the call was sent to."""
    link: UnixConnection | None = None
    feed: StreamFeed | None = None

    @property
    def words(self) -> str:
        """The call, for messages."""
        return call_in_words(self.method, self.target)

    @property
    def awaited(self) -> RpcFuture[Any] | StreamFeed | None:
        """Object that a thread waits with for the call, or for the next item of its stream."""
        return self.future or self.feed

    @property
    def watcher(self) -> int:
        """Ident of the thread that waits with `concurrent.futures.wait`, say, which does not tell the bus; 0: none."""
        future = self.future
        return future.watcher if future is not None and future.is_watched else 0

    def has_ended(self) -> bool:
        """Return True if nobody waits for the answer any more."""
        future = self.future
        return future is None or future.has_ended()

    def fail(self, error: RpcError, later: list[RpcFuture[Any]] | None = None) -> None:
        """End the stream or the future; `later` as in `RpcFuture.fail`."""
        if self.feed is not None:
            self.feed.fail(error)
        elif self.future is not None:
            self.future.fail(error, later)
