"""Connection table: a Unix connection to each peer on this host, a socket to each on others, and one to the relay.

Tombstones hold the inbox ids of dead incarnations, whose late messages are dropped.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from unified.bus.transport.failover import GIVE_UP_AFTER_S, State
from unified.bus.transport.framing import pack
from unified.bus.transport.io_threads import IoThreads
from unified.bus.transport.routes import LOCAL, Policy, Route, choose_route
from unified.bus.transport.unix_connection import UnixConnection
from unified.bus.transport.zmq_connection import SocketSender, ZmqConnection
from unified.errors import RpcCancelledError, WorkerDiedError
from unified.protocol.envelope import BUS_VERSION, Envelope, Kind, encode_envelope, encode_record
from unified.protocol.records import Inbox


class Tombstones:
    """Inbox ids of lives that are over: of so many of the last that mail of an earlier one cannot be on its way."""

    KEPT = 10_000

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}

    def add(self, inbox_id: str) -> None:
        """That life is over; by one thread at a time."""
        self._ids[inbox_id] = None
        if len(self._ids) > self.KEPT:
            del self._ids[next(iter(self._ids))]

    def __contains__(self, inbox_id: object) -> bool:
        return inbox_id in self._ids


logger = logging.getLogger(__name__)
_RELAY = ""
"""Key of the relay's outlet; no inbox has this id."""
_CONNECT_WITHIN_S = 5.0
_TELL_AFTER_S = 2.0
"""How long the directory has to say that the peer behind a broken connection died, whom no answer concerns any more."""
Connection = UnixConnection | SocketSender


