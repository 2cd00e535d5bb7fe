"""Status reads through the gateway, and what they cost the master. See benchmarks/README.md."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import program
from benchmarks.bus.work import percentiles_us, wanted
from benchmarks.gateway import load, report
from benchmarks.gateway.servers import RUNS, TOKEN, GatewayUnderLoad, bare_route, gateway

STORM_S = 4.0
"""Length of one reading of a rate."""
LATENCIES = 1_000
BROKEN = (load.WrongAnswerError, OSError, RuntimeError)
"""What spoils a round."""


def main() -> int:
    args = program.parser(__doc__, report.NAMES).parse_args()

    def rounds() -> tuple[program.Figures, list[str]]:
        figures: program.Figures = {"gateway": {}, "fastapi": {}}
        problems: list[str] = []
        for number in range(args.rounds):
            began = time.perf_counter()
            try:
                with tempfile.TemporaryDirectory(prefix="unified-bench-") as folder:
                    for contender, row, value in measure(Path(folder), number):
                        if wanted(row, rows=args.rows):
                            figures[contender].setdefault(row, []).append(value)
            except BROKEN as error:
                problems.append(f"round {number + 1}: {type(error).__name__}: {error}")
            print(f"round {number + 1}/{args.rounds}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        return figures, problems

    return program.run("gateway", args, rounds, report, report.verdicts)


def measure(folder: Path, number: int) -> Iterator[tuple[str, str, float]]:
    """One round: contender, row, value. The two are measured in an order that alternates."""
    with gateway(folder) as ours:
        path = f"/train/{ours.name}"
        with load.connected(1, ours.port, path, TOKEN) as (client,):
            answer = client.ask()
        with bare_route(folder, answer) as port:
            ways = [("gateway", ours.port, TOKEN), ("fastapi", port, "")]
            for contender, where, token in reversed(ways) if number % 2 else ways:
                with load.connected(report.CLIENTS, where, path, token) as clients:
                    clients[0].ask()  # so that the first query, which is due at once, is not counted
                    asked = ours.master.requests.total()
                    yield contender, "reads", load.rate(clients, STORM_S)
                if contender == "gateway":
                    yield contender, "queries", (ours.master.requests.total() - asked) / STORM_S
                with load.connected(1, where, path, token) as (client,):
                    p50, p99 = percentiles_us(load.latencies(client, LATENCIES))
                yield contender, "read_p50", p50
                yield contender, "read_p99", p99
        yield from beside(ours)


def beside(ours: GatewayUnderLoad) -> Iterator[tuple[str, str, float]]:
    """Rows that a bare route has nothing to compare with."""
    with load.connected(report.CLIENTS, ours.port, f"/train?limit={RUNS}", TOKEN) as clients:
        yield "gateway", "lists", load.rate(clients, STORM_S)
    time.sleep(1.5)  # the last answer may be asked for again once
    asked = ours.master.requests.total()
    time.sleep(STORM_S)
    yield "gateway", "idle_queries", (ours.master.requests.total() - asked) / STORM_S


if __name__ == "__main__":
    sys.exit(main())
