"""The cluster key on ZeroMQ's tcp sockets: CURVE encrypts, and proves to both ends that the other has the key.

All members share one key pair. It authenticates a server: only a member can read data that is encrypted for the public
half. It authenticates a client: the client shows the same public half, and the handshake proves that it has the secret
half. libzmq asks about every client by its ZAP protocol (rfc.zeromq.org/spec/27), and we answer. The public half alone
opens nothing.

A listener keeps its pair until it is closed (unbinding would cut its connections), but the key that clients show may be
replaced meanwhile (`unified.security.keys`). Listeners of workers have pairs of their own, named in their records. A
client of the master tries the pairs that the master may have started with.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import threading
import time
from collections import deque

import msgspec
import zmq
from zmq.utils import z85

from unified.config.logging import LogOnce
from unified.security.bounds import HANDSHAKE_S, LOOK_S, PendingHandshakes
from unified.security.frames import MAX_FRAME_BYTES
from unified.security.keys import ClusterKey, accepted, current
from unified.threads import start_thread

logger = logging.getLogger(__name__)
Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]
_DOMAIN = b"unified"
_ZAP = "inproc://zeromq.zap.01"
_WAKE_UP = "inproc://unified.gatekeeper.wake-up"
_LOOK, _END = b"look", b"end"
_EVENT = struct.Struct("=Hi")
_LAST_EVENTS_S = 1.0
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED | _FAILED
_PUBLIC_ONLY = "it has the public half of the cluster key but not the secret half, or its key was replaced"
_BROKE_OFF = "it broke off the handshake: it has no cluster key, or is no process of Unified"
_WHY: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "it has no cluster key",
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "it has another cluster key",
}


def new_key() -> ClusterKey:
    public, secret = zmq.curve_keypair()
    return ClusterKey(public=public.decode(), secret=secret.decode())


def read_event(monitor: Socket) -> tuple[int, int]:
    """Return one event of a monitor, and its value; zmq.Again if there is none."""  # pyzmq's parser loads asyncio
    kind, value = _EVENT.unpack(monitor.recv(zmq.NOBLOCK))
    while monitor.get(zmq.RCVMORE):
        monitor.recv()
    return kind, value


def bound(socket: Socket) -> None:
    """Limit the frames and the handshakes of a socket, before it is bound or connects."""
    socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.set(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))


def secure_client(socket: Socket, key: ClusterKey | None, server: str = "") -> None:
    """Let a socket use the key, before it connects. With None it has no key, and a server with a key refuses it.

    Args:
        server: public half of the pair that the listener has; empty: the key that the cluster has now.
    """
    bound(socket)
    if key is not None:
        own = current(key)
        socket.curve_serverkey = (server or own.public).encode()
        socket.curve_publickey = own.public.encode()
        socket.curve_secretkey = own.secret.encode()


def secure_server(socket: Socket, pair: ClusterKey) -> None:
    """Let a socket demand the key, before it is bound. Without a `Gatekeeper` in its context it lets nobody in."""
    socket.curve_server = True
    socket.curve_secretkey = pair.secret.encode()
    socket.zap_domain = _DOMAIN
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)


class Gatekeeper:
    """ZAP handler of one context: it admits peers that have the key, and logs all others.

    Sockets get bounds (`unified.security.bounds`); without a key that is all. With a key, the first secured
    server starts a thread, through which no message passes. A context has one gatekeeper and one I/O thread, so the
    events of a connection come in order.
    """

    def __init__(self, context: Context, key: ClusterKey | None, *, name: str) -> None:
        self.key = key
        self.relay = ""
        """Public half of the relay's pair; empty: not known."""
        self.context = context
        self._name = name
        self._refusals, self._refused_peers = LogOnce(), LogOnce()
        self._refusing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake_up: Socket | None = None
        self._guarded: list[Socket] = []
        self._arrivals: deque[Socket] = deque()
        """Sources of events, on their way to the thread."""

    @property
    def num_refused(self) -> int:
        """Connections that were refused since the start."""
        return self._refusals.total

    def socket(self, kind: int, server: str = "") -> Socket:
        """Make a socket of this context that will connect; `server` as in `secure_client`."""
        socket = self.context.socket(kind)
        secure_client(socket, self.key, server)
        return socket

    def guard(self, socket: Socket, pair: ClusterKey | None = None) -> None:
        """Prepare a socket of this context that will be bound.

        Args:
            pair: the listener's own. Default: the key that the cluster has now.
        """
        bound(socket)
        if self.key is not None:
            secure_server(socket, pair or current(self.key))
            self._watch(socket)

    def close(self) -> None:
        """End the thread, before or after the sockets are closed, and before the context is terminated."""
        thread, self._thread = self._thread, None
        if thread is None or self._wake_up is None:
            return
        for socket in self._guarded:
            with contextlib.suppress(zmq.ZMQError):  # closed already
                socket.disable_monitor()
        self._wake_up.send(_END)
        thread.join()
        self._wake_up.close(0)

    def _watch(self, socket: Socket) -> None:
        address = f"inproc://unified.gatekeeper.{len(self._guarded)}"
        socket.monitor(address, _EVENTS)
        monitor = self.context.socket(zmq.PAIR)
        monitor.linger = 0
        monitor.rcvhwm = 0  # without limit: libzmq would stop the socket if events could not wait
        monitor.connect(address)
        self._guarded.append(socket)
        self._arrivals.append(monitor)
        wake_up = self._wake_up
        if wake_up is None or self._thread is None:
            wake_up = self._start()
        wake_up.send(_LOOK)

    def _start(self) -> Socket:
        zap = self.context.socket(zmq.REP)
        zap.linger = 0
        zap.bind(_ZAP)
        ear = self.context.socket(zmq.PAIR)
        ear.bind(_WAKE_UP)
        self._wake_up = self.context.socket(zmq.PAIR)
        self._wake_up.connect(_WAKE_UP)
        self._thread = start_thread("bus-gatekeeper", self._serve, zap, ear)
        return self._wake_up

    def _serve(self, zap: Socket, ear: Socket) -> None:
        """Run the thread. At the end it stays until the last event: libzmq waits for the reader of events."""
        doors: dict[Socket, _Door] = {}
        poller = zmq.Poller()
        poller.register(zap, zmq.POLLIN)
        poller.register(ear, zmq.POLLIN)
        deadline: float | None = None
        look_at = 0.0
        while deadline is None or (doors and time.monotonic() < deadline):
            is_watching = deadline is not None or any(door.pending for door in doors.values())
            for source, _ in poller.poll(int(LOOK_S * 1000) if is_watching else None):
                if source is ear:
                    if ear.recv() == _END:
                        deadline = time.monotonic() + _LAST_EVENTS_S
                    while self._arrivals:
                        monitor = self._arrivals.popleft()
                        doors[monitor] = _Door()
                        poller.register(monitor, zmq.POLLIN)
                elif source is zap:
                    self._judge(zap)
                elif self._hear(source, doors[source]) == zmq.EVENT_MONITOR_STOPPED:
                    poller.unregister(source)
                    doors.pop(source).pending.close()
                    source.close()
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + LOOK_S
                for door in doors.values():
                    door.pending.look()
        for door in doors.values():
            door.pending.close()
        for source in (zap, ear, *doors):
            source.close(0)

    def _judge(self, zap: Socket) -> None:
        """Answer libzmq, which has checked that a client has the secret to the public key that it shows."""
        version, request_id, domain, address, _, mechanism, *credentials = zap.recv_multipart()
        known = [] if self.key is None else [[z85.decode(pair.public.encode())] for pair in accepted(self.key)]
        is_member = (domain, mechanism) == (_DOMAIN, b"CURVE") and credentials in known
        code, text = (b"200", b"OK") if is_member else (b"400", b"not the key of this cluster")
        zap.send_multipart([version, request_id, code, text, b"", b""])
        if not is_member:
            self.refused(address.decode(errors="replace"), _PUBLIC_ONLY)

    def _hear(self, monitor: Socket, door: _Door) -> int:
        kind, value = read_event(monitor)
        if kind == zmq.EVENT_ACCEPTED:
            door.hosts[value] = door.pending.accepted(value)
        elif kind & _FAILED:  # the next event is the end of this connection, and says which one it was
            door.why = door.why or _WHY.get(value, _BROKE_OFF)
        elif kind == zmq.EVENT_DISCONNECTED:
            host, why, door.why = door.hosts.pop(value, ""), door.why, ""
            if why := door.pending.ended(value) or why:
                self.refused(host, why)
        return kind

    def refused(self, host: str, why: str) -> None:
        """Count a connection that was refused, and log the first of its kind."""
        now = time.monotonic()
        with self._refusing:
            is_new = self._refusals.is_new(now, why)
            if host:  # empty if the connection was gone too soon
                is_new = self._refused_peers.is_new(now, f"{host} {why}")
        if is_new:
            reason = f"{why}; its connection was refused, and further ones of this kind are only counted"
            logger.warning("event=key-refused at=%r peer=%s reason=%r", self._name, host or "?", reason)


class _Door(msgspec.Struct, eq=False):
    """State of the connections of one server."""

    hosts: dict[int, str] = {}
    """Hosts at the other end, by descriptor."""
    why: str = ""
    """Reason of the connection that fails now; empty if none does."""
    pending: PendingHandshakes = msgspec.field(default_factory=PendingHandshakes)
