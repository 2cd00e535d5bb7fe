"""Sockets that lead out: one a peer, used by whichever thread has something to say."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from unified.bus.codec.tensors import Buffer

MAX_QUEUED_MESSAGES = 16_384
TRACKED_BYTES = 64 * 1024
"""From this size on ZeroMQ sends from the caller's memory, and tells when it is done with it."""
HEARTBEAT_MS = 5_000
Socket = zmq.Socket[bytes]
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # `|` of enum members costs more than a send
_FIRST_PAUSE_S = 0.0002
_LAST_PAUSE_S = 0.005


class Outlet:
    """One socket behind one lock. Sending never waits inside ZeroMQ, so that closing never waits for a sender.

    Args:
        kind: zmq.DEALER for the relay, zmq.PUSH for a peer (`unified.bus.transport.zmq_connection`).
        limit_bytes: of large frames, what may be on its way at once.
        secure: prepares the socket, before it connects.

    Attributes:
        is_relay: what is sent now goes through the relay.
        may_give_back: it may be given back as undeliverable, to be sent again.
    """

    def __init__(
        self,
        context: zmq.Context[Socket],
        kind: int,
        address: str,
        *,
        limit_bytes: int,
        secure: Callable[[Socket], None],
    ) -> None:
        self.address = address
        self.is_relay = self.may_give_back = kind == zmq.DEALER
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._on_way: deque[tuple[zmq.MessageTracker, int]] = deque()
        self._socket: Socket | None = context.socket(kind)
        self._socket.set(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
        self._socket.set(zmq.IPV6, "[" in address)
        self._socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.set(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
        secure(self._socket)
        self._socket.connect(address)

    def try_send(self, frames: Sequence[Buffer]) -> bool:
        """Queue a message; False if the queue is full. To a closed outlet it goes nowhere: its peer is dead."""
        with self._lock:
            socket = self._socket
            if socket is None:
                return self._send_otherwise(frames)
            if self._on_way and not self._has_room():
                return False
            try:
                self._put(socket, frames)
            except zmq.Again:  # only the first frame can meet a full queue
                return False
            return True

    def send(self, frames: Sequence[Buffer], give_up: Callable[[], bool]) -> bool:
        """Queue a message, waiting for room until `give_up` says so; then it is False."""
        pause_s = _FIRST_PAUSE_S
        while not self.try_send(frames):
            if give_up():
                return False
            time.sleep(pause_s)  # ZeroMQ tells only its own threads when there is room
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        return True

    def close(self, linger_ms: int = 0) -> None:
        """Drop the connection; what is queued is given `linger_ms` to leave."""
        with self._lock:
            if self._socket is not None:
                self._socket.close(linger_ms)
                self._socket = None
                self._on_way.clear()

    def _send_otherwise(self, frames: Sequence[Buffer]) -> bool:
        """Under the lock: `try_send` where no socket is to be used."""
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
