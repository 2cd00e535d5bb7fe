"""Connection to one peer on another host by ZeroMQ, or by the relay while there is no direct one."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import zmq

from unified.bus.buffers import Buffer
from unified.bus.transport.bulk_sender import BulkSender, Messages
from unified.bus.transport.failover import DirectOrRelay, State
from unified.bus.transport.io_threads import IoThreads
from unified.core.backoff import Backoff
from unified.security.curve import Gatekeeper, read_event
from unified.threads import OwnedLock

MAX_QUEUED_MESSAGES = 16_384
TRACKED_BYTES = 64 * 1024
"""Size of a frame from which ZeroMQ sends from the caller's memory, and reports when it is done with it."""
HEARTBEAT_MS = 5_000
MAX_HELD = MAX_QUEUED_MESSAGES - 1
"""Most held messages: with a greeting, they fit into the queue of a new socket."""
Socket = zmq.Socket[bytes]
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # `|` of enum members costs more than a send
_SEND_AGAIN = Backoff(first_s=0.0002, limit_s=0.005, num_free=0)


class HeldMessages:
    """Messages that wait for a connection, oldest first: at most `MAX_HELD`; none is added from `limit_bytes` on."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._messages: deque[Messages] = deque()
        self._num = self._nbytes = 0

    def add(self, messages: Messages) -> bool:
        """Keep a message, its pieces first; return False if there is no room."""
        if self._num + len(messages) > MAX_HELD or self._nbytes >= self._limit_bytes:
            return False
        self._messages.append(messages)
        self._num += len(messages)
        self._nbytes += sum(memoryview(frame).nbytes for frames in messages for frame in frames)
        return True

    def __bool__(self) -> bool:
        return bool(self._messages)

    def pass_on(self, try_send: Callable[[Messages], bool]) -> bool:
        """Send the messages, as far as there is room; return whether none is left. Add none after this."""
        while self._messages and try_send(self._messages[0]):
            self._messages.popleft()
        return not self._messages

    def take(self) -> list[Messages]:
        """Return the messages, and forget them."""
        taken = list(self._messages)
        self._messages.clear()
        self._num = self._nbytes = 0
        return taken


class SocketSender:
    """One socket behind one lock. Sending never waits inside ZeroMQ, so that closing never waits for a sender.

    Args:
        kind: zmq.DEALER for the relay, zmq.PUSH for a peer.
        limit_bytes: most bytes of large frames on their way at once.

    Attributes:
        is_relay: messages sent now go through the relay.
        may_give_back: they may come back as undeliverable, to be sent again.
    """

    def __init__(self, gatekeeper: Gatekeeper, kind: int, address: str, limit_bytes: int) -> None:
        self.address = address
        self.is_relay = self.may_give_back = kind == zmq.DEALER
        self._gatekeeper = gatekeeper
        self._kind = kind
        self._limit_bytes = limit_bytes
        self.lock = self._lock = OwnedLock()
        self._on_way: deque[tuple[zmq.MessageTracker, int]] = deque()
        self._held = HeldMessages(limit_bytes)
        self._socket: Socket | None = None

    def _connect(self, server: str = "") -> Socket:
        socket = self._gatekeeper.socket(self._kind, server)
        socket.set(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
        socket.set(zmq.IPV6, "[" in self.address)
        socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.set(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
        self._prepare(socket)
        socket.connect(self.address)
        return socket

    def _prepare(self, socket: Socket) -> None:
        """Set further options before the socket connects."""

    def try_send(self, messages: Messages) -> bool:
        """Queue a message, its pieces first; return False if the queue is full: then send it again from the start. A
        closed sender drops it: the peer is dead."""
        with self._lock:
            return self._try_send(messages)

    def _try_send(self, messages: Messages) -> bool:
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
        """Drop the connection; queued messages get `linger_ms` to leave."""
        with self._lock:
            if self._socket is not None:
                self._socket.close(linger_ms)
                self._socket = None
                self._on_way.clear()

    def _send_otherwise(self, messages: Messages) -> bool:
        """Send, under the lock, while no socket is to be used; return as `try_send` does."""
        return True

    def _use(self, socket: Socket) -> None:
        """Use a new socket from now on, under the lock, and send the held messages through it."""
        self._socket = socket
        for messages in self._held.take():
            self._try_send(messages)  # there is room

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


class RelaySender(SocketSender):
    """Sender to the relay. Holds messages while the relay does not know the inbox of this process: an answer, or a call
    that the relay gives back, would not arrive.

    Args:
        is_known: the relay knows the inbox.
    """

    def __init__(self, gatekeeper: Gatekeeper, address: str, limit_bytes: int, *, is_known: bool) -> None:
        super().__init__(gatekeeper, zmq.DEALER, address, limit_bytes)
        self._is_closed = False
        if is_known:
            self.opened()

    def opened(self) -> None:
        """Send the held messages: the relay knows the inbox."""
        with self._lock:
            if self._socket is None and not self._is_closed:
                self._use(self._connect(self._gatekeeper.relay))

    def lost(self) -> None:
        """Hold messages from now on: the relay has lost the inbox, and messages on their way may be lost."""
        with self._lock:
            if self._socket is not None:
                self._socket.close(0)
                self._socket = None
                self._on_way.clear()

    def close(self, linger_ms: int = 0) -> None:
        if linger_ms:
            self.opened()
        self._is_closed = True
        super().close(linger_ms)

    def _send_otherwise(self, messages: Messages) -> bool:
        return self._is_closed or self._held.add(messages)


_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_LONGEST_PAUSE_MS = 5_000
"""Longest pause between attempts to connect, and longest attempt: even of many unreachable peers each is tried
again."""
_numbers = itertools.count()


class Owner(Protocol):
    """The connection table, as its connections see it."""

    gatekeeper: Gatekeeper
    limit_bytes: int
    has_relay: bool
    files: IoThreads

    def find_relay(self) -> RelaySender | None:
        """Return the sender to the relay, unless there is none or all is being closed."""

    def state_changed(self, connection: ZmqConnection, before: State) -> None:
        """Handle a new state of the connection, on the thread that noticed it; this thread holds no lock."""


class ZmqConnection(SocketSender):
    """Keeps messages until it is connected, and hands them to the relay if that takes too long (`DirectOrRelay`).

    Args:
        inbox_id: of the peer.
        server: public half of its listener's pair; empty where there is no key.
        greeting: a message to send before all others on the connection.
        is_relayed: begin through the relay.
    """

    def __init__(
        self, owner: Owner, address: str, inbox_id: str, server: str, greeting: Sequence[Buffer], *, is_relayed: bool
    ) -> None:
        self._monitor: Socket | None = None
        self._fd = -1
        super().__init__(owner.gatekeeper, zmq.PUSH, address, owner.limit_bytes)
        self.inbox_id = inbox_id
        self._owner = owner
        self._greeting = greeting
        self._bulk: BulkSender | None = None
        self._route = DirectOrRelay(time.monotonic(), has_relay=owner.has_relay, is_relayed=is_relayed)
        # Not `_socket`: so `try_send` has to check one field only.
        self._unconnected: Socket | None = self._connect(server)
        self._show()
        if self._monitor is not None:
            self._fd = self._monitor.get(zmq.FD)
            owner.files.watch_file(self._fd, self.read)

    def _prepare(self, socket: Socket) -> None:
        socket.set(zmq.RECONNECT_IVL_MAX, _LONGEST_PAUSE_MS)
        socket.set(zmq.CONNECT_TIMEOUT, _LONGEST_PAUSE_MS)
        events = f"inproc://unified.direct.{next(_numbers)}"
        socket.monitor(events, _EVENTS)
        self._monitor = monitor = self._gatekeeper.context.socket(zmq.PAIR)
        monitor.linger = 0
        monitor.rcvhwm = 0  # no limit: libzmq would stop the socket if its events found no room
        monitor.connect(events)

    @property
    def state(self) -> State:
        return self._route.state

    def read(self) -> None:
        """Handle the events of the connection's monitor."""
        self._advance(self._read_events)

    def look(self, now: float) -> None:

        def take_in() -> None:
            if self._route.state == "relayed" and not self._pass_on():
                self._route.used_relay(now)
            self._route.passed(now)

        self._advance(take_in)

    def close(self, linger_ms: int = 0) -> None:
        """Close as `SocketSender.close` does; messages that wait for a connection get that time, too."""
        with self._lock:
            if linger_ms and self._route.state == "connecting":
                self._go_up()
            self._drop(linger_ms)

    def use_bulk(self, address: str, introduction: bytes) -> None:
        """Send large buffers to `address`, beside ZeroMQ. Call this before anything is sent."""
        self._bulk = BulkSender(address, self._lock, self._try_send_by_zmq, introduction)

    def _try_send(self, messages: Messages) -> bool:
        bulk = self._bulk
        if bulk is not None and self._socket is not None and bulk.takes(messages):
            return bulk.add(messages, MAX_HELD, self._limit_bytes)
        return super()._try_send(messages)

    def _try_send_by_zmq(self, messages: Messages) -> bool:
        with self._lock:
            return super()._try_send(messages)

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
        """Publish the route of messages sent from now on."""
        self.is_relay = self._route.state == "relayed"
        self.may_give_back = self._route.state in ("connecting", "relayed")

    def _send_otherwise(self, messages: Messages) -> bool:
        if self._unconnected is None:
            return True
        if self._route.state == "relayed":
            self._route.used_relay(time.monotonic())
            relay = self._owner.find_relay()
            return relay is not None and self._pass_on() and relay.try_send(messages)
        return self._held.add(messages)

    def _pass_on(self) -> bool:
        """Have the relay take the kept messages; return whether none is left."""
        relay = self._owner.find_relay() if self._held else None
        return self._held.pass_on(relay.try_send) if relay is not None else not self._held

    def _go_up(self) -> None:
        """Send the greeting and the kept messages, and use the socket from now on."""
        if self._unconnected is None:
            return
        socket, self._unconnected = self._unconnected, None
        self._put(socket, self._greeting)
        self._use(socket)

    def _drop(self, linger_ms: int) -> None:
        if self._monitor is None:
            return
        if self._bulk is not None:
            self._bulk.close(linger_ms / 1000)
        socket = self._socket or self._unconnected
        self._socket = self._unconnected = None
        self._held.take()
        self._on_way.clear()
        if socket is not None:
            socket.disable_monitor()  # first: libzmq would wait if nobody reads its events
            socket.close(linger_ms)
        self._owner.files.unwatch_file(self._fd)
        self._monitor.close(0)
        self._monitor = None
