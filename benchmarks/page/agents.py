"""The stand-in agents of `benchmarks/bus/scale_load.py`, whose workers report progress and whose heartbeats are timed.

``agents.py MASTER NODES WORKERS_A_NODE``. Each agent sends a heartbeat a second. Lines on standard input: ``changes N``
for N workers a second that report a step, those of a node together; ``probe`` for one step of the role `probe`, whose
number is the time in milliseconds; ``read`` for the heartbeats since the last one. It prints JSON lines of totals, and
ends with its standard input.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time

import msgspec
import zmq

from benchmarks.bus.scale_load import REGISTERING, Node, Wanted, all_registered
from benchmarks.bus.work import percentiles_us
from unified.protocol.agent_master import ObservedWorker
from unified.protocol.records import Progress, WorkerState

TICK_S = 0.01
REPORT_S = 0.5
SHORT = "short"
"""How the names of jobs begin whose workers end at once."""
PROBE = "probe"
TOTAL_STEPS = 100_000


class TimedNode(Node):
    """An agent of which every worker reports its node's step, and that knows how long heartbeats take."""

    def begin(self, latencies: list[float], epoch: float) -> None:
        """
        Args:
            latencies: where the seconds from a heartbeat to its answer go.
            epoch: when `probe` counts from, in seconds since 1970.
        """
        self._latencies = latencies
        self._epoch = epoch
        self._sent_at = 0.0
        self._step = 0
        self._probed = 0
        self._are_ending = False

    def beat(self) -> None:
        self._sent_at = self._sent_at or time.perf_counter()  # of the oldest that is not answered
        super().beat()
        self.hear()  # what came meanwhile: to send may take its event from the descriptor

    def seen(self) -> None:
        if self._sent_at:
            self._latencies.append(time.perf_counter() - self._sent_at)
        self._sent_at = 0.0

    def advance(self) -> int:
        """Report a step of all workers; return how many changed."""
        self._step += 1
        self.tell()
        self.hear()
        return self.num_running

    def probe(self) -> None:
        self._probed = round((time.time() - self._epoch) * 1000)
        self.tell()
        self.hear()

    @property
    def has_probe(self) -> bool:
        return any(_is_probe(worker) for worker in self.workers)

    def _observe(self, workers: list[Wanted]) -> None:
        super()._observe(workers)
        if any(_ends(worker) for worker in workers):
            self._are_ending = True
            self.tell()
            self._are_ending = False

    def _observed(self, worker: Wanted) -> ObservedWorker:
        # Without an inbox there is no directory, of which every agent would be sent all: see bus/scale.py for its cost.
        found = msgspec.structs.replace(super()._observed(worker), inbox=None)
        if _ends(worker):
            return msgspec.structs.replace(found, state=WorkerState.EXITED) if self._are_ending else found
        if worker.run is None:
            return found
        if _is_probe(worker):
            progress = Progress(step=self._probed)
        else:
            metrics: dict[str, float | str] = {"loss": 8 / (1 + self._step), "tokens_per_s": 3000.0 + self._step % 100}
            progress = Progress(step=self._step, total=TOTAL_STEPS, metrics=metrics)
        return msgspec.structs.replace(found, progress=progress)


def _ends(worker: Wanted) -> bool:
    return worker.run is not None and worker.job_id.startswith(SHORT)


def _is_probe(worker: Wanted) -> bool:
    return worker.name.startswith(f"{PROBE}_")


class Agents:
    """All of them, in one thread."""

    def __init__(self, master: str, number: int, capacity: int) -> None:
        self._master, self._number, self._capacity = master, number, capacity
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 65536)
        self._epoll = select.epoll()
        self._nodes: list[TimedNode] = []
        self._by_fd: dict[int, TimedNode] = {}
        self._latencies: list[float] = []
        self._began = time.monotonic()
        self._epoch = time.time()
        self._beats_due = self._changes_due = 0.0
        self._next_beat = self._next_change = 0
        self._per_s = 0.0
        self._is_asked = False
        self._told: dict[str, float] = {"epoch": self._epoch, "windows": 0, "changes": 0}

    def run(self) -> None:
        ticks, reported_at = 0, 0.0
        while self._take_lines():
            ticks += 1
            until = self._began + ticks * TICK_S
            self._register()
            if len(self._nodes) == self._number:
                self._beat()
                self._change()
            while True:
                for fd, _ in self._epoll.poll(max(0.0, until - time.monotonic())):
                    self._by_fd[fd].hear()
                if time.monotonic() >= until:
                    break
            if self._is_asked and self._latencies:
                self._tell_heartbeats()
            if time.monotonic() > reported_at + REPORT_S:
                reported_at = time.monotonic()
                self._report(late_s=reported_at - until)
        self._context.destroy(0)

    def _take_lines(self) -> bool:
        while select.select([sys.stdin], [], [], 0)[0]:
            line = os.read(sys.stdin.fileno(), 4096).decode()
            if not line:
                return False
            for words in map(str.split, line.splitlines()):
                match words:
                    case ["changes", number]:
                        self._per_s = float(number)
                    case ["probe"]:
                        for node in self._nodes:
                            if node.has_probe:
                                node.probe()
                    case ["read"]:
                        self._is_asked = True
        return True

    def _tell_heartbeats(self) -> None:
        p50, p99 = percentiles_us(self._latencies)
        self._told |= {"beat_p50": p50 / 1000, "beat_p99": p99 / 1000, "beats": len(self._latencies)}
        self._told["windows"] += 1
        self._latencies.clear()
        self._is_asked = False
        self._report(late_s=0.0)

    def _register(self) -> None:
        first = len(self._nodes)
        if all(node.is_registered for node in self._nodes):
            for index in range(first, min(first + REGISTERING, self._number)):
                node = TimedNode(index, self._capacity, self._context, self._master)
                node.begin(self._latencies, self._epoch)
                self._nodes.append(node)
                fd = int(node.socket.get(zmq.FD))
                self._by_fd[fd] = node
                self._epoll.register(fd, select.EPOLLIN)
                node.hear()

    def _beat(self) -> None:
        self._beats_due += self._number * TICK_S
        while self._beats_due >= 1:
            self._beats_due -= 1
            self._nodes[self._next_beat % self._number].beat()
            self._next_beat += 1

    def _change(self) -> None:
        self._changes_due += self._per_s * TICK_S
        while self._changes_due >= self._capacity:
            node = self._nodes[self._next_change % self._number]
            self._next_change += 1
            if not node.has_probe:
                self._told["changes"] += node.advance()
            self._changes_due -= self._capacity

    def _report(self, late_s: float) -> None:
        registered = all_registered(self._nodes, self._number)
        now = {"register_s": (time.monotonic() - self._began) * registered, "late_s": late_s}
        running = sum(node.num_running for node in self._nodes)
        print(json.dumps({**self._told, **now, "running": running}), flush=True)


if __name__ == "__main__":
    Agents(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])).run()
