"""Connection table: a Unix connection to each peer on this host, a socket to each on others, and one to the relay.

Tombstones hold the inbox ids of dead incarnations, whose late messages are dropped.
"""

from __future__ import annotations

import logging
import socket
import time
from pathlib import Path

import msgspec

from unified.bus.identity import BusIdentity
from unified.bus.shm.pool import Trimmer
from unified.bus.transport.failover import GIVE_UP_AFTER_S, State
from unified.bus.transport.framing import pack
from unified.bus.transport.io_threads import IoThreads
from unified.bus.transport.routes import BULK, LOCAL, Policy, Route, choose_route
from unified.bus.transport.unix_connection import TransportEvents, UnixConnection
from unified.bus.transport.zmq_connection import RelaySender, SocketSender, ZmqConnection
from unified.errors import RpcCancelledError, WorkerDiedError
from unified.protocol.envelope import Kind, encode_envelope, encode_record
from unified.protocol.records import Inbox
from unified.security.curve import Gatekeeper
from unified.threads import OwnedLock


class Tombstones:
    """Inbox ids of the last dead incarnations: so many that no message of an earlier one can be on its way."""

    KEPT = 10_000

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}

    def add(self, inbox_id: str) -> None:
        """Remember that this incarnation is over; by one thread at a time."""
        self._ids[inbox_id] = None
        if len(self._ids) > self.KEPT:
            del self._ids[next(iter(self._ids))]

    def __contains__(self, inbox_id: object) -> bool:
        return inbox_id in self._ids


logger = logging.getLogger(__name__)
_RELAY = ""
"""Key of the connection to the relay; no inbox has this id."""
_CONNECT_WITHIN_S = 5.0
_TELL_AFTER_S = 2.0
"""Time for news that the peer behind a broken connection died: a dead peer needs no answer."""
Connection = UnixConnection | SocketSender