class ConnectionTable:
    """The ways out of one process, by inbox id.

    Args:
        inbox: this process's own; new peers are told of it, so that they can answer.
        departed: to whom nothing leads any more; kept by `drop`.
        job: what HELLO says it belongs to.
        make_link: makes a link of a connection to the peer of this inbox id, and has it read.
        receiver: looks after connections to other hosts.
        on_seeking: `look` is to be called every few seconds.
        on_detour: calls that wait for a connection to this inbox go through the relay.
        on_broken: calls that were sent to this inbox may be lost; why.
        on_unsure: the same of answers, and it is alive.
        secure: prepares a socket that will connect to another host.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        inbox: Inbox,
        departed: Tombstones,
        worker: str,
        job: str,
        policy: Policy,
        relay: str,
        limit_bytes: int,
        make_link: Callable[[socket.socket, str], UnixConnection],
        receiver: IoThreads,
        on_seeking: Callable[[], None],
        on_detour: Callable[[str], None],
        on_broken: Callable[[str, str], None],
        on_unsure: Callable[[str], None],
        secure: Callable[[zmq.Socket[bytes]], None] = lambda socket: None,
    ) -> None:
        self._context = context
        self._inbox = inbox
        self._worker = worker
        self._job = job
        self._make_link = make_link
        self._receiver = receiver
        self._on_seeking = on_seeking
        self._on_detour = on_detour
        self._on_broken = on_broken
        self._on_unsure = on_unsure
        self._secure = secure
        self._policy = policy
        self._relay = relay
        self._limit_bytes = limit_bytes
        self._ways: dict[str, Connection] = {}
        self._relayed: set[str] = set()
        self._greeted: dict[str, Inbox] = {}
        self._dead = departed
        self._broken: dict[str, float] = {}
        """Peers who are to be told that answers may be lost, and when."""
        self._lock = threading.Lock()
        self._is_closed = False

    def way(self, inbox: Inbox, came_relayed: bool = False) -> Connection:
        """What leads to this inbox, made at first use.

        Args:
            came_relayed: what is to be answered came through the relay: do not wait for a direct connection.

        Raises:
            RpcError: nothing does, or its life is over.
            OSError: it is on this host, and nobody listens.
        """
        way = self._ways.get(_RELAY if inbox.inbox_id in self._relayed else inbox.inbox_id)
        return way if way is not None else self._connect(inbox, came_relayed)

    def is_relayed(self, inbox_id: str) -> bool:
        """What is sent to it now goes through the relay."""
        way = self._ways.get(inbox_id)
        return inbox_id in self._relayed or (way is not None and way.is_relay)

    def look(self, now: float) -> bool:
        """Time has passed; whether there is anything more to wait for."""
        ways = [way for way in list(self._ways.values()) if isinstance(way, ZmqConnection)]
        for way in ways:
            way.look(now)
        for inbox_id in [each for each, due in list(self._broken.items()) if due <= now]:
            del self._broken[inbox_id]
            if inbox_id not in self._dead:
                self._on_unsure(inbox_id)
        return bool(self._broken) or any(way.may_give_back for way in ways)

    def greet(self, inbox_id: str, inbox: Inbox) -> None:
        """A peer said where it can be answered."""
        if inbox.inbox_id == inbox_id and inbox_id not in self._dead:
            self._greeted[inbox_id] = inbox

    def greeted(self, inbox_id: str) -> Inbox | None:
        return self._greeted.get(inbox_id)

    def drop(self, inbox_id: str) -> None:
        """Its process is gone: what is queued for it is forgotten."""
        with self._lock:
            self._dead.add(inbox_id)
            self._greeted.pop(inbox_id, None)
            self._relayed.discard(inbox_id)
            way = self._ways.pop(inbox_id, None)
        if way is not None:
            way.close()

    def forget_relayed(self, inbox_id: str) -> None:
        """Forget that this inbox is reached through the relay; messages can be sent to it all the same."""
        self._relayed.discard(inbox_id)

    def forget(self, link: UnixConnection) -> None:
        """It broke; should its peer be alive, the next message makes a new one."""
        with self._lock:
            if self._ways.get(link.peer_id) is link:
                del self._ways[link.peer_id]

    def close(self, linger_ms: int) -> None:
        """Close all; what is queued for the living is given `linger_ms`."""
        with self._lock:
            self._is_closed = True
            ways, self._ways = list(self._ways.values()), {}
        for way in ways:
            if isinstance(way, SocketSender):
                way.close(linger_ms)

    def _connect(self, inbox: Inbox, came_relayed: bool) -> Connection:
        route = choose_route(_present(inbox), host_id=self._inbox.host_id, policy=self._policy, relay=self._relay)
        key = _RELAY if route.kind == "relay" else inbox.inbox_id
        with self._lock:
            if self._is_closed:
                raise RpcCancelledError(f"the bus of worker {self._worker} was closed.")
            if inbox.inbox_id in self._dead:  # whoever still writes to it was overtaken by the news
                raise WorkerDiedError(f"inbox {inbox.inbox_id} belongs to a life that is over.")
            if route.kind == "relay":
                self._relayed.add(inbox.inbox_id)
            way = self._ways.get(key)
            if way is None:
                way = self._ways[key] = self._make(route, inbox, came_relayed)
        if isinstance(way, ZmqConnection):
            self._on_seeking()
            way.read()  # a monitor tells only whoever has looked whether there is anything yet
        return way

    def _make(self, route: Route, inbox: Inbox, came_relayed: bool) -> Connection:
        kind, address = route
        if kind == "ipc":
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.settimeout(_CONNECT_WITHIN_S)
                connection.connect(address.removeprefix(LOCAL))
            except OSError:
                connection.close()
                raise
            link = self._make_link(connection, inbox.inbox_id)
            link.meet(inbox, self._inbox)
            envelope, body = self._hello(inbox.inbox_id)
            link.send(pack(envelope, body, ()))
            return link
        if kind == "relay":
            return self._make_relay()
        return ZmqConnection(
            self._context,
            address,
            inbox_id=inbox.inbox_id,
            limit_bytes=self._limit_bytes,
            greeting=self._hello(inbox.inbox_id),
            secure=self._secure,
            has_relay=bool(self._relay),
            find_relay=self._find_relay,
            is_relayed=came_relayed,
            watch=self._receiver.watch_file,
            unwatch=self._receiver.unwatch_file,
            on_change=self._on_change,
        )

    def _make_relay(self) -> SocketSender:
        return SocketSender(self._context, zmq.DEALER, self._relay, limit_bytes=self._limit_bytes, secure=self._secure)

    def _find_relay(self) -> SocketSender | None:
        with self._lock:
            way = self._ways.get(_RELAY)
            if way is None and not self._is_closed:
                way = self._ways[_RELAY] = self._make_relay()
        return way if isinstance(way, SocketSender) else None

    def _on_change(self, way: ZmqConnection, before: State) -> None:
        inbox_id = way.inbox_id
        if way.state == "relayed":
            logger.warning(
                "worker=%s event=tcp-blocked inbox=%s address=%s: no connection came about, so mail goes through the "
                "relay, and on directly once that can be done",
                self._worker,
                inbox_id,
                way.address,
            )
            self._on_detour(inbox_id)
        elif way.state == "up" and before == "relayed":
            logger.info("worker=%s event=tcp-found inbox=%s address=%s", self._worker, inbox_id, way.address)
        elif way.state == "broken":
            with self._lock:
                if self._ways.get(inbox_id) is way:
                    del self._ways[inbox_id]
            self._broken[inbox_id] = time.monotonic() + _TELL_AFTER_S
            self._on_seeking()
            if before == "up":
                reason = f"the connection to {way.address} broke"
            else:
                reason = f"no connection to {way.address} came about in {GIVE_UP_AFTER_S:g} s, and there is no relay"
            self._on_broken(inbox_id, reason)

    def _hello(self, target: str) -> tuple[bytes, bytes]:
        envelope = Envelope(BUS_VERSION, Kind.HELLO, 0, self._inbox.inbox_id, self._worker, target, job=self._job)
        return encode_envelope(envelope), encode_record(self._inbox)


def _present(inbox: Inbox) -> Inbox:
    """Without the Unix sockets that are not to be seen from here (another container of the same host)."""
    routes = [each for each in inbox.routes if not each.startswith(LOCAL) or Path(each.removeprefix(LOCAL)).exists()]
    return inbox if len(routes) == len(inbox.routes) else msgspec.structs.replace(inbox, routes=routes)
