"""The process of a node: ``python -m unified.snapshot.server CONTROL_FD LISTENER_FD [PEERS_FD] --parent PID``."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import socket

import msgspec

from unified import process
from unified.config.logging import log_to_stderr
from unified.protocol.framing import StreamBuffer, encode_stream
from unified.protocol.snapshots import (
    NameCopyNodes,
    PersistSnapshots,
    ReplaceKey,
    ServeSnapshots,
    SnapshotOrder,
    SnapshotsKept,
    agent_to_snapshots,
)
from unified.security.keys import learn
from unified.snapshot.server.server import SnapshotServer


class AgentConnection:
    """The connection to the agent: its orders, and its end."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._buffer = StreamBuffer()
        self.is_over = False

    def receive(self) -> list[SnapshotOrder]:
        """Wait for orders, and return them; none: the agent is gone."""
        orders: list[SnapshotOrder] = []
        while not orders and not self.is_over:
            try:
                data = self._control.recv(65536)
            except ConnectionResetError:  # the agent left messages unread
                data = b""
            self.is_over = not data
            orders = [agent_to_snapshots.decode(body) for body in self._buffer.feed(data)]
        return orders

    def say(self, message: SnapshotsKept) -> None:
        """Send a message; `receive` notices an agent that is gone."""
        with contextlib.suppress(OSError):
            self._control.sendall(encode_stream(message))

    def fileno(self) -> int:
        return self._control.fileno()


def main() -> int:
    """Serve until the agent is gone."""
    parser = argparse.ArgumentParser(prog="python -m unified.snapshot.server", description="Keeps workers' snapshots.")
    parser.add_argument("control", type=int, metavar="CONTROL_FD", help="socket to the agent")
    parser.add_argument("listener", type=int, metavar="LISTENER_FD", help="socket that workers connect to")
    parser.add_argument("peers", type=int, nargs="?", metavar="PEERS_FD", help="socket that other nodes connect to")
    parser.add_argument("--parent", type=int, help="pid of the agent")
    arguments = parser.parse_args()
    process.die_with_parent(signal.SIGKILL, arguments.parent)
    process.set_title("unified-snaps")
    log_to_stderr("snapshots", logging.INFO)
    agent = AgentConnection(socket.socket(fileno=arguments.control))
    listener = socket.socket(fileno=arguments.listener)
    listener.setblocking(False)
    try:
        orders = agent.receive()
    except msgspec.DecodeError:
        return 1
    if not orders or not isinstance(orders[0], ServeSnapshots):
        return 1
    learn(orders[0].key)
    peers = None if arguments.peers is None else socket.socket(fileno=arguments.peers)
    server = SnapshotServer(orders[0], listener, peers, agent.say)
    obey(server, orders)
    while not agent.is_over:
        if server.step(agent.fileno()):
            obey(server, agent.receive())
    server.close()
    return 0


def obey(server: SnapshotServer, orders: list[SnapshotOrder]) -> None:
    for order in orders:
        match order:
            case PersistSnapshots():
                server.persist()
            case ReplaceKey():
                learn(order.key)
            case NameCopyNodes():
                server.name_copy_nodes(order)


if __name__ == "__main__":
    raise SystemExit(main())
