"""Which socket a message leaves through: one a peer, connected at first use, and one to the relay for all the rest."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import zmq

from unified.bus.outlet import Outlet
from unified.bus.routes import Policy, choose_route
from unified.bus.tensors import Buffer
from unified.errors import RpcCancelledError, WorkerDiedError
from unified.protocol.envelope import BUS_VERSION, Envelope, Kind, encode_envelope, encode_record
from unified.protocol.records import Inbox

_RELAY = ""
"""Key of the relay's outlet; no inbox has this id."""


class PostOffice:
    """The outlets of one process, by inbox id.

    Args:
        inbox: this process's own; new peers are told of it, so that they can answer.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        inbox: Inbox,
        worker: str,
        policy: Policy,
        relay: str,
        limit_bytes: int,
    ) -> None:
        self._context = context
        self._inbox = inbox
        self._worker = worker
        self._policy = policy
        self._relay = relay
        self._limit_bytes = limit_bytes
        self._outlets: dict[str, Outlet] = {}
        self._relayed: set[str] = set()
        self._greeted: dict[str, Inbox] = {}
        self._dead: set[str] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    def outlet(self, inbox: Inbox) -> Outlet:
        """What leads to this inbox, connected at first use.

        Raises:
            RpcError: nothing does, or its life is over.
        """
        outlet = self._outlets.get(_RELAY if inbox.inbox_id in self._relayed else inbox.inbox_id)
        return outlet if outlet is not None else self._connect(inbox)

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
            outlet = self._outlets.pop(inbox_id, None)
        if outlet is not None:
            outlet.close()

    def close(self, linger_ms: int) -> None:
        """Close all; what is queued for the living is given `linger_ms`."""
        with self._lock:
            self._is_closed = True
            outlets, self._outlets = list(self._outlets.values()), {}
        for outlet in outlets:
            outlet.close(linger_ms)

    def _connect(self, inbox: Inbox) -> Outlet:
        route = choose_route(_present(inbox), host_id=self._inbox.host_id, policy=self._policy, relay=self._relay)
        is_relay = route.kind == "relay"
        key = _RELAY if is_relay else inbox.inbox_id
        with self._lock:
            if self._is_closed:
                raise RpcCancelledError(f"the bus of worker {self._worker} was closed.")
            if inbox.inbox_id in self._dead:  # whoever still writes to it was overtaken by the news
                raise WorkerDiedError(f"inbox {inbox.inbox_id} belongs to a life that is over.")
            if is_relay:
                self._relayed.add(inbox.inbox_id)
            if key not in self._outlets:
                self._outlets[key] = Outlet(
                    self._context,
                    zmq.DEALER if is_relay else zmq.PUSH,
                    route.address,
                    limit_bytes=self._limit_bytes,
                    greeting=() if is_relay else self._hello(inbox.inbox_id),
                )
            return self._outlets[key]

    def _hello(self, target: str) -> list[Buffer]:
        envelope = Envelope(BUS_VERSION, Kind.HELLO, 0, self._inbox.inbox_id, self._worker, target)
        return [encode_envelope(envelope), encode_record(self._inbox)]


def _present(inbox: Inbox) -> Inbox:
    """Without the ipc sockets that are not to be seen from here (another container of the same host)."""
    routes = [each for each in inbox.routes if not each.startswith("ipc://") or Path(each[6:]).exists()]
    return inbox if len(routes) == len(inbox.routes) else msgspec.structs.replace(inbox, routes=routes)
