"""Which way a message leaves: a link to each peer on this host, a socket to each on others, and one to the relay."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from unified.bus.frames import pack
from unified.bus.link import Link
from unified.bus.outlet import Outlet
from unified.bus.routes import LOCAL, Policy, choose_route
from unified.errors import RpcCancelledError, WorkerDiedError
from unified.protocol.envelope import BUS_VERSION, Envelope, Kind, encode_envelope, encode_record
from unified.protocol.records import Inbox

_RELAY = ""
"""Key of the relay's outlet; no inbox has this id."""
_CONNECT_WITHIN_S = 5.0
Way = Link | Outlet


class PostOffice:
    """The ways out of one process, by inbox id.

    Args:
        inbox: this process's own; new peers are told of it, so that they can answer.
        job: what HELLO says it belongs to.
        make_link: makes a link of a connection to the peer of this inbox id, and has it read.
        secure: prepares a socket that will connect to another host.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        inbox: Inbox,
        worker: str,
        job: str,
        policy: Policy,
        relay: str,
        limit_bytes: int,
        make_link: Callable[[socket.socket, str], Link],
        secure: Callable[[zmq.Socket[bytes]], None] = lambda socket: None,
    ) -> None:
        self._context = context
        self._inbox = inbox
        self._worker = worker
        self._job = job
        self._make_link = make_link
        self._secure = secure
        self._policy = policy
        self._relay = relay
        self._limit_bytes = limit_bytes
        self._ways: dict[str, Way] = {}
        self._relayed: set[str] = set()
        self._greeted: dict[str, Inbox] = {}
        self._dead: set[str] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    def way(self, inbox: Inbox) -> Way:
        """What leads to this inbox, connected at first use.

        Raises:
            RpcError: nothing does, or its life is over.
            OSError: it is on this host, and nobody listens.
        """
        way = self._ways.get(_RELAY if inbox.inbox_id in self._relayed else inbox.inbox_id)
        return way if way is not None else self._connect(inbox)

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

    def forget(self, link: Link) -> None:
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
            if isinstance(way, Outlet):
                way.close(linger_ms)

    def _connect(self, inbox: Inbox) -> Way:
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
                way = self._ways[key] = self._make(route.kind, route.address, inbox)
            return way

    def _make(self, kind: str, address: str, inbox: Inbox) -> Way:
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
        is_relay = kind == "relay"
        return Outlet(
            self._context,
            zmq.DEALER if is_relay else zmq.PUSH,
            address,
            limit_bytes=self._limit_bytes,
            greeting=() if is_relay else self._hello(inbox.inbox_id),
            secure=self._secure,
        )

    def _hello(self, target: str) -> tuple[bytes, bytes]:
        envelope = Envelope(BUS_VERSION, Kind.HELLO, 0, self._inbox.inbox_id, self._worker, target, job=self._job)
        return encode_envelope(envelope), encode_record(self._inbox)


def _present(inbox: Inbox) -> Inbox:
    """Without the Unix sockets that are not to be seen from here (another container of the same host)."""
    routes = [each for each in inbox.routes if not each.startswith(LOCAL) or Path(each.removeprefix(LOCAL)).exists()]
    return inbox if len(routes) == len(inbox.routes) else msgspec.structs.replace(inbox, routes=routes)
