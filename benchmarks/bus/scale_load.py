"""Many agents in one process, each with a worker or more that exist only on paper: real sockets, real messages.

``scale_load.py MASTER NODES INBOXES_A_NODE`` registers the nodes, converges to what the master desires, and sends
one heartbeat a second for every agent; from a line on its standard input on, one for every inbox. It prints a JSON line
of totals every half second, and ends with its standard input.
"""

from __future__ import annotations

import json
import secrets
import select
import sys
import time
from collections.abc import Sequence

import msgspec
import zmq

from unified.config import settings
from unified.protocol.agent_master import (
    AgentHeartbeat,
    ObservedWorker,
    ObservedWorkers,
    RegisterAgent,
    agent_to_master,
)
from unified.protocol.framing import Codec
from unified.protocol.records import Inbox, NodeResources, WorkerState

TICK_S = 0.05
REPORT_S = 0.5
REGISTERING = 200
"""Nodes that register in one tick."""


class Order(msgspec.Struct, tag_field="type", frozen=True):
    """What a simulated agent reads of an order: everything else, such as the directory, is only counted."""


class Registered(Order, tag="agent-registered", frozen=True):
    pass


class Refused(Order, tag="agent-refused", frozen=True):
    reason: str


class Seen(Order, tag="heartbeat-seen", frozen=True):
    pass


class Again(Order, tag="register-again", frozen=True):
    pass


class News(Order, tag="directory-changed", frozen=True):
    pass


class Wanted(msgspec.Struct, frozen=True):
    job_id: str
    name: str
    worker_incarnation: int
    run: dict[str, msgspec.Raw] | None = None


class Desired(Order, tag="desired-workers", frozen=True):
    generation: int
    workers: list[Wanted]


orders: Codec[Registered | Refused | Seen | Again | News | Desired] = Codec(
    Registered | Refused | Seen | Again | News | Desired
)


class Node:
    def __init__(self, index: int, capacity: int, context: zmq.Context[zmq.Socket[bytes]], master: str) -> None:
        self.name = f"sim-{index}"
        self.address = f"10.{index >> 16}.{index >> 8 & 255}.{index & 255}"
        self.capacity = capacity
        self.generation = 0
        self.inboxes: dict[tuple[str, str, int], Inbox] = {}
        self.is_registered = False
        self.workers: list[Wanted] = []
        self.num_running = 0
        self.num_bytes = 0
        self.largest = 0
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.connect(master)
        self.say(self._registration())

    def say(self, message: object) -> None:
        self.socket.send_multipart(agent_to_master.encode(message, 1))

    def beat(self) -> None:
        self.say(AgentHeartbeat(node=self.name, incarnation="a", generation=self.generation))

    def hear(self) -> None:
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            size = sum(map(len, frames))
            self.num_bytes += size
            self.largest = max(self.largest, size)
            match orders.decode(frames).message:
                case Registered():
                    self.is_registered = True
                    self._observe([])
                case Again():
                    self.say(self._registration())
                case Refused(reason=reason):
                    raise SystemExit(f"{self.name} was refused: {reason}")
                case Desired(generation=generation, workers=workers) if generation >= self.generation:
                    self.generation = generation
                    self._observe(workers)
                case Seen():
                    self.seen()
                case _:
                    pass

    def seen(self) -> None:
        """Take note of an answer to a heartbeat."""

    def _observe(self, workers: list[Wanted]) -> None:
        self.workers = workers
        self.num_running = sum(worker.run is not None for worker in workers)
        self.tell()

    def tell(self) -> None:
        """Report all workers."""
        observed = [self._observed(worker) for worker in self.workers]
        self.say(ObservedWorkers(node=self.name, incarnation="a", generation=self.generation, workers=observed))

    def _observed(self, worker: Wanted) -> ObservedWorker:
        incarnation = (worker.job_id, worker.name, worker.worker_incarnation)
        return ObservedWorker(
            job_id=worker.job_id,
            name=worker.name,
            worker_incarnation=worker.worker_incarnation,
            kind="worker",
            state=WorkerState.READY if worker.run is None else WorkerState.RUNNING,
            pid=1000,
            round=0 if worker.run is None else 1,
            inbox=self.inboxes.setdefault(incarnation, self._inbox()),
        )

    def _inbox(self) -> Inbox:
        """As long as a real one."""
        inbox_id = secrets.token_hex(12)
        return Inbox(
            inbox_id=inbox_id,
            routes=[f"ipc:///run/user/1000/unified/{inbox_id}.bus", f"tcp://{self.address}:45678"],
            host_id=f"{settings.host_id()[:-4]}{self.name[-4:]}",
        )

    def _registration(self) -> RegisterAgent:
        return RegisterAgent(
            node=self.name,
            incarnation="a",
            hostname=f"{self.name}.example",
            host_id=f"host-{self.name}",
            address=self.address,
            pid=1,
            resources=NodeResources(cpu=8, memory_mb=1000, disk_mb=1000, user_defined={"sim": float(self.capacity)}),
        )


def main() -> None:
    master, number, capacity = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 65536)
    nodes: list[Node] = []
    by_socket: dict[zmq.Socket[bytes], Node] = {}
    poller = zmq.Poller()
    next_beat = 0
    began = time.monotonic()
    num_ticks = 0
    reported_at = began
    registered_at = 0.0
    beats_a_second = number
    while True:
        if select.select([sys.stdin], [], [], 0)[0]:
            if not sys.stdin.readline():
                break
            beats_a_second = number * capacity
        for index in range(len(nodes), min(len(nodes) + REGISTERING, number)):
            node = Node(index, capacity, context, master)
            nodes.append(node)
            by_socket[node.socket] = node
            poller.register(node.socket, zmq.POLLIN)
        num_ticks += 1
        for _ in range(round(beats_a_second * TICK_S) if len(nodes) == number else 0):
            nodes[next_beat % number].beat()
            next_beat += 1
        for found, _ in poller.poll(max(0, round((began + num_ticks * TICK_S - time.monotonic()) * 1000))):
            by_socket[found].hear()
        time.sleep(max(0.0, began + num_ticks * TICK_S - time.monotonic()))
        if time.monotonic() > reported_at + REPORT_S:
            reported_at = time.monotonic()
            registered_at = registered_at or (reported_at if all_registered(nodes, number) else 0.0)
            late_s = reported_at - began - num_ticks * TICK_S
            report(nodes, register_s=max(0.0, registered_at - began), late_s=late_s)
    context.destroy(0)


def all_registered(nodes: Sequence[Node], number: int) -> bool:
    return len(nodes) == number and all(node.is_registered for node in nodes)


def report(nodes: list[Node], *, register_s: float, late_s: float) -> None:
    """
    Args:
        register_s: until the master had welcomed every node; 0 before that.
        late_s: how far this process is behind with its heartbeats.
    """
    line = {
        "register_s": register_s,
        "running": sum(node.num_running for node in nodes),
        "sent_a_node_kib": sorted(node.num_bytes for node in nodes)[len(nodes) // 2] / 1024,
        "largest_message_kib": max(node.largest for node in nodes) / 1024,
        "load_late_s": late_s,
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
