"""Dispatcher of incoming messages: after admission, calls go to the call server, answers and items to the client.

Admission checks the version, the job, the inbox, the sender, and whether the message came before.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from unified.bus.buffers import Buffer
from unified.bus.calls import pending
from unified.bus.calls.client import CallClient
from unified.bus.calls.inbound import InboundCall
from unified.bus.calls.remote_errors import describe_ours
from unified.bus.calls.sender import Sender
from unified.bus.calls.server import CallServer
from unified.bus.codec.codec import SerializedValue
from unified.bus.identity import BusIdentity
from unified.bus.shm.pool import SharedPool
from unified.bus.shm.reader import PayloadGoneError, SharedReader
from unified.bus.transport.bulk_receiver import BulkReceiver
from unified.bus.transport.connections import ConnectionTable, Tombstones
from unified.bus.transport.framing import Frames, RemoteMessage
from unified.bus.transport.io_threads import IoThreads
from unified.bus.transport.pieces import PieceJoiner
from unified.bus.transport.unix_connection import TransportEvents, UnixConnection
from unified.errors import BusOverloadedError, ProtocolError, RouteLostError, RpcError
from unified.protocol.envelope import (
    OUTSIDE,
    Bytes,
    Envelope,
    Kind,
    decode_envelope,
    decode_hello,
    decode_undelivered,
)
from unified.protocol.records import Inbox

MAX_OUTSIDERS = 256
"""Most callers from outside the job for which duplicates are found."""


class TooOldError(ProtocolError):
    """A call came so far behind others of its sender that nobody can tell whether it is a duplicate."""


class SeenCalls:
    """Set of the received calls of one sender, by their positions among all calls that it sent. Some of these go to
    other inboxes, and calls of several threads may overtake one another a little. The set takes some 20 KiB at most."""

    KEPT = 65_536
    """Distance behind the newest call at which a call is too old."""
    _BITS = 512

    def __init__(self) -> None:
        self._blocks: dict[int, int] = {}
        """Blocks with one bit for each received call."""
        self._first_block = 0

    def is_new(self, position: int) -> bool:
        """Add a call; return True if it has surely not come before."""
        number, bit = position // self._BITS, 1 << (position % self._BITS)
        if number < self._first_block:
            return False
        block = self._blocks.get(number)
        if block is None:
            self._begin(number)
            block = 0
        if block & bit:
            return False
        self._blocks[number] = block | bit
        return True

    def is_too_old(self, position: int) -> bool:
        """Return True if the call is so old that nobody can tell whether it came before."""
        return position // self._BITS < self._first_block

    def _begin(self, number: int) -> None:
        first = number - self.KEPT // self._BITS
        if first > self._first_block:
            self._first_block = first
            self._blocks = {each: block for each, block in self._blocks.items() if each >= first}


class Admission:
    """Admission of messages to one inbox: checks of version, job, inbox, sender and duplicates. `num_rejected` messages
    were dropped. Calls of dead incarnations (`tombstones`) are refused."""

    def __init__(self, identity: BusIdentity, tombstones: Tombstones) -> None:
        self._job_id = identity.job
        self._inbox_id = identity.inbox
        self._worker = identity.worker
        self._tombstones = tombstones
        self._seen: dict[str, SeenCalls] = {}
        self._outsiders: deque[str] = deque()
        self.on_outsider_gone: Callable[[str], object] = lambda inbox_id: None
        """Called with the inbox id of a caller from outside the job that was forgotten."""
        self._logged: set[tuple[object, ...]] = set()
        self.num_rejected = 0
        self.num_read = 0
        """Messages of calls. WAITS does not count: it comes even while nothing goes on."""

    def read(self, frame: Bytes) -> Envelope:
        """Decode the first frame of a message for this inbox; ProtocolError: drop the message."""
        envelope = decode_envelope(frame)
        if envelope.target != self._inbox_id:
            raise ProtocolError(f"for inbox {envelope.target!r}, but this incarnation has another inbox")
        if envelope.job != self._job_id and envelope.sender:  # the relay serves all jobs, and has no sender name
            raise ProtocolError(f"from worker {envelope.worker} of job {envelope.job!r}, but this is {self._job_id!r}")
        if envelope.kind is not Kind.WAITS:
            self.num_read += 1
        return envelope

    def check_new(self, envelope: Envelope) -> None:
        """Check that a call may run; ProtocolError: it is a duplicate (TooOldError: unknown), or its sender is dead."""
        seen = self._seen.get(envelope.sender)
        if seen is None:
            if envelope.sender in self._tombstones:
                raise ProtocolError(
                    f"call {envelope.call_id} of an incarnation of worker {envelope.worker} that is over"
                )
            if envelope.worker.startswith(OUTSIDE):
                self._meet_outsider(envelope.sender)
            seen = self._seen[envelope.sender] = SeenCalls()
        if not seen.is_new(envelope.count):
            if seen.is_too_old(envelope.count):
                raise TooOldError(
                    f"call {envelope.call_id} of worker {envelope.worker} came behind {SeenCalls.KEPT} later ones"
                )
            raise ProtocolError(f"call {envelope.call_id} of worker {envelope.worker} came a second time")

    def _meet_outsider(self, inbox_id: str) -> None:
        """Add a caller from outside the job. Nobody reports its end: beyond the limit the oldest is forgotten."""
        self._outsiders.append(inbox_id)
        if len(self._outsiders) > MAX_OUTSIDERS:
            gone = self._outsiders.popleft()
            self.forget(gone)
            self.on_outsider_gone(gone)

    def forget(self, inbox_id: str) -> None:
        """Forget the calls of an incarnation that is over; `tombstones` has it."""
        self._seen.pop(inbox_id, None)

    def reject(self, error: ProtocolError) -> None:
        """Count a message that was dropped; the first of each kind is logged."""
        self.num_rejected += 1
        kind = (type(error), *_raised_at(error.__traceback__))
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning(
                "worker=%s event=mail-rejected reason=%r (further ones like it are only counted)",
                self._worker,
                str(error),
            )


def _raised_at(trace: TracebackType | None) -> tuple[object, ...]:
    """Return the line of code that raised: it names the kind of an error whose text differs each time."""
    if trace is None:
        return ()
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code, trace.tb_lineno


logger = logging.getLogger(__name__)
_ANSWERS = (Kind.RESULT, Kind.ITEM, Kind.ERROR, Kind.STREAM)  # no set: hashing an enum takes longer than a search


class Dispatcher(TransportEvents):
    """Gives each message that one endpoint receives to the part that handles its kind. Messages that fail admission or
    cannot be read are counted and dropped. `memory` is this process's shared memory, `reader` has that of others."""

    def __init__(
        self,
        identity: BusIdentity,
        client: CallClient,
        server: CallServer,
        sender: Sender,
        connections: ConnectionTable,
        io: IoThreads,
        memory: SharedPool,
        reader: SharedReader,
    ) -> None:
        self._identity = identity
        self._worker = identity.worker
        self._client = client
        self._server = server
        self._sender = sender
        self._connections = connections
        self._io = io
        self._memory = memory
        self._reader = reader
        self.pieces = PieceJoiner()
        self.bulk = BulkReceiver(connections.gatekeeper, self.pieces)
        self.admission = Admission(identity, connections.tombstones)
        self.admission.on_outsider_gone = connections.forget_relayed

    def message_came(self, link: UnixConnection, frames: Frames) -> None:
        """See `TransportEvents`, also for the other events."""
        try:
            envelope = self.admission.read(frames.envelope)
            if envelope.kind is Kind.HELLO:
                inbox = decode_hello(frames.body)
                self._connections.greet(envelope.sender, inbox)
                link.peer_id = envelope.sender
                link.meet(inbox, self._connections.inbox)
                return
            if envelope.sender != link.peer_id:
                raise ProtocolError(f"from inbox {envelope.sender!r}, but another one said HELLO on this connection")
            buffers = self._buffers(envelope, frames, link)
            self._dispatch(envelope, frames.body, buffers, link, False)
        except ProtocolError as error:
            self.admission.reject(error)
            if not link.peer_id:  # no valid HELLO came first
                self.connection_lost(link, str(error))
        except Exception:
            logger.exception("worker=%s event=mail-failed: the bus goes on", self._worker)

    def _buffers(self, envelope: Envelope, frames: Frames, link: UnixConnection) -> list[Buffer]:
        """Return the buffers of a message. ProtocolError: they cannot be read here; the call has been ended."""
        if envelope.shared is None:
            return frames.buffers
        try:
            buffers = self._reader.borrow(envelope.sender, envelope.shared, frames.buffers)
        except ProtocolError as error:
            self._refuse_unreadable(envelope, error, link)
            raise
        self._connections.trimmer.soon()
        return buffers

    def _refuse_unreadable(
        self, envelope: Envelope, reason: ProtocolError, link: UnixConnection | None, is_relayed: bool = False
    ) -> None:
        """End the call of a message that cannot be read: its caller must not wait for ever."""
        if envelope.kind in _ANSWERS and isinstance(reason, PayloadGoneError):
            self._client.step(pending.MailLost(call_id=envelope.call_id, reason=str(reason)))
        elif envelope.kind in _ANSWERS:
            self._client.fail(envelope.call_id, reason)
        elif envelope.kind is Kind.CALL:
            error = RpcError(f"the arguments of {envelope.method!r} cannot be read in worker {self._worker}: {reason}")
            self._answer_with(error, envelope, link, is_relayed)

    def _answer_too_old(self, envelope: Envelope, link: UnixConnection | None, is_relayed: bool) -> None:
        """Answer a call that may be a duplicate. Its caller may not have the answer, and would wait for ever."""
        error = RouteLostError(
            f"the call of {envelope.method!r} reached worker {self._worker} behind so many later ones that it cannot "
            "be told from a repetition, and was not run; whether it had run before is not known. Call again if it may "
            "run twice."
        )
        self._answer_with(error, envelope, link, is_relayed)

    def _answer_with(self, error: RpcError, envelope: Envelope, link: UnixConnection | None, is_relayed: bool) -> None:
        call = InboundCall(envelope.call_id, envelope.sender, envelope.worker, envelope.method, None, b"", [])
        call.link, call.is_relayed = link, is_relayed
        self._sender.reply(call, Kind.ERROR, SerializedValue(describe_ours(error), []), False)

    def answer_came(self, link: UnixConnection, frames: Frames) -> None:
        is_leading = self._io.begin_user_code()
        try:
            envelope = self.admission.read(frames.envelope)
            if envelope.sender != link.peer_id or envelope.kind not in _ANSWERS:
                if envelope.kind is Kind.WAITS and envelope.sender == link.peer_id:
                    self._server.deadlocks.hear(envelope.call_id, frames.body)
                    return
                raise ProtocolError(f"{envelope.kind.name} from {envelope.sender!r} on a link to {link.peer_id!r}")
            buffers = self._buffers(envelope, frames, link)
            self._client.take(envelope, frames.body, buffers)
        except ProtocolError as error:
            self.admission.reject(error)
        except Exception:
            logger.exception("worker=%s event=mail-failed: the bus goes on", self._worker)
        finally:
            if is_leading:
                self._io.end_user_code()

    def remote_came(self, mail: RemoteMessage) -> None:
        if mail.buffers:
            self._connections.trimmer.soon()
        try:
            envelope = self.admission.read(mail.envelope)
            if envelope.kind is Kind.PIECE:
                self.pieces.lay(envelope, mail)
                return
            if envelope.kind is Kind.BULK:
                self.bulk.expect(envelope.sender, bytes(mail.body))
                return
            try:
                buffers = self.pieces.collect(envelope, mail)
            except ProtocolError as error:
                self._refuse_unreadable(envelope, error, None, mail.is_relayed)
                raise
            if envelope.kind in _ANSWERS:
                self._client.take(envelope, mail.body, buffers)
            elif envelope.kind is Kind.HELLO:
                self._connections.greet(envelope.sender, decode_hello(mail.body))
            elif envelope.kind is Kind.UNDELIVERABLE:
                self._on_undeliverable(envelope, mail)
            else:
                self._dispatch(envelope, mail.body, buffers, None, mail.is_relayed)
        except ProtocolError as error:
            self.admission.reject(error)
        except Exception:
            logger.exception("worker=%s event=mail-failed: the bus goes on", self._worker)

    def _dispatch(
        self, envelope: Envelope, body: Buffer, buffers: list[Buffer], link: UnixConnection | None, is_relayed: bool
    ) -> None:
        match envelope.kind:
            case Kind.CALL:
                try:
                    self.admission.check_new(envelope)
                except TooOldError:
                    self._answer_too_old(envelope, link, is_relayed)
                    raise
                expires = None if envelope.timeout_s is None else time.monotonic() + envelope.timeout_s
                self._server.accept(
                    InboundCall(
                        envelope.call_id,
                        envelope.sender,
                        envelope.worker,
                        envelope.method,
                        expires,
                        body,
                        buffers,
                        envelope.trace_id,
                        envelope.chain,
                        link,
                        is_relayed,
                    )
                )
            case Kind.CANCEL:
                self._server.cancel(envelope.sender, envelope.call_id)
            case Kind.MORE:
                self._server.more(envelope.sender, envelope.call_id, envelope.count)
            case Kind.WAITS:
                self._server.deadlocks.hear(envelope.call_id, body)
            case _:
                raise ProtocolError(f"an unexpected {envelope.kind.name} from worker {envelope.worker}")

    def idle(self) -> None:
        self._sender.release()

    def became_writable(self, link: UnixConnection) -> None:
        self._server.resume(link)

    def connection_lost(self, link: UnixConnection, reason: str) -> None:
        self._connections.forget(link)
        link.close()
        if link.error is not None:
            self.admission.reject(link.error)
        if link.peer_id:
            self._memory.forget(link.peer_id)
        if link.is_ours:
            self._client.step(pending.LinkLost(inbox_id=link.peer_id, reason=reason))
        else:
            self._server.link_lost(link)

    def relayed(self, inbox_id: str) -> None:
        self._client.detoured(inbox_id)

    def lost(self, inbox_id: str, reason: str) -> None:
        self._client.step(pending.LinkLost(inbox_id=inbox_id, reason=reason))

    def unsure(self, inbox_id: str) -> None:
        self._server.answers_lost(lambda each: each == inbox_id, "its caller")

    def relay_found(self) -> None:
        self._connections.known_to_relay(True)

    def relay_lost(self) -> None:
        self._connections.known_to_relay(False)  # first: the calls that this drops are marked as relayed
        self._client.relay_lost()
        self._server.answers_lost(self._connections.is_relayed, "the bus relay")

    def _on_undeliverable(self, envelope: Envelope, mail: RemoteMessage) -> None:
        lost = decode_undelivered(mail.body)
        if lost.kind is Kind.CALL:
            self._client.step(pending.DeliveryFailed(call_id=envelope.call_id, code=lost.code))
        elif lost.kind is Kind.MORE:
            words = {"unknown-target": "the relay does not know it", "overloaded": "too much waits for it at the relay"}
            self._client.step(pending.MailLost(call_id=envelope.call_id, reason=words[lost.code]))
        elif lost.kind in _ANSWERS:
            self._server.cancel(lost.target, envelope.call_id)  # a stream that lost an item is useless
            if lost.code == "overloaded":
                error = BusOverloadedError(
                    f"worker {self._worker} answered {envelope.method!r}, and the relay dropped the answer: too many "
                    "bytes already wait there for the caller. Call less at once, or ask for smaller results."
                )
                ours = self._identity.envelope(Kind.ERROR, lost.target, envelope.call_id, envelope.method)
                connection = self._connections.connection(Inbox(inbox_id=lost.target))
                self._sender.send(connection, ours, describe_ours(error), [], False, lambda: False)
