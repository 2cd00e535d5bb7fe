"""Sender of calls, replies and notices: chooses the connection, shares large buffers, and batches small messages.

The module also has the records of open calls and outgoing payloads.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from unified.bus.buffers import Buffer
from unified.bus.calls.future import RpcFuture, call_in_words
from unified.bus.calls.inbound import InboundCall
from unified.bus.codec.codec import SerializedValue
from unified.bus.codec.cuda import settle
from unified.bus.codec.tensors import DeviceTensor
from unified.bus.executor import HandlerPool
from unified.bus.identity import BusIdentity
from unified.bus.shm.export import Export, ExportedBuffers
from unified.bus.shm.pool import SharedPool, Trimmer
from unified.bus.streams.stream import StreamFeed
from unified.bus.transport.connections import Connection, ConnectionTable
from unified.bus.transport.framing import JOINED_BYTES, pack
from unified.bus.transport.io_threads import IoThreads
from unified.bus.transport.pieces import split
from unified.bus.transport.unix_connection import UnixConnection
from unified.core.directory import WorkerDirectory
from unified.errors import RpcError
from unified.protocol.envelope import BUS_VERSION, Envelope, Kind, encode_envelope
from unified.protocol.records import Inbox

_exporting = threading.RLock()


class OutgoingPayload:
    """Outgoing payload: a value encoded once, and copied into shared memory once, for one or more receivers."""

    __slots__ = ("_export", "_is_exported", "_num_readers", "content", "nbytes")

    def __init__(self, content: SerializedValue, num_readers: int = 1) -> None:
        self.content = content
        self.nbytes = content.nbytes
        self._num_readers = num_readers
        self._export: Export | None = None
        self._is_exported = False

    def settled(self, devices: Sequence[str], is_same_process: bool) -> OutgoingPayload:
        """Return the payload with CUDA tensors as frames for one reader that sees these devices; without any,
        itself."""
        if not has_device_tensors(self.content.buffers):
            return self
        frames = settle(self.content.buffers, devices, is_same_process=is_same_process)
        return OutgoingPayload(SerializedValue(self.content.body, frames))

    def grant(self, pool: SharedPool, reader: str) -> ExportedBuffers | None:
        """Grant the buffers to the inbox `reader` of this host; None: all of them go as frames."""
        if self._num_readers == 1:
            exported = pool.export(self.content.buffers)
            if exported is None:
                return None
            buffers = pool.grant(exported, reader)
            exported.release()
            return buffers
        with _exporting:
            if not self._is_exported:
                self._export = pool.export(self.content.buffers, self._num_readers)
                self._is_exported = True
        return None if self._export is None else pool.grant(self._export, reader)  # released with this payload


def has_device_tensors(buffers: Sequence[object]) -> bool:
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
    """Ident of the thread that made the call."""
    is_relayed: bool = False
    position: int = 0
    """Position among all sent calls; 0 until this call is sent."""
    inbox: Inbox | None = None
    """Inbox of the incarnation that the call was sent to."""
    link: UnixConnection | None = None
    feed: StreamFeed | None = None

    @property
    def words(self) -> str:
        """The call, for messages."""
        return call_in_words(self.method, self.target)

    @property
    def awaited(self) -> RpcFuture[Any] | StreamFeed | None:
        """Object with which a thread waits for the call, or for the next item of its stream."""
        return self.future or self.feed

    @property
    def watcher(self) -> int:
        """Ident of the thread that waits with `concurrent.futures.wait` or the like, unknown to the bus; 0: none."""
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


logger = logging.getLogger(__name__)
BURST_S = 0.0002
"""Seconds between calls to one peer below which they share a write, which leaves when a thread waits, or at a tick."""
_ENDS = (Kind.RESULT, Kind.ERROR)
"""Kinds that never wait for room on a link: a full link begins no further handlers (`UnixConnection.is_full`)."""


class Sender:
    """Sends all messages of one endpoint.

    Args:
        pool: its threads wait for room where the sending thread must not.
        memory: shared memory for large payloads on this host.
        directory: has the inboxes of living peers.
        trimmer: gives back idle parts of `memory`.
        limit_bytes: bytes that wait on one connection, above which a sender waits for room if it may.
    """

    def __init__(
        self,
        identity: BusIdentity,
        connections: ConnectionTable,
        io: IoThreads,
        pool: HandlerPool,
        memory: SharedPool,
        directory: WorkerDirectory,
        trimmer: Trimmer,
        limit_bytes: int,
    ) -> None:
        self._identity = identity
        self._job_id, self._inbox_id, self._worker = identity.job, identity.inbox, identity.worker
        self._connections = connections
        self._io = io
        self._pool = pool
        self._memory = memory
        self._directory = directory
        self._trimmer = trimmer
        self._limit_bytes = limit_bytes
        self._positions = itertools.count(1)
        self.holding: set[UnixConnection] = set()
        """Links that keep small messages back, to send several at once."""
        self.is_closing = False

    def call(
        self,
        connection: Connection,
        call: OutboundCall,
        payload: OutgoingPayload,
        inbox_id: str,
        timeout_s: float | None,
        may_wait: bool,
    ) -> None:
        """Send a CALL to an inbox.

        A call that is sent again keeps its position among all calls. A new call gets its position as late as possible:
        the callee refuses a call that is far behind (`TooOldError`), and copying a large argument takes as long as many
        small calls.
        """
        shared, buffers = self._share(connection, payload)
        call.position = call.position or next(self._positions)
        envelope = Envelope(
            BUS_VERSION,
            Kind.CALL,
            call.call_id,
            self._inbox_id,
            self._worker,
            inbox_id,
            call.method,
            timeout_s,
            call.trace_id,
            call.chain,
            self._job_id,
            shared,
            call.position,
        )
        self.send(connection, envelope, payload.content.body, buffers, may_wait, call.has_ended)

    def reply(self, call: InboundCall, kind: Kind, answer: SerializedValue, may_wait: bool, count: int = 0) -> bool:
        """Answer a call; return False if that is impossible, or not possible without waiting."""
        connection: Connection
        if call.link is not None:
            connection = call.link
        else:
            inbox = self._inbox_of(call.sender, call.is_relayed)
            if inbox is None:
                return False
            try:
                connection = self._connections.connection(inbox, call.is_relayed)
            except (RpcError, OSError) as error:
                logger.warning("worker=%s event=answer-lost method=%s reason=%r", self._worker, call.method, str(error))
                return False
        shared, buffers = self._share(connection, OutgoingPayload(answer)) if answer.buffers else (None, answer.buffers)
        if shared is not None and not has_device_tensors(answer.buffers):
            answer.buffers.clear()  # copied: free their memory for the next answer
        envelope = Envelope(
            BUS_VERSION,
            kind,
            call.call_id,
            self._inbox_id,
            self._worker,
            call.sender,
            call.method if connection.may_give_back else "",  # for an UNDELIVERABLE
            job=self._job_id,
            shared=shared,
            count=count,
        )
        return self.send(connection, envelope, answer.body, buffers, may_wait, lambda: call.is_stale)

    def tell(self, kind: Kind, call_id: int, inbox: Inbox, count: int = 0) -> None:
        """Send a CANCEL or a MORE. If it is lost, the handler runs on for nothing, or waits until the caller ends."""
        envelope = self._identity.envelope(kind, inbox.inbox_id, call_id, count=count)
        with contextlib.suppress(RpcError, OSError):
            self.send(self._connections.connection(inbox), envelope, b"", [], False, lambda: False)

    def send(
        self,
        connection: Connection,
        envelope: Envelope,
        body: Buffer,
        buffers: Sequence[Buffer],
        may_wait: bool,
        give_up: Callable[[], bool],
    ) -> bool:
        """Send a message; return False if there was no room, and `may_wait` or `give_up` ruled out waiting."""
        connection.lock.check()
        if isinstance(connection, UnixConnection):
            pieces = pack(encode_envelope(envelope), body, buffers)
            if self._shares_write(connection, envelope.kind) and len(pieces) == 1 and len(pieces[0]) <= JOINED_BYTES:
                if connection.hold(pieces[0], self.holding):
                    self._io.tick_soon()
                return True
            connection.send(pieces)
            if may_wait and connection.backlog_bytes > self._limit_bytes and envelope.kind not in _ENDS:
                self._wait(lambda: connection.wait_for_room(self._limit_bytes, lambda: self.is_closing or give_up()))
            return True
        messages = split(envelope, body, buffers)
        if connection.try_send(messages):
            return True
        if may_wait:
            return self._wait(lambda: connection.send(messages, lambda: self.is_closing or give_up()))
        if envelope.kind is Kind.ITEM:
            return False  # its stream asks again
        self._pool.submit(lambda: self._wait(lambda: connection.send(messages, lambda: self.is_closing or give_up())))
        return True

    def _wait(self, work: Callable[[], bool]) -> bool:
        """Wait for room. Meanwhile the pool does not count this thread, so that another one can serve other peers."""
        is_counted = self._pool.waits()
        try:
            return work()
        finally:
            if is_counted:
                self._pool.waited()

    def _share(self, connection: Connection, payload: OutgoingPayload) -> tuple[list[Any] | None, list[Buffer]]:
        """Return the parts of a payload that go through shared memory, and the buffers that go beside the message."""
        if not payload.content.buffers:
            return None, []
        if not isinstance(connection, UnixConnection):
            return None, payload.settled((), False).content.buffers
        payload = payload.settled(connection.devices, connection.peer_id == self._inbox_id)
        buffers = payload.content.buffers
        if not connection.can_share:
            return None, buffers
        exported = payload.grant(self._memory, connection.peer_id)
        if exported is None:
            return None, buffers
        if connection.is_lost:  # `forget` was called then, perhaps before this grant
            self._memory.forget(connection.peer_id)
        self._trimmer.soon()
        return exported.shared, exported.frames

    def release(self) -> None:
        for connection in tuple(self.holding):
            connection.release()

    def _shares_write(self, link: UnixConnection, kind: Kind) -> bool:
        """Return True if a message may wait a little, to share a write with others."""
        if kind is Kind.CALL:
            now = time.monotonic()
            is_burst = now - link.sent_at < BURST_S
            link.sent_at = now
            return is_burst
        return kind is Kind.RESULT and self._io.has_more and self._io.is_leader()

    def _inbox_of(self, inbox_id: str, is_relayed: bool) -> Inbox | None:
        """Return the inbox that an answer goes to; None: unknown or dead. A relayed caller may be unknown."""
        known = self._connections.greeted.get(inbox_id) or self._directory.inbox(inbox_id)
        return Inbox(inbox_id=inbox_id) if known is None and is_relayed else known
