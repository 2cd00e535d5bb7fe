"""What comes in: each message is looked at, and given to whom it concerns."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from unified.bus.calls import pending
from unified.bus.calls.admission import Intake, TooOldError
from unified.bus.calls.client import CallDesk
from unified.bus.calls.inbound import InboundCall
from unified.bus.calls.remote_errors import describe_ours
from unified.bus.calls.sender import Courier
from unified.bus.calls.server import CallService
from unified.bus.codec.codec import Encoded
from unified.bus.codec.tensors import Buffer
from unified.bus.shm.reader import PayloadGoneError, SharedReader
from unified.bus.transport.connections import PostOffice
from unified.bus.transport.framing import Frames
from unified.bus.transport.io_threads import Receiver
from unified.bus.transport.listeners import Mail
from unified.bus.transport.unix_connection import Link
from unified.errors import BusOverloadedError, ProtocolError, RouteLostError, RpcError
from unified.protocol.envelope import BUS_VERSION, Envelope, Kind, decode_hello, decode_undelivered
from unified.protocol.records import Inbox

logger = logging.getLogger(__name__)
_ANSWERS = (Kind.RESULT, Kind.ITEM, Kind.ERROR, Kind.STREAM)  # no set: to hash an enum takes longer than to look


class MailSorter:
    """Hands on what one endpoint receives. What cannot be believed or read is counted and dropped.

    Args:
        job_id, inbox, worker: of this endpoint.
        intake: looks at envelopes.
        desk: gets the answers.
        service: gets the calls.
        on_link_lost: a link began with rubbish.
    """

    def __init__(
        self,
        *,
        job_id: str,
        inbox: Inbox,
        worker: str,
        intake: Intake,
        desk: CallDesk,
        service: CallService,
        courier: Courier,
        post: PostOffice,
        receiver: Receiver,
        reader: SharedReader,
        on_link_lost: Callable[[Link, str], None],
    ) -> None:
        self._job_id = job_id
        self._inbox = inbox
        self._worker = worker
        self._intake = intake
        self._desk = desk
        self._service = service
        self._courier = courier
        self._post = post
        self._receiver = receiver
        self._reader = reader
        self._on_link_lost = on_link_lost

    def take_mail(self, link: Link, frames: Frames) -> None:
        """On the thread that leads: what a peer of this host has sent."""
        try:
            envelope = self._intake.read(frames.envelope)
            if envelope.kind is Kind.HELLO:
                inbox = decode_hello(frames.body)
                self._post.greet(envelope.sender, inbox)
                link.peer_id = envelope.sender
                link.meet(inbox, self._inbox)
                return
            if envelope.sender != link.peer_id:
                raise ProtocolError(f"from inbox {envelope.sender!r}, which is not who said HELLO on this connection")
            buffers = self._buffers(envelope, frames, link)
            self._dispatch(envelope, frames.body, buffers, link, False)
        except ProtocolError as error:
            self._intake.reject(error)
            if not link.peer_id:  # it did not even begin as it should
                self._on_link_lost(link, str(error))
        except Exception:
            logger.exception("worker=%s event=mail-failed: the bus goes on", self._worker)

    def _buffers(self, envelope: Envelope, frames: Frames, link: Link) -> list[Buffer]:
        """Those of a message, wherever they lie.

        Raises:
            ProtocolError: they cannot be read here; whoever waits has been told.
        """
        if envelope.shared is None:
            return frames.buffers
        try:
            buffers = self._reader.borrow(envelope.sender, envelope.shared, frames.buffers)
        except ProtocolError as error:
            self._refuse_unreadable(envelope, link, error)
            raise
        self._desk.want_trims()
        return buffers

    def _refuse_unreadable(self, envelope: Envelope, link: Link, reason: ProtocolError) -> None:
        """Its caller waits, and is not to wait for ever."""
        if envelope.kind in _ANSWERS and isinstance(reason, PayloadGoneError):
            self._desk.step(pending.MailLost(call_id=envelope.call_id, reason=str(reason)))
        elif envelope.kind in _ANSWERS:
            self._desk.fail(envelope.call_id, reason)
        elif envelope.kind is Kind.CALL:
            error = RpcError(f"the arguments of {envelope.method!r} cannot be read in worker {self._worker}: {reason}")
            self._answer_with(error, envelope, link, False)

    def _answer_too_old(self, envelope: Envelope, link: Link | None, is_relayed: bool) -> None:
        """A repetition, most likely, whose caller has long had its answer. If not, it waits: for ever, without this."""
        error = RouteLostError(
            f"the call of {envelope.method!r} reached worker {self._worker} behind so many later ones that it cannot "
            "be told from a repetition, and was not run; whether it had run before is not known. Call again if it may "
            "run twice."
        )
        self._answer_with(error, envelope, link, is_relayed)

    def _answer_with(self, error: RpcError, envelope: Envelope, link: Link | None, is_relayed: bool) -> None:
        """Tell the caller of a call that is not taken in."""
        call = InboundCall(
            envelope.call_id,
            envelope.sender,
            envelope.worker,
            envelope.method,
            None,
            b"",
            [],
            link=link,
            is_relayed=is_relayed,
        )
        self._courier.reply(call, Kind.ERROR, Encoded(describe_ours(error), []), False)

    def take_answer(self, link: Link, frames: Frames) -> None:
        """On whichever thread reads it: what came on a link of ours."""
        is_lent = self._receiver.lend()
        try:
            envelope = self._intake.read(frames.envelope)
            if envelope.sender != link.peer_id or envelope.kind not in _ANSWERS:
                if envelope.kind is Kind.WAITS and envelope.sender == link.peer_id:
                    self._service.watch.hear(envelope.call_id, frames.body)
                    return
                raise ProtocolError(f"{envelope.kind.name} from {envelope.sender!r} on a link to {link.peer_id!r}")
            buffers = self._buffers(envelope, frames, link)
            self._desk.take(envelope, frames.body, buffers)
        except ProtocolError as error:
            self._intake.reject(error)
        except Exception:
            logger.exception("worker=%s event=mail-failed: the bus goes on", self._worker)
        finally:
            if is_lent:
                self._receiver.take_back()

    def take_remote(self, mail: Mail) -> None:
        """On the thread for other hosts."""
        try:
            envelope = self._intake.read(mail.envelope)
            if envelope.kind in _ANSWERS:
                self._desk.take(envelope, mail.body, mail.buffers)
            elif envelope.kind is Kind.HELLO:
                self._post.greet(envelope.sender, decode_hello(mail.body))
            elif envelope.kind is Kind.UNDELIVERABLE:
                self._on_undeliverable(envelope, mail)
            else:
                self._dispatch(envelope, mail.body, mail.buffers, None, mail.is_relayed)
        except ProtocolError as error:
            self._intake.reject(error)
        except Exception:
            logger.exception("worker=%s event=mail-failed: the bus goes on", self._worker)

    def _dispatch(
        self, envelope: Envelope, body: Buffer, buffers: list[Buffer], link: Link | None, is_relayed: bool
    ) -> None:
        match envelope.kind:
            case Kind.CALL:
                try:
                    self._intake.check_new(envelope)
                except TooOldError:
                    self._answer_too_old(envelope, link, is_relayed)
                    raise
                expires = None if envelope.timeout_s is None else time.monotonic() + envelope.timeout_s
                self._service.accept(
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
                self._service.cancel(envelope.sender, envelope.call_id)
            case Kind.MORE:
                self._service.more(envelope.sender, envelope.call_id, envelope.count)
            case Kind.WAITS:
                self._service.watch.hear(envelope.call_id, body)
            case _:
                raise ProtocolError(f"an unexpected {envelope.kind.name} from worker {envelope.worker}")

    def relay_lost(self) -> None:
        """The connection to the relay broke: what was on its way may be lost."""
        self._desk.relay_lost()
        self._service.relay_lost(self._post.is_relayed)

    def _on_undeliverable(self, envelope: Envelope, mail: Mail) -> None:
        lost = decode_undelivered(mail.body)
        if lost.kind is Kind.CALL:
            self._desk.step(pending.DeliveryFailed(call_id=envelope.call_id, code=lost.code))
        elif lost.kind is Kind.MORE:
            words = {"unknown-target": "the relay does not know it", "overloaded": "too much waits for it at the relay"}
            self._desk.step(pending.MailLost(call_id=envelope.call_id, reason=words[lost.code]))
        elif lost.kind in _ANSWERS:
            self._service.cancel(lost.target, envelope.call_id)  # a stream of which an item was lost is of no use
            if lost.code == "overloaded":
                error = BusOverloadedError(
                    f"worker {self._worker} answered {envelope.method!r}, and the relay dropped the answer: too many "
                    "bytes already wait there for the caller. Call less at once, or ask for smaller results."
                )
                ours = Envelope(
                    BUS_VERSION,
                    Kind.ERROR,
                    envelope.call_id,
                    self._inbox.inbox_id,
                    self._worker,
                    lost.target,
                    envelope.method,
                    job=self._job_id,
                )
                way = self._post.way(Inbox(inbox_id=lost.target))
                self._courier.send(way, ours, describe_ours(error), [], False, lambda: False)
