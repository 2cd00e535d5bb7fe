"""Listeners: a Unix socket for this host; for others one PULL bound on `tcp`, and one DEALER to the relay.

The two ZeroMQ sockets share a thread; `unified.bus.transport.io_threads` serves the Unix socket.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from pathlib import Path
from random import SystemRandom

import zmq

from unified.bus.buffers import Buffer
from unified.bus.identity import BusIdentity, BusNetwork
from unified.bus.shm.files import identity as shared_memory_id
from unified.bus.transport.framing import RemoteMessage
from unified.bus.transport.routes import BULK, LOCAL, Policy, ipc_address
from unified.bus.transport.unix_connection import TransportEvents
from unified.bus.transport.zmq_connection import HEARTBEAT_MS, Socket
from unified.config.ports import bind_address, bind_free
from unified.config.settings import make_private
from unified.core.backoff import Backoff
from unified.devices import cuda_devices
from unified.errors import ClusterError, UsageError
from unified.protocol.envelope import Kind, encode_envelope
from unified.protocol.records import Inbox
from unified.security.curve import Gatekeeper, new_key, read_event
from unified.security.keys import master_listener, met
from unified.threads import call_guarded, start_thread

logger = logging.getLogger(__name__)
_WAKE = "inproc://wake"
_BACKLOG = 4096
"""Most peers that may connect at one moment, as when a large job starts."""
_BATCH = 100
"""Most messages taken from one socket before the others."""
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_RETRY = Backoff(first_s=0.2, limit_s=5.0, num_free=0)
"""Pauses before a failed handshake with the relay is tried again, with the keys of that time."""


class Listeners:
    """Binds the addresses of one incarnation, then receives until closed. ClusterError: nobody could reach this inbox.

    Args:
        identity: has the inbox id, which is also the DEALER's identity at the relay.
        network: names the folder for the Unix socket (made 0700), the address and the relay.

    Attributes:
        inbox: this process's own.
        unix: the listening Unix socket; None where there is none.
        bulk: the listening socket for large payloads; None where there is no key, or no tcp.
    """

    def __init__(self, identity: BusIdentity, network: BusNetwork, policy: Policy, gatekeeper: Gatekeeper) -> None:
        self._gatekeeper = gatekeeper
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._is_connected = False
        self._num_connected = 0
        self._probe = encode_envelope(identity.envelope(Kind.HELLO, identity.inbox))
        """Message to this inbox itself, sent through the relay: once it is back, the relay knows the inbox."""
        self._path: Path | None = None
        self.unix: socket.socket | None = None
        self.bulk: socket.socket | None = None
        self._pull: Socket | None = None
        self._pair = None if gatekeeper.key is None else new_key()
        routes: list[str] = []
        if policy != "relay":
            routes += [*self._listen(network.run_dir, identity.inbox, policy), *self._bind_tcp(network.address)]
        self._relay = network.relay
        self._num_attempts = self._num_failed = 0
        self._retry_at: float | None = None
        """Time at which the relay is tried with a new socket; None: libzmq tries by itself."""
        self._dealer: Socket | None = None
        self._relay_events: Socket | None = None
        if self._relay:
            self._connect_relay(identity.inbox)
        self.inbox = Inbox(
            inbox_id=identity.inbox,
            routes=routes,
            host_id=identity.host,
            shm=shared_memory_id(),
            gpus=cuda_devices(),
            listener_key=self._pair.public if self._pair is not None and self._pull is not None else "",
        )
        if not routes and not network.relay:
            self.close()
            raise ClusterError(
                f"the inbox of this worker has no address: neither a socket in {network.run_dir} nor one on "
                f"{network.address!r} could be bound, and there is no relay. The log says why."
            )

    def start(self, events: TransportEvents) -> int | None:
        """Begin to receive through ZeroMQ; return the ident of the thread that calls back, if there is one."""
        if self._pull is None and self._dealer is None:
            return None
        wake = self._gatekeeper.context.socket(zmq.PULL)
        wake.bind(_WAKE)
        self._thread = start_thread("bus-remote", self._receive, wake, events)
        return self._thread.ident

    def close(self, timeout_s: float = 2.0) -> bool:
        """End the thread, close all and remove the Unix socket's file; return whether the thread ended.

        After `timeout_s`, a thread that is held up in other code is left alone; it closes its sockets when it returns.
        """
        self._is_closing = True
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        if self.unix is not None:
            self.unix.close()
        if self._thread is None:
            self._close_sockets()
            return True
        waker = self._gatekeeper.context.socket(zmq.PUSH)
        waker.connect(_WAKE)
        with contextlib.suppress(zmq.Again):  # it has ended already
            waker.send(b"", zmq.NOBLOCK)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        waker.close(0)
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """Give up the files in a forked child."""
        self._path = None
        if self.bulk is not None:
            self.bulk.close()

    def _receive(self, wake: Socket, events: TransportEvents) -> None:
        poller = zmq.Poller()
        for each in (self._pull, self._dealer, self._relay_events, wake):
            if each is not None:
                poller.register(each, zmq.POLLIN)

        def receive() -> None:
            wait_s = None if self._retry_at is None else max(0.0, self._retry_at - time.monotonic())
            ready = dict(poller.poll(None if wait_s is None else math.ceil(wait_s * 1000)))
            if wait_s == 0.0 and not ready.keys() & {self._dealer, self._relay_events}:
                self._reconnect_relay(poller)
            for source in (self._pull, self._dealer):
                if source is not None and source in ready:
                    self._drain(source, source is self._dealer, events)
            if self._relay_events in ready:
                self._on_relay_event(events)

        while not self._is_closing:
            call_guarded("receiver-failed", receive)
        wake.close(0)
        self._close_sockets()

    def _on_relay_event(self, events: TransportEvents) -> None:
        """Handle one event of the connection to the relay. One that breaks in its handshake has carried no message."""
        assert self._relay_events is not None
        assert self._dealer is not None
        kind, _ = read_event(self._relay_events)
        was_connected, self._is_connected = self._is_connected, kind == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if not self._is_connected and not was_connected and self._gatekeeper.key is not None and self._retry_at is None:
            # libzmq would retry with the same keys, or not at all after a refusal; the relay's key or ours may be new
            self._retry_at = time.monotonic() + _RETRY.delay_s(self._num_failed, SystemRandom())
            self._num_failed += 1
        if was_connected and not self._is_connected:
            events.relay_lost()
        elif self._is_connected:
            self._retry_at, self._num_failed = None, 0
            met(self._gatekeeper.relay)
            self._num_connected += 1
            self._dealer.send_multipart([self._probe, b"%d" % self._num_connected], zmq.NOBLOCK)

    def _connect_relay(self, inbox_id: str) -> None:
        self._gatekeeper.relay = master_listener(self._gatekeeper.key, self._num_attempts)
        dealer = _dealer(self._gatekeeper, inbox_id)
        dealer.set(zmq.IPV6, "[" in self._relay)
        self._dealer, self._relay_events = dealer, dealer.get_monitor_socket(_EVENTS)
        dealer.connect(self._relay)

    def _reconnect_relay(self, poller: zmq.Poller) -> None:
        """Connect again, with the present keys: no handshake succeeded, so nothing came through the old socket."""
        old = self._dealer, self._relay_events
        self._num_attempts += 1
        self._retry_at = time.monotonic() + _RETRY.limit_s  # in case no descriptor is left
        self._connect_relay(self.inbox.inbox_id)
        self._retry_at = None
        for each in (self._dealer, self._relay_events):
            poller.register(each, zmq.POLLIN)
        for each in old:
            poller.unregister(each)
        _close_monitored(*old)

    def _is_probe(self, message: RemoteMessage) -> bool:
        return message.envelope == self._probe and message.body == b"%d" % self._num_connected

    def _close_sockets(self) -> None:
        _close_monitored(self._dealer, self._relay_events)
        if self._pull is not None:
            self._pull.close(0)

    def _drain(self, source: Socket, is_relayed: bool, events: TransportEvents) -> None:
        with contextlib.suppress(zmq.Again):
            for _ in range(_BATCH):
                if self._is_closing:
                    return
                message = _take(source, is_relayed)
                if is_relayed and self._is_probe(message):
                    events.relay_found()
                else:
                    events.remote_came(message)

    def _listen(self, run_dir: str, inbox_id: str, policy: Policy) -> list[str]:
        if policy == "tcp" or not run_dir:
            return []
        address, why_not = ipc_address(run_dir, inbox_id)
        if not why_not:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                make_private(Path(run_dir))
                listener.bind(address.removeprefix(LOCAL))
                listener.listen(_BACKLOG)
            except OSError as error:
                listener.close()
                why_not = str(error)
        if why_not:
            logger.warning("event=no-ipc-route run_dir=%s reason=%r (tcp is used on this host too)", run_dir, why_not)
            return []
        self.unix = listener
        self._path = Path(address.removeprefix(LOCAL))
        return [address]

    def _bind_tcp(self, address: str) -> list[str]:
        if not address:
            return []
        pull = self._gatekeeper.context.socket(zmq.PULL)
        self._gatekeeper.guard(pull, self._pair)
        pull.set(zmq.BACKLOG, _BACKLOG)
        pull.set(zmq.IPV6, ":" in address)  # with IPV6, IPv4 addresses would be shown in a mapped form
        host = f"[{address}]" if ":" in address and not address.startswith("[") else address
        try:
            bind_address(pull.bind, f"tcp://{host}:0")
        except (zmq.ZMQError, UsageError) as error:
            logger.warning("event=no-tcp-route address=%s reason=%r", address, str(error))
            pull.close(0)
            return []
        self._pull = pull
        return [pull.get_string(zmq.LAST_ENDPOINT), *self._bind_bulk(address.strip("[]"))]

    def _bind_bulk(self, host: str) -> list[str]:
        if self._gatekeeper.key is None:
            return []
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self.bulk = bind_free(lambda port: socket.create_server((host, port), family=family, backlog=_BACKLOG))
        except (OSError, UsageError) as error:
            logger.warning("event=no-bulk-route address=%s reason=%r (large payloads take longer)", host, str(error))
            return []
        name = f"[{host}]" if ":" in host else host
        return [f"{BULK}{name}:{self.bulk.getsockname()[1]}"]


def _dealer(gatekeeper: Gatekeeper, inbox_id: str) -> Socket:
    dealer = gatekeeper.socket(zmq.DEALER, gatekeeper.relay)
    dealer.set(zmq.IDENTITY, inbox_id.encode())
    dealer.set(zmq.LINGER, 0)
    dealer.set(zmq.RECONNECT_IVL, 50)
    dealer.set(zmq.RECONNECT_IVL_MAX, 2_000)
    dealer.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    dealer.set(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
    return dealer


def _close_monitored(socket: Socket | None, monitor: Socket | None) -> None:
    if socket is not None and monitor is not None:
        socket.disable_monitor()
        socket.close(0)
        monitor.close(0)


def _take(source: Socket, is_relayed: bool) -> RemoteMessage:
    """Return one message; zmq.Again if there is none. Envelope and body are small and copied, the buffers are not."""
    envelope = source.recv(zmq.NOBLOCK)
    more = source.get(zmq.RCVMORE)
    body = source.recv() if more else b""
    buffers: list[Buffer] = []
    more = more and source.get(zmq.RCVMORE)
    while more:
        frame = source.recv(copy=False)
        buffers.append(frame.buffer)
        more = frame.more
    return RemoteMessage(envelope, body, buffers, is_relayed)
