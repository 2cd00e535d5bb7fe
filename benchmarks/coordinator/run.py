"""The master as coordinator: heartbeats, shard look-ups, barriers and assignment. See benchmarks/README.md."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import msgspec

from benchmarks.bus.checks import medians
from benchmarks.bus.run import README, names_of
from benchmarks.bus.work import percentiles_us, read, wanted
from benchmarks.coordinator import load, report
from benchmarks.coordinator.master import Populace, master
from benchmarks.launch.run import fill, machine
from unified.data.coordinator_client import RemoteCoordinator
from unified.protocol.coordinator import HeartbeatResponse, worker_to_coordinator

MARK = "<!-- filled from benchmarks/coordinator/run.py -->"
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
    args = parse()
    if args.check_only:
        return check(json.loads((args.out / "coordinator.json").read_text())["medians"])
    began_on = machine()
    figures: dict[str, dict[str, list[float]]] = {"unified": {}, "zmq": {}}
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
    result = {
        "machine": began_on,
        "rounds": args.rounds,
        "medians": medians(figures),
        "figures": figures,
        "problems": problems,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "coordinator.json").write_text(json.dumps(result, indent=1))
    report.show(result)
    if args.readme:
        fill(README, report.markdown(result), MARK)
    code = check(medians(figures)) if args.check else 0
    return 1 if problems else code


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often each row is measured (default: 5)")
    parser.add_argument("--rows", type=names_of(report.NAMES), default=[], help="comma-separated; default: all")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="where coordinator.json goes")
    parser.add_argument("--readme", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--check", action="store_true", help="hold the medians against the floors; 1 if one is missed")
    parser.add_argument("--check-only", action="store_true", help="the same for the coordinator.json of an earlier run")
    return parser.parse_args()


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


def check(found: report.Medians) -> int:
    """Print each floor; 1 if one was missed."""
    verdicts = list(report.verdicts(found))
    for _, line in verdicts:
        print(line)
    return int(any(is_passed is False for is_passed, _ in verdicts))


if __name__ == "__main__":
    sys.exit(main())
