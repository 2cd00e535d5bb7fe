"""The bus relay: forwards messages between workers that cannot reach each other directly.

A worker connects a DEALER whose ZeroMQ identity is its inbox id, and may send through any other DEALER. A message goes
to the inbox id that its envelope names. The relay reads only envelopes. It remembers only series in progress: once a
piece is lost, the series' later pieces and its final message are lost, too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Literal

import zmq

from unified.config.logging import LogOnce
from unified.config.ports import bind_address
from unified.errors import ProtocolError, UnifiedError, UsageError
from unified.protocol.envelope import (
    BUS_VERSION,
    Envelope,
    Kind,
    Undelivered,
    decode_envelope,
    encode_envelope,
    encode_record,
)
from unified.security.curve import Gatekeeper
from unified.security.keys import ClusterKey
from unified.threads import start_thread

logger = logging.getLogger(__name__)
LossCode = Literal["unknown-target", "overloaded"]
_TRACKED_BYTES = 64 * 1024
"""Least size of frames that count towards `limit_bytes`; smaller frames are bounded by their number."""
_MAX_QUEUED_MESSAGES = 10_000
_MAX_IDLE_QUEUES = 256
_MAX_SERIES = 4096
_BATCH = 200
"""Most messages between two checks whether the loop must end."""
_HEARTBEAT_MS = 5_000
_BACKLOG = 4096
"""Workers that may connect at one moment, as they do when a large job starts."""
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # `|` of enum members costs more than a send


class BusRelay:
    """The relay: a ROUTER on a thread of its own.

    Args:
        bind: where to listen, such as ``tcp://10.0.0.1:0`` (0: any free port).
        host: under which name others reach it; needed when `bind` names a wildcard.
        limit_bytes: bytes that may wait for one slow receiver. Beyond it, messages go back to their sender.
        key: the cluster's key, which every peer must have; None lets everybody in.

    Attributes:
        num_forwarded, num_undeliverable, num_rejected: counts since the start.
    """

    def __init__(
        self, bind: str, *, host: str = "", limit_bytes: int = 256 * 1024 * 1024, key: ClusterKey | None = None
    ) -> None:
        self.bind = bind
        self.host = host
        self.limit_bytes = limit_bytes
        self.num_forwarded = 0
        self.num_undeliverable = 0
        self._key = key
        self._rejections = LogOnce()
        self._queued: dict[str, deque[tuple[zmq.MessageTracker, int]]] = {}
        self._series: dict[tuple[str, str], tuple[int, LossCode | None]] = {}
        """Series in progress, by sender and target: the number, and why the series is lost, if it is."""
        self._thread: threading.Thread | None = None
        self._stop: zmq.Socket[bytes] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._gatekeeper: Gatekeeper | None = None

    @property
    def num_rejected(self) -> int:
        return self._rejections.total

    def start(self) -> str:
        """Bind, start the thread, and return the address for workers; UnifiedError: it cannot be bound."""
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 65536)
        router = self._context.socket(zmq.ROUTER)
        self._gatekeeper = gatekeeper = Gatekeeper(self._context, self._key, name="relay")
        router.set(zmq.LINGER, 0)
        router.set(zmq.ROUTER_MANDATORY, 1)
        router.set(zmq.SNDHWM, _MAX_QUEUED_MESSAGES)
        router.set(zmq.RCVHWM, _MAX_QUEUED_MESSAGES)
        router.set(zmq.BACKLOG, _BACKLOG)
        router.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        router.set(zmq.HEARTBEAT_TIMEOUT, 3 * _HEARTBEAT_MS)
        router.set(zmq.IPV6, "[" in self.bind)  # only if needed: it shows IPv4 addresses in mapped form
        gatekeeper.guard(router)
        try:
            bind_address(router.bind, self.bind)
        except (zmq.ZMQError, UsageError) as error:
            gatekeeper.close()
            router.close(0)
            self._context.term()
            reason = f"the bus relay cannot listen on {self.bind}: {error}. Choose another address."
            raise UnifiedError(reason) from None
        bound = router.get_string(zmq.LAST_ENDPOINT)
        stop_in = self._context.socket(zmq.PAIR)
        stop_in.bind("inproc://stop")
        self._stop = self._context.socket(zmq.PAIR)
        self._stop.connect("inproc://stop")
        self._thread = start_thread("bus-relay", self._run, router, stop_in)
        return f"tcp://{self.host}:{bound.rpartition(':')[2]}" if self.host else bound

    def close(self) -> None:
        """Stop forwarding, drop what waits, and release the port."""
        if self._thread is None or self._stop is None or self._context is None:
            return
        self._stop.send(b"")
        self._thread.join()
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        self._stop.close(0)
        self._context.term()
        self._thread = None

    def _run(self, router: zmq.Socket[bytes], stop: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(stop, zmq.POLLIN)
        while stop not in dict(poller.poll()):
            for _ in range(_BATCH):
                try:
                    frames = router.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                try:
                    self._forward(router, frames)
                except Exception:
                    logger.exception("event=relay-failed: one message is lost, the relay goes on")
        router.close(0)
        stop.close(0)

    def _forward(self, router: zmq.Socket[bytes], frames: list[zmq.Frame]) -> None:
        try:
            envelope = decode_envelope(frames[1].buffer if len(frames) > 1 else b"")
            target = envelope.target.encode()
            if not target or len(target) > 255:
                raise ProtocolError(f"an inbox id of {len(target)} bytes")
        except ProtocolError as error:
            text = str(error)[:300]
            if self._rejections.is_new(time.monotonic(), text):
                logger.warning("event=relay-rejected reason=%r (more like it are only counted)", text)
            return
        code = self._pass_on(router, envelope, [target, *frames[1:]])
        if envelope.kind is Kind.PIECE:
            return
        if code is None:
            self.num_forwarded += envelope.kind is not Kind.HELLO  # a HELLO asks whether the relay knows its sender
            return
        self.num_undeliverable += 1
        if envelope.kind is not Kind.UNDELIVERABLE:
            self._give_back(router, envelope, code)

    def _pass_on(
        self, router: zmq.Socket[bytes], envelope: Envelope, frames: list[bytes | zmq.Frame]
    ) -> LossCode | None:
        """Send a message, unless an earlier piece of its series was lost."""
        if envelope.series is None:
            return self._send(router, envelope.target, frames)
        pair, number = (envelope.sender, envelope.target), envelope.series.number
        begun, code = self._series.pop(pair, (0, None))
        if begun != number or code is None:
            code = self._send(router, envelope.target, frames, has_begun=begun == number)
        if envelope.kind is Kind.PIECE:
            self._series[pair] = number, code
            if len(self._series) > _MAX_SERIES:  # some senders are gone
                del self._series[next(iter(self._series))]
        return code

    def _send(
        self, router: zmq.Socket[bytes], target: str, frames: list[bytes | zmq.Frame], *, has_begun: bool = False
    ) -> LossCode | None:
        """Queue a message without waiting; return None on success. A series that `has_begun` may exceed the limit."""
        large = [frame for frame in frames if isinstance(frame, zmq.Frame) and len(frame) >= _TRACKED_BYTES]
        if large and not self._has_room(target) and not has_begun:
            return "overloaded"
        # a received frame cannot be tracked, a new one over its memory can; the last frame leaves after all others
        last = large[-1] if large else None
        tracked = zmq.Frame(last.buffer, track=True) if last is not None else None
        try:
            for index, frame in enumerate(frames):
                more = _MORE if index < len(frames) - 1 else _NOBLOCK
                router.send(tracked if tracked is not None and frame is last else frame, more, copy=False)
        except zmq.Again:
            return "overloaded"
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                logger.warning("event=relay-send-failed target=%s reason=%s", target, error)
            self._queued.pop(target, None)
            return "unknown-target"
        if tracked is not None:
            self._queued.setdefault(target, deque()).append((tracked.tracker, sum(map(len, large))))
        if len(self._queued) > _MAX_IDLE_QUEUES:  # some receivers are gone
            for each in list(self._queued):
                self._has_room(each)
        return None

    def _has_room(self, target: str) -> bool:
        queue = self._queued.get(target)
        while queue and queue[0][0].done:
            queue.popleft()
        if not queue:
            self._queued.pop(target, None)
            return True
        return sum(nbytes for _, nbytes in queue) < self.limit_bytes

    def _give_back(self, router: zmq.Socket[bytes], lost: Envelope, code: LossCode) -> None:
        envelope = Envelope(
            version=BUS_VERSION,
            kind=Kind.UNDELIVERABLE,
            call_id=lost.call_id,
            sender="",
            worker="the bus relay",
            target=lost.sender,
            method=lost.method,
            trace_id=lost.trace_id,
        )
        body = encode_record(Undelivered(kind=lost.kind, target=lost.target, code=code))
        sender = lost.sender.encode()
        if 0 < len(sender) <= 255:
            self._send(router, lost.sender, [sender, encode_envelope(envelope), body])
