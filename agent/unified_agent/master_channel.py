"""The agent's socket to its master: a DEALER that connects again by itself and never keeps a message for later.

Without a connection, messages are dropped. The core repeats everything that matters, and a queue of old heartbeats is
of no use to a master that comes back.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import zmq

from unified.errors import ProtocolError
from unified.protocol.agent_master import AgentToMaster, agent_to_master, master_to_agent
from unified.protocol.client_master import Refused
from unified.protocol.framing import UNREADABLE
from unified.security.curve import secure_client
from unified.security.handshakes import EVENTS, Handshakes, KeyChoice
from unified.security.keys import ClusterKey
from unified_agent.core.messages import AgentEvent, KeyRefused, MasterReached, MasterSaid, MasterUnreadable
from unified_agent.poll_loop import PollLoop

RECONNECT_FIRST_MS = 50
RECONNECT_MOST_MS = 2000
LINGER_MS = 500
"""Time for sending the agent's last message at its end."""
_A_TURN = 64
"""Most messages that are read before other sources have their turn."""


def make_socket(context: zmq.Context[zmq.Socket[bytes]], key: ClusterKey | None, listener: str) -> zmq.Socket[bytes]:
    """Return an unconnected socket for the master. It connects again by itself, and queues nothing meanwhile."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_FIRST_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MOST_MS)
    secure_client(socket, key, listener)
    return socket


class MasterChannel:
    """The connection to the master; messages from it go to `on_event`."""

    def __init__(
        self, loop: PollLoop, address: str, key: ClusterKey | None, on_event: Callable[[AgentEvent], None]
    ) -> None:
        self._loop = loop
        self._address = address
        self._key = key
        self._choice = KeyChoice(key)
        self._on_event = on_event
        self._context = zmq.Context()
        self._socket, self._monitor = self._connect()

    def _connect(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        socket = make_socket(self._context, self._key, self._choice.pick())
        monitor = socket.get_monitor_socket(EVENTS)
        self._handshakes = Handshakes(self._address, self._key)
        self._loop.watch(monitor, self._on_monitor)
        self._loop.watch(socket, self._on_message)
        socket.connect(self._address)
        return socket, monitor

    def reconnect(self) -> None:
        self._disconnect()
        self._socket, self._monitor = self._connect()

    def send(self, message: AgentToMaster, request_id: int = 0) -> None:
        try:
            self._socket.send_multipart(agent_to_master.encode(message, request_id), zmq.DONTWAIT)
        except zmq.Again:
            return  # no connection

    def close(self) -> None:
        """Give the last message time to be sent, then close."""
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._disconnect()
        self._context.term()

    def _disconnect(self) -> None:
        self._loop.unwatch(self._monitor)
        self._loop.unwatch(self._socket)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()

    def _on_monitor(self) -> None:
        if self._handshakes.read(self._monitor):
            self._choice.succeeded()
            self._on_event(MasterReached())
        elif self._handshakes.num_failed and self._choice.failed():
            self.reconnect()
        elif self._handshakes.refusal is not None:
            self._on_event(KeyRefused(reason=self._handshakes.refusal))

    def _on_message(self) -> None:
        for _ in range(_A_TURN):
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._on_event(self._read(frames))

    def _read(self, frames: list[bytes]) -> AgentEvent:
        try:
            request_id, message = master_to_agent.decode(frames)
        except ProtocolError as error:
            return self._unreadable(frames, error)
        return MasterSaid(message=message, request_id=request_id)

    def _unreadable(self, frames: list[bytes], error: ProtocolError) -> MasterUnreadable:
        """Return the event with its reason; a master that cannot read an agent refuses it like a client."""
        try:
            refused = msgspec.msgpack.decode(frames[-1], type=Refused)
        except UNREADABLE:
            return MasterUnreadable(reason=f"the master at {self._address} cannot be understood: {error}")
        reason = f"the master at {self._address} refuses this agent: {refused.reason}"
        return MasterUnreadable(reason=reason, may_pass=refused.code == "defect")
