"""Sender of calls, replies and notices: chooses the connection, shares large buffers, and batches small messages."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from unified.bus.buffers import Buffer
from unified.bus.calls.inbound import InboundCall
from unified.bus.calls.outbound import OutboundCall, OutgoingPayload, has_device_tensors
from unified.bus.codec.codec import SerializedValue
from unified.bus.executor import HandlerPool, Trimmer
from unified.bus.identity import BusIdentity
from unified.bus.shm.pool import SharedPool
from unified.bus.transport.connections import Connection, ConnectionTable
from unified.bus.transport.framing import JOINED_BYTES, pack
from unified.bus.transport.io_threads import IoThreads
from unified.bus.transport.unix_connection import UnixConnection
from unified.core.directory import WorkerDirectory
from unified.errors import RpcError
from unified.protocol.envelope import BUS_VERSION, Envelope, Kind, encode_envelope
from unified.protocol.records import Inbox

logger = logging.getLogger(__name__)
BURST_S = 0.0002
"""Seconds between calls to one peer below which they share writes, until somebody waits for one, or for a tick."""
_ENDS = (Kind.RESULT, Kind.ERROR)
"""Kinds that never wait on a link: instead no further handlers are begun (`UnixConnection.is_full`)."""


class Sender:
    """Sends all messages of one endpoint.

    Args:
        pool: waits for room where the sending thread must not.
        memory: shared memory for large payloads on this host.
        directory: has the inboxes of living peers.
        trimmer: gives back idle parts of `memory`.
        limit_bytes: bytes that may wait on one connection before a sender that may wait has to.
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
        self._places = itertools.count(1)
        self._holding: set[UnixConnection] = set()
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

        A call that is sent again keeps its place among the calls that were sent. A new one takes its place as late as
        can be: the callee refuses a call that is far behind (`unified.bus.calls.dispatcher`), and to copy a large
        argument takes as long as many small calls.
        """
        shared, buffers = self._share(connection, payload)
        call.place = call.place or next(self._places)
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
            call.place,
        )
        self.send(connection, envelope, payload.content.body, buffers, may_wait, call.has_ended)

    def reply(self, call: InboundCall, kind: Kind, answer: SerializedValue, may_wait: bool, count: int = 0) -> bool:
        """Answer a call; False if that cannot be done, or not without waiting."""
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
            answer.buffers.clear()  # copied: what it was made in shall be free for the answer to the next call
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
        """Send a CANCEL or a MORE; lost, the handler runs on for nothing, or waits for the caller's end."""
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
        """Send a message; False if there was no room, and `may_wait` or `give_up` forbade to wait for it."""
        frame = encode_envelope(envelope)
        if isinstance(connection, UnixConnection):
            pieces = pack(frame, body, buffers)
            if self._shares_write(connection, envelope.kind) and len(pieces) == 1 and len(pieces[0]) <= JOINED_BYTES:
                if connection.hold(pieces[0]) and connection not in self._holding:
                    self._holding.add(connection)
                    self._io.tick_soon()
                return True
            connection.send(pieces)
            if may_wait and connection.backlog_bytes > self._limit_bytes and envelope.kind not in _ENDS:
                self._wait(lambda: connection.wait_for_room(self._limit_bytes, lambda: self.is_closing or give_up()))
            return True
        frames: list[Buffer] = [frame, body, *buffers]
        if connection.try_send(frames):
            return True
        if may_wait:
            return self._wait(lambda: connection.send(frames, lambda: self.is_closing or give_up()))
        if envelope.kind is Kind.ITEM:
            return False  # its stream asks again
        self._pool.submit(lambda: self._wait(lambda: connection.send(frames, lambda: self.is_closing or give_up())))
        return True

    def _wait(self, work: Callable[[], bool]) -> bool:
        """Wait for room without keeping a thread of the pool from others, who may have more luck with their peers."""
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
        granted = payload.grant(self._memory, connection.peer_id)
        if granted is None:
            return None, buffers
        if connection.is_lost:  # and what was on its connection there forgotten, perhaps before this was
            self._memory.forget(connection.peer_id)
        self._trimmer.soon()
        return granted.shared, granted.frames

    def release(self) -> None:
        """Send what was held back."""
        while self._holding:
            with contextlib.suppress(KeyError):
                self._holding.pop().release()

    @property
    def is_holding(self) -> bool:
        """Something was kept back."""
        return bool(self._holding)

    def _shares_write(self, link: UnixConnection, kind: Kind) -> bool:
        """Return True if a message may wait a little for others to be written with."""
        if kind is Kind.CALL:
            now = time.monotonic()
            is_burst = now - link.sent_at < BURST_S
            link.sent_at = now
            return is_burst
        return kind is Kind.RESULT and self._io.has_more and self._io.is_leader()

    def _inbox_of(self, inbox_id: str, is_relayed: bool) -> Inbox | None:
        """Return the inbox that an answer goes to; None if that is known to be dead. The relay's callers need not be
        known."""
        known = self._connections.greeted(inbox_id) or self._directory.inbox(inbox_id)
        return Inbox(inbox_id=inbox_id) if known is None and is_relayed else known
