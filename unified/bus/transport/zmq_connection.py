"""Connection to one peer on another host by ZeroMQ, and by the relay while no direct one can be had."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import zmq

from unified.bus.buffers import Buffer
from unified.bus.transport.failover import DirectOrRelay, State
from unified.bus.transport.io_threads import IoThreads
from unified.core.backoff import Backoff
from unified.security.curve import Gatekeeper, read_event

MAX_QUEUED_MESSAGES = 16_384
TRACKED_BYTES = 64 * 1024
"""Size of a frame from which on ZeroMQ sends from the caller's memory, and tells when it is done with it."""
HEARTBEAT_MS = 5_000
Socket = zmq.Socket[bytes]
Messages = Sequence[Sequence[Buffer]]
"""A message that is sent, and before it those with the pieces of its large buffers (`unified.bus.transport.pieces`)."""
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # `|` of enum members costs more than a send
_SEND_AGAIN = Backoff(first_s=0.0002, limit_s=0.005, num_free=0)


class SocketSender:
    """One socket behind one lock. Sending never waits inside ZeroMQ, so that closing never waits for a sender.

    Args:
        kind: zmq.DEALER for the relay, zmq.PUSH for a peer.
        limit_bytes: of large frames, what may be on its way at once.

    Attributes:
        is_relay: what is sent now goes through the relay.
        may_give_back: it may be given back as undeliverable, to be sent again.
    """

    def __init__(self, gatekeeper: Gatekeeper, kind: int, address: str, limit_bytes: int) -> None:
        self.address = address
        self.is_relay = self.may_give_back = kind == zmq.DEALER
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._on_way: deque[tuple[zmq.MessageTracker, int]] = deque()
        self._socket: Socket | None = gatekeeper.socket(kind)
        self._socket.set(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
        self._socket.set(zmq.IPV6, "[" in address)
        self._socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.set(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
        self._prepare(gatekeeper, self._socket)
        self._socket.connect(address)

    def _prepare(self, gatekeeper: Gatekeeper, socket: Socket) -> None:
        """Set further options before the socket connects."""

    def try_send(self, messages: Messages) -> bool:
        """Queue a message, its pieces first; return False if the queue is full, and it is to be sent from the start.
        Once closed it goes nowhere: the peer is dead."""
        with self._lock:
            socket = self._socket
            if socket is None:
                return self._send_otherwise(messages)
            if self._on_way and not self._has_room():
                return False
            try:
                for frames in messages:
                    self._put(socket, frames)
            except zmq.Again:  # only the first frame of each can meet a full queue
                return False
            return True

    def send(self, messages: Messages, give_up: Callable[[], bool]) -> bool:
        """Queue a message, waiting for room until `give_up` says so; then return False."""
        num_tries = 0
        while not self.try_send(messages):
            if give_up():
                return False
            time.sleep(_SEND_AGAIN.delay_s(num_tries))  # ZeroMQ tells only its own threads when there is room
            num_tries += 1
        return True

    def close(self, linger_ms: int = 0) -> None:
        """Drop the connection; what is queued is given `linger_ms` to leave."""
        with self._lock:
            if self._socket is not None:
                self._socket.close(linger_ms)
                self._socket = None
                self._on_way.clear()

    def _send_otherwise(self, messages: Messages) -> bool:
        """Send, under the lock, where no socket is to be used; as `try_send`."""
        return True

    def _put(self, socket: Socket, frames: Sequence[Buffer]) -> None:
        for frame in frames[:-1]:
            self._send_frame(socket, frame, _MORE)
        self._send_frame(socket, frames[-1], _NOBLOCK)

    def _send_frame(self, socket: Socket, frame: Buffer, flags: int) -> None:
        nbytes = frame.nbytes if isinstance(frame, memoryview) else len(frame)
        if nbytes < TRACKED_BYTES:
            socket.send(frame, flags)
            return
        tracked = zmq.Frame(frame, track=True, copy=False)
        socket.send(tracked, flags, copy=False)
        self._on_way.append((tracked.tracker, nbytes))

    def _has_room(self) -> bool:
        while self._on_way and self._on_way[0][0].done:
            self._on_way.popleft()
        return sum(nbytes for _, nbytes in self._on_way) < self._limit_bytes


_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_MAX_HELD = MAX_QUEUED_MESSAGES - 1
"""Number for which, with the greeting, there is room in the socket once it is connected."""
_LONGEST_PAUSE_MS = 5_000
"""Time between attempts to connect, and for one attempt: of a thousand peers out of reach all are tried on."""
_numbers = itertools.count()


class Owner(Protocol):
    """The connection table, as its connections see it."""

    gatekeeper: Gatekeeper
    limit_bytes: int
    has_relay: bool
    files: IoThreads

    def find_relay(self) -> SocketSender | None:
        """Return the sender to the relay, unless there is none or all is being closed."""

    def state_changed(self, connection: ZmqConnection, before: State) -> None:
        """The connection got another state, on the thread that noticed, which holds no lock."""


class ZmqConnection(SocketSender):
    """Keeps what is sent until it is connected, and hands it to the relay if that takes too long (`DirectOrRelay`).

    Args:
        inbox_id: of the peer.
        greeting: a message to send before all others on the connection.
        is_relayed: begin through the relay.
    """

    def __init__(
        self, owner: Owner, address: str, inbox_id: str, greeting: Sequence[Buffer], *, is_relayed: bool
    ) -> None:
        self._monitor: Socket | None = None
        self._fd = -1
        super().__init__(owner.gatekeeper, zmq.PUSH, address, owner.limit_bytes)
        self.inbox_id = inbox_id
        self._owner = owner
        self._greeting = greeting
        self._held: deque[Messages] = deque()
        self._num_held = 0
        self._num_held_bytes = 0
        self._route = DirectOrRelay(time.monotonic(), has_relay=owner.has_relay, is_relayed=is_relayed)
        self._unconnected, self._socket = self._socket, None  # so that `try_send` has to look at one thing only
        self._show()
        if self._monitor is not None:
            self._fd = self._monitor.get(zmq.FD)
            owner.files.watch_file(self._fd, self.read)

    def _prepare(self, gatekeeper: Gatekeeper, socket: Socket) -> None:
        socket.set(zmq.RECONNECT_IVL_MAX, _LONGEST_PAUSE_MS)
        socket.set(zmq.CONNECT_TIMEOUT, _LONGEST_PAUSE_MS)
        events = f"inproc://unified.direct.{next(_numbers)}"
        socket.monitor(events, _EVENTS)
        self._monitor = monitor = gatekeeper.context.socket(zmq.PAIR)
        monitor.linger = 0
        monitor.rcvhwm = 0  # if events could not wait, libzmq would stop the socket instead
        monitor.connect(events)

    @property
    def state(self) -> State:
        return self._route.state

    def read(self) -> None:
        """Take in what the connection's monitor has to say."""
        self._advance(self._read_events)

    def look(self, now: float) -> None:

        def take_in() -> None:
            if self._route.state == "relayed" and not self._pass_on():
                self._route.used_relay(now)
            self._route.passed(now)

        self._advance(take_in)

    def close(self, linger_ms: int = 0) -> None:
        """Close as `SocketSender.close` does; what waits for a connection is given that time too."""
        with self._lock:
            if linger_ms and self._route.state == "connecting":
                self._go_up()
            self._drop(linger_ms)

    def _advance(self, take_in: Callable[[], None]) -> None:
        with self._lock:
            if self._monitor is None:
                return
            before = self._route.state
            take_in()
            after = self._route.state
            self._show()
            if after == "up":
                self._go_up()
            elif after == "relayed":
                self._pass_on()
            elif after == "broken":
                self._drop(0)
        if after != before:
            self._owner.state_changed(self, before)

    def _read_events(self) -> None:
        while self._monitor is not None:
            try:
                kind, _ = read_event(self._monitor)
            except zmq.Again:
                return
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._route.connected()
            elif kind == zmq.EVENT_DISCONNECTED:
                self._route.disconnected()

    def _show(self) -> None:
        """Publish where what is sent from now on goes."""
        self.is_relay = self._route.state == "relayed"
        self.may_give_back = self._route.state in ("connecting", "relayed")

    def _send_otherwise(self, messages: Messages) -> bool:
        if self._unconnected is None:
            return True
        if self._route.state == "relayed":
            self._route.used_relay(time.monotonic())
            relay = self._owner.find_relay()
            return relay is not None and self._pass_on() and relay.try_send(messages)
        if self._num_held + len(messages) > _MAX_HELD or self._num_held_bytes >= self._limit_bytes:
            return False
        self._held.append(messages)
        self._num_held += len(messages)
        self._num_held_bytes += sum(memoryview(frame).nbytes for frames in messages for frame in frames)
        return True

    def _pass_on(self) -> bool:
        """Have the relay take what was kept; return whether nothing is left."""
        relay = self._owner.find_relay() if self._held else None
        while self._held and relay is not None and relay.try_send(self._held[0]):
            self._held.popleft()
        return not self._held

    def _go_up(self) -> None:
        """Send what was kept, and from now on what is sent."""
        if self._unconnected is None:
            return
        self._socket, self._unconnected = self._unconnected, None
        for frames in (self._greeting, *itertools.chain.from_iterable(self._held)):
            self._put(self._socket, frames)
        self._held.clear()

    def _drop(self, linger_ms: int) -> None:
        if self._monitor is None:
            return
        socket = self._socket or self._unconnected
        self._socket = self._unconnected = None
        self._held.clear()
        self._on_way.clear()
        if socket is not None:
            socket.disable_monitor()  # first: with nobody at its other end libzmq would wait
            socket.close(linger_ms)
        self._owner.files.unwatch_file(self._fd)
        self._monitor.close(0)
        self._monitor = None
