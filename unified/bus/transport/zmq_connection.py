"""The way to one peer on another host: a connection of its own, and the relay while none can be had."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from unified.bus.codec.tensors import Buffer
from unified.bus.transport.failover import Passage, State
from unified.bus.transport.zmq_sender import MAX_QUEUED_MESSAGES, Outlet, Socket
from unified.security.curve import read_event

_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_MAX_HELD = MAX_QUEUED_MESSAGES - 1
"""So all of them, and the greeting, find room in the socket once it is connected."""
_LONGEST_PAUSE_MS = 5_000
"""Between attempts to connect, and for one attempt: of a thousand peers that cannot be reached all are tried on."""
_numbers = itertools.count()


class DirectOutlet(Outlet):
    """Keeps what is sent until it is connected, and hands it to the relay if that takes too long (`Passage`).

    Args:
        inbox_id: of the peer.
        greeting: a message to send before all others on the connection.
        has_relay: there is one, which `find_relay` returns unless all is being closed.
        is_relayed: begin through the relay.
        watch: has `read` called whenever the file of this number can be read, by one thread at a time.
        unwatch: no more; to be called before the number may become another file's.
        on_change: (this, state before): called on the thread that noticed, which holds no lock.
    """

    def __init__(
        self,
        context: zmq.Context[Socket],
        address: str,
        *,
        inbox_id: str,
        limit_bytes: int,
        greeting: Sequence[Buffer],
        secure: Callable[[Socket], None],
        has_relay: bool,
        find_relay: Callable[[], Outlet | None],
        is_relayed: bool,
        watch: Callable[[int, Callable[[], None]], None],
        unwatch: Callable[[int], None],
        on_change: Callable[[DirectOutlet, State], None],
    ) -> None:
        self._monitor: Socket | None = None
        self._fd = -1

        def prepare(socket: Socket) -> None:
            secure(socket)
            socket.set(zmq.RECONNECT_IVL_MAX, _LONGEST_PAUSE_MS)
            socket.set(zmq.CONNECT_TIMEOUT, _LONGEST_PAUSE_MS)
            events = f"inproc://unified.direct.{next(_numbers)}"
            socket.monitor(events, _EVENTS)
            self._monitor = monitor = context.socket(zmq.PAIR)
            monitor.linger = 0
            monitor.rcvhwm = 0  # if events could not wait, libzmq would stop the socket instead
            monitor.connect(events)

        super().__init__(context, zmq.PUSH, address, limit_bytes=limit_bytes, secure=prepare)
        self.inbox_id = inbox_id
        self._greeting = greeting
        self._find_relay = find_relay
        self._unwatch = unwatch
        self._on_change = on_change
        self._held: deque[Sequence[Buffer]] = deque()
        self._num_held_bytes = 0
        self._passage = Passage(time.monotonic(), has_relay=has_relay, is_relayed=is_relayed)
        self._unconnected, self._socket = self._socket, None  # so that `try_send` has to look at one thing only
        self._show()
        if self._monitor is not None:
            self._fd = self._monitor.get(zmq.FD)
            watch(self._fd, self.read)

    @property
    def state(self) -> State:
        return self._passage.state

    def read(self) -> None:
        """Take in what the connection's monitor has to say."""
        self._advance(self._read_events)

    def look(self, now: float) -> None:
        """Time has passed."""

        def take_in() -> None:
            if self._passage.state == "relayed" and not self._pass_on():
                self._passage.used_relay(now)
            self._passage.passed(now)

        self._advance(take_in)

    def close(self, linger_ms: int = 0) -> None:
        """As `Outlet.close`; what waits for a connection is given that time too."""
        with self._lock:
            if linger_ms and self._passage.state == "connecting":
                self._go_up()
            self._drop(linger_ms)

    def _advance(self, take_in: Callable[[], None]) -> None:
        with self._lock:
            if self._monitor is None:
                return
            before = self._passage.state
            take_in()
            after = self._passage.state
            self._show()
            if after == "up":
                self._go_up()
            elif after == "relayed":
                self._pass_on()
            elif after == "broken":
                self._drop(0)
        if after != before:
            self._on_change(self, before)

    def _read_events(self) -> None:
        while self._monitor is not None:
            try:
                kind, _ = read_event(self._monitor)
            except zmq.Again:
                return
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._passage.connected()
            elif kind == zmq.EVENT_DISCONNECTED:
                self._passage.disconnected()

    def _show(self) -> None:
        """Say which way what is sent from now on takes."""
        self.is_relay = self._passage.state == "relayed"
        self.may_give_back = self._passage.state in ("connecting", "relayed")

    def _send_otherwise(self, frames: Sequence[Buffer]) -> bool:
        if self._unconnected is None:
            return True
        if self._passage.state == "relayed":
            self._passage.used_relay(time.monotonic())
            relay = self._find_relay()
            return relay is not None and self._pass_on() and relay.try_send(frames)
        if len(self._held) >= _MAX_HELD or self._num_held_bytes >= self._limit_bytes:
            return False
        self._held.append(frames)
        self._num_held_bytes += sum(memoryview(frame).nbytes for frame in frames)
        return True

    def _pass_on(self) -> bool:
        """Have the relay take what was kept; whether nothing is left."""
        relay = self._find_relay() if self._held else None
        while self._held and relay is not None and relay.try_send(self._held[0]):
            self._held.popleft()
        return not self._held

    def _go_up(self) -> None:
        """What was kept leaves first, then what is sent."""
        if self._unconnected is None:
            return
        self._socket, self._unconnected = self._unconnected, None
        for frames in (self._greeting, *self._held):
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
        self._unwatch(self._fd)
        self._monitor.close(0)
        self._monitor = None
