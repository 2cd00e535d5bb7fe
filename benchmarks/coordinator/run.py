"""The master as coordinator: heartbeats, shard look-ups, barriers and assignment. See benchmarks/README.md."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import msgspec

from benchmarks import program
from benchmarks.bus.work import percentiles_us, read, wanted
from benchmarks.coordinator import load, report
from benchmarks.coordinator.master import Populace, master
from unified.coordinator.client import RemoteCoordinator
from unified.protocol.coordinator import HeartbeatResponse, worker_to_coordinator

STORM = 200
"""Questions of each worker in one reading of a rate."""
BARRIERS = 300
"""In one round: so that the third longest is its p99."""
LATENCIES = 2_000
PURE: dict[str, Callable[[], float]] = {
    "assign": partial(report.assign_ms, shuffle=False),
    "assign_shuffled": partial(report.assign_ms, shuffle=True),
    "assign_memory": report.peak_mb,
    "unevenness": report.unevenness_percent,
    "moved": report.moved_percent,
}
Figures = Iterator[tuple[str, str, float]]
"""Contender, row, value."""


def main() -> int:
    args = program.parser(__doc__, report.NAMES).parse_args()

    def rounds() -> tuple[program.Figures, list[str]]:
        figures: program.Figures = {"unified": {}, "zmq": {}}
        problems: list[str] = []
        for number in range(args.rounds):
            began = time.perf_counter()
            try:
                for contender, row, value in measure(number, args.rows):
                    if wanted(row, rows=args.rows):
                        figures[contender].setdefault(row, []).append(value)
            except load.BROKEN as error:
                problems.append(f"round {number + 1}: {type(error).__name__}: {error}")
            print(f"round {number + 1}/{args.rounds}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        return figures, problems

    return program.run("coordinator", args, rounds, report, report.verdicts)


def measure(number: int, rows: list[str]) -> Figures:
    """One round: a master of its own, and each row measured on it and on a bare echo, in an order that alternates."""
    for row, take in PURE.items():
        if wanted(row, rows=rows):
            yield "unified", row, read(take)
    if not wanted(*(name for name in report.NAMES if name not in PURE), rows=rows):
        return
    is_bare_first = number % 2 == 1
    with tempfile.TemporaryDirectory(prefix="unified-bench-") as folder, master(Path(folder)) as address:
        populace = Populace(address)
        asked = {"heartbeat": populace.heartbeats, "look_up": populace.look_ups}
        for name, said in asked.items():
            if wanted(f"{name}s", f"{name}_p50", f"{name}_p99", rows=rows):
                yield from questions(name, said, address, is_bare_first=is_bare_first)
        if wanted("barrier_p50", "barrier_p99", rows=rows):
            yield from meetings(populace, address, is_bare_first=is_bare_first)
        if wanted("client_p50", rows=rows):
            yield "unified", "client_p50", client_us(populace, address)


def questions(name: str, said: list[load.Said], address: str, *, is_bare_first: bool) -> Figures:
    """Rate and latency of a question. What the bare echo is sent and sends is of the same sizes."""
    with load.echo(said[0].answer) as bare, load.Loaders() as loaders:
        echoed = [each._replace(answer=said[0].answer) for each in said]
        ways = [("unified", address, said), ("zmq", bare, echoed)]
        for contender, where, says in reversed(ways) if is_bare_first else ways:
            yield contender, f"{name}s", read(partial(loaders.rate, where, says, STORM))
            p50, p99 = percentiles_us(load.latencies(where, says[0], LATENCIES))
            yield contender, f"{name}_p50", p50
            yield contender, f"{name}_p99", p99


def meetings(populace: Populace, address: str, *, is_bare_first: bool) -> Figures:
    """Barriers. The bare echo waits until a hundred have asked, and answers them all."""
    names = count()

    def barriers(where: str, times: int) -> tuple[list[float], bytes]:
        barrier_id = f"epoch-{next(names):03d}"
        return load.barriers(
            where, [msgspec.structs.replace(each, barrier_id=barrier_id) for each in populace.arrivals], times
        )

    _, answer = barriers(address, 1)
    with load.echo(answer, gather=len(populace.arrivals)) as bare:
        ways = [("unified", address), ("zmq", bare)]
        for contender, where in reversed(ways) if is_bare_first else ways:
            p50, p99 = percentiles_us(barriers(where, BARRIERS)[0])
            yield contender, "barrier_p50", p50 / 1e3
            yield contender, "barrier_p99", p99 / 1e3


def client_us(populace: Populace, address: str) -> float:
    """What a heartbeat takes with everything that a worker has between itself and the socket."""
    heartbeat = worker_to_coordinator.decode_body(populace.heartbeats[0].request)
    taken = []
    with RemoteCoordinator(address) as coordinator:
        for _ in range(LATENCIES):
            began = time.perf_counter()
            coordinator.ask(heartbeat, HeartbeatResponse)
            taken.append(time.perf_counter() - began)
    return percentiles_us(taken)[0]


if __name__ == "__main__":
    sys.exit(main())