class ConnectionTable:
    """The connections of one process, by inbox id.

    Args:
        inbox: this process's own; new peers are told of it, so that they can answer.
        files: serves the Unix connections, and watches the monitors of the others.
        trimmer: calls `look` every few seconds, when asked to.

    Attributes:
        tombstones: ids of dead inboxes; `drop` adds them.
        greeted: inboxes at which peers can be answered, by inbox id; `greet` adds them.
        limit_bytes: most bytes that wait on one connection.
    """

    def __init__(
        self,
        identity: BusIdentity,
        inbox: Inbox,
        policy: Policy,
        relay: str,
        gatekeeper: Gatekeeper,
        files: IoThreads,
        trimmer: Trimmer,
        limit_bytes: int,
    ) -> None:
        self.inbox = inbox
        self.gatekeeper = gatekeeper
        self.limit_bytes = limit_bytes
        self.has_relay = bool(relay)
        self.files = files
        self.tombstones = Tombstones()
        self._identity = identity
        self._policy = policy
        self._relay = relay
        self.trimmer = trimmer
        self._events: TransportEvents
        self._connections: dict[str, Connection] = {}
        self._relayed: set[str] = set()
        self._is_known_to_relay = False
        self.greeted: dict[str, Inbox] = {}
        self._broken: dict[str, float] = {}
        """Peers that may have lost answers, and when to report that."""
        self._lock = OwnedLock()
        self._is_closed = False

    def start(self, events: TransportEvents) -> None:
        """Allow connections to be made."""
        self._events = events

    def connection(self, inbox: Inbox, came_relayed: bool = False) -> Connection:
        """Return the connection to this inbox, made at first use. With `came_relayed` (the call to be answered came
        through the relay) do not wait for a direct one.

        RpcError: there is no route, or the incarnation is over. OSError: the inbox is on this host, and nobody listens.
        """
        connection = self._connections.get(_RELAY if inbox.inbox_id in self._relayed else inbox.inbox_id)
        return connection if connection is not None else self._connect(inbox, came_relayed)

    def is_relayed(self, inbox_id: str) -> bool:
        """Return whether a message to this inbox goes through the relay now."""
        connection = self._connections.get(inbox_id)
        return inbox_id in self._relayed or (connection is not None and connection.is_relay)

    def look(self, now: float) -> bool:
        """Take time into account; return whether there is anything more to wait for."""
        connections = [each for each in list(self._connections.values()) if isinstance(each, ZmqConnection)]
        for connection in connections:
            connection.look(now)
        for inbox_id in [each for each, due in list(self._broken.items()) if due <= now]:
            del self._broken[inbox_id]
            if inbox_id not in self.tombstones:
                self._events.unsure(inbox_id)
        return bool(self._broken) or any(connection.may_give_back for connection in connections)

    def greet(self, inbox_id: str, inbox: Inbox) -> None:
        """Remember the inbox at which a peer can be answered."""
        if inbox.inbox_id == inbox_id and inbox_id not in self.tombstones:
            self.greeted[inbox_id] = inbox

    def drop(self, inbox_id: str) -> None:
        """Forget a process that is gone, and what is queued for it."""
        with self._lock:
            self.tombstones.add(inbox_id)
            self.greeted.pop(inbox_id, None)
            self._relayed.discard(inbox_id)
            connection = self._connections.pop(inbox_id, None)
        if connection is not None:
            connection.close()

    def forget_relayed(self, inbox_id: str) -> None:
        """Forget that this inbox is reached through the relay; messages can still be sent to it."""
        self._relayed.discard(inbox_id)

    def forget(self, connection: UnixConnection) -> None:
        """Forget a connection that broke; if its peer is alive, the next message makes a new one."""
        with self._lock:
            if self._connections.get(connection.peer_id) is connection:
                del self._connections[connection.peer_id]

    def close(self, linger_ms: int) -> None:
        """Close all; messages queued for living peers get `linger_ms` to leave."""
        with self._lock:
            self._is_closed = True
            connections, self._connections = list(self._connections.values()), {}
        for connection in connections:
            if isinstance(connection, SocketSender):
                connection.close(linger_ms)

    def _connect(self, inbox: Inbox, came_relayed: bool) -> Connection:
        route = choose_route(_present(inbox), host_id=self.inbox.host_id, policy=self._policy, relay=self._relay)
        key = _RELAY if route.kind == "relay" else inbox.inbox_id
        self._lock.check()
        with self._lock:
            if self._is_closed:
                raise RpcCancelledError(f"the bus of worker {self._identity.worker} was closed.")
            if inbox.inbox_id in self.tombstones:  # the sender has not heard of the death yet
                raise WorkerDiedError(f"inbox {inbox.inbox_id} belongs to an incarnation that is over.")
            if route.kind == "relay":
                self._relayed.add(inbox.inbox_id)
            connection = self._connections.get(key)
            if connection is None:
                connection = self._connections[key] = self._make(route, inbox, came_relayed)
        if isinstance(connection, ZmqConnection):
            self.trimmer.soon()
            connection.read()  # a monitor signals new events only after a read
        return connection

    def _make(self, route: Route, inbox: Inbox, came_relayed: bool) -> Connection:
        kind, address = route
        if kind == "ipc":
            connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connected.settimeout(_CONNECT_WITHIN_S)
                connected.connect(address.removeprefix(LOCAL))
            except OSError:
                connected.close()
                raise
            connection = UnixConnection(connected, self.files, self._events, peer_id=inbox.inbox_id)
            self.files.add(connection)
            connection.meet(inbox, self.inbox)
            envelope, body = self._hello(inbox.inbox_id)
            connection.send(pack(envelope, body, ()))
            return connection
        if kind == "relay":
            return self._make_relay()
        hello = self._hello(inbox.inbox_id)
        far = ZmqConnection(self, address, inbox.inbox_id, inbox.listener_key, hello, is_relayed=came_relayed)
        bulk = next((each for each in inbox.routes if each.startswith(BULK)), "")
        if bulk and self.gatekeeper.key is not None:
            far.use_bulk(bulk, encode_envelope(self._identity.envelope(Kind.BULK, inbox.inbox_id)))
        return far

    def _make_relay(self) -> RelaySender:
        return RelaySender(self.gatekeeper, self._relay, self.limit_bytes, is_known=self._is_known_to_relay)

    def find_relay(self) -> RelaySender | None:
        """Return the sender to the relay; None: there is none, or all is being closed."""
        with self._lock:
            connection = self._connections.get(_RELAY)
            if connection is None and self.has_relay and not self._is_closed:
                connection = self._connections[_RELAY] = self._make_relay()
        return connection if isinstance(connection, RelaySender) else None

    def known_to_relay(self, is_known: bool) -> None:
        """Note whether the relay knows this process's inbox; only from the thread of the listeners."""
        with self._lock:
            self._is_known_to_relay = is_known
            sender = self._connections.get(_RELAY)
        if isinstance(sender, RelaySender):
            (sender.opened if is_known else sender.lost)()

    def state_changed(self, connection: ZmqConnection, before: State) -> None:
        """Log the new state of a connection to another host, and report what became of its messages."""
        inbox_id = connection.inbox_id
        if connection.state == "relayed":
            logger.warning(
                "worker=%s event=tcp-blocked inbox=%s address=%s: there is no direct connection: messages go through "
                "the relay until there is one",
                self._identity.worker,
                inbox_id,
                connection.address,
            )
            self._events.relayed(inbox_id)
        elif connection.state == "up" and before == "relayed":
            logger.info(
                "worker=%s event=tcp-found inbox=%s address=%s", self._identity.worker, inbox_id, connection.address
            )
        elif connection.state == "broken":
            with self._lock:
                if self._connections.get(inbox_id) is connection:
                    del self._connections[inbox_id]
            self._broken[inbox_id] = time.monotonic() + _TELL_AFTER_S
            self.trimmer.soon()
            if before == "up":
                reason = f"the connection to {connection.address} broke"
            else:
                reason = (
                    f"no connection to {connection.address} came about in {GIVE_UP_AFTER_S:g} s, and there is no relay"
                )
            self._events.lost(inbox_id, reason)

    def _hello(self, target: str) -> tuple[bytes, bytes]:
        return encode_envelope(self._identity.envelope(Kind.HELLO, target)), encode_record(self.inbox)


def _present(inbox: Inbox) -> Inbox:
    """Drop the Unix sockets that cannot be seen from here (another container of the same host)."""
    routes = [each for each in inbox.routes if not each.startswith(LOCAL) or Path(each.removeprefix(LOCAL)).exists()]
    return inbox if len(routes) == len(inbox.routes) else msgspec.structs.replace(inbox, routes=routes)
