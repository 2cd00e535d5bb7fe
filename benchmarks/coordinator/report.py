"""The coordinator's figures beside what the reference publishes, beside a bare echo, and against our floors.

The cost and the evenness of spreading shards are measured here as well: the pure part, without any process.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks import report_table
from benchmarks.bus.checks import Judged, Medians, times_better
from benchmarks.bus.report import short
from benchmarks.bus.work import Row
from unified.coordinator.core.shards.ledger import Ledger
from unified.coordinator.core.shards.plan import ShardPlan


class Target(NamedTuple):
    """One row of the table, and what it is held against."""

    row: Row
    published: float | None = None
    """By the reference, on 64 cores."""
    limit: float | None = None
    """Ours, on two cores: a rate at least so high, anything else at most so high."""

    def times_better(self, ours: float, theirs: float) -> float:
        return times_better(self.row.name, ours, theirs, [self.row])


TARGETS = [
    Target(Row("heartbeats", "heartbeats, 100 workers", "/s", True), 11_500, 20_000),
    Target(Row("look_ups", "shard look-ups, 100 workers", "/s", True), 8_900, 15_000),
    Target(Row("barrier_p50", "barrier of 100, median", "ms", False)),
    Target(Row("barrier_p99", "barrier of 100, p99", "ms", False), 48, 20),
    Target(Row("heartbeat_p50", "one heartbeat at a time, median", "µs", False)),
    Target(Row("heartbeat_p99", "one heartbeat at a time, p99", "µs", False)),
    Target(Row("look_up_p50", "one look-up at a time, median", "µs", False)),
    Target(Row("look_up_p99", "one look-up at a time, p99", "µs", False)),
    Target(Row("client_p50", "one heartbeat at a time through `RemoteCoordinator`, median", "µs", False)),
    Target(Row("assign", "100 000 shards to 1 000 workers", "ms", False), None, 50),
    Target(Row("assign_shuffled", "100 000 shards to 1 000 workers, shuffled", "ms", False), None, 50),
    Target(Row("assign_memory", "memory for that, peak", "MB", False), None, 100),
    Target(Row("unevenness", "100 000 shards on 100 workers: furthest from the mean", "%", False), 4, 0.1),
    Target(Row("moved", "shards moved when one worker joins 100", "%", False), 1, 1.1),
]
NAMES = [target.row.name for target in TARGETS]
HEADINGS = ["", "unified", "reference, 64 cores", "× reference", "our floor", "bare ZeroMQ", "× bare ZeroMQ"]


def lines(found: Medians) -> Iterator[list[str]]:
    for target in TARGETS:
        ours, bare = (found.get(contender, {}).get(target.row.name) for contender in ("unified", "zmq"))
        if ours is not None:
            yield [
                f"{target.row.title}, {target.row.unit}",
                short(ours),
                _short(target.published),
                _times(target, ours, target.published),
                "–" if target.limit is None else f"{'≥' if target.row.is_rate else '≤'} {target.limit:g}",
                _short(bare),
                _times(target, ours, bare),
            ]


def verdicts(found: Medians) -> Iterator[Judged]:
    for target in TARGETS:
        ours = found.get("unified", {}).get(target.row.name)
        if target.limit is not None:
            is_passed = None if ours is None else target.times_better(ours, target.limit) >= 1
            word = {True: "pass", False: "FAIL", None: "not measured"}[is_passed]
            sign = "at least" if target.row.is_rate else "at most"
            value = f" {short(ours)}" if ours is not None else ""
            yield Judged(word, f"{target.row.title}, {target.row.unit}:{value} ({sign} {target.limit:g})")


def show(result: dict[str, Any]) -> None:
    report_table.show(HEADINGS, lines(result["medians"]), result["problems"], report_table.footnote(result), 160)


def markdown(result: dict[str, Any]) -> str:
    return report_table.markdown(HEADINGS, lines(result["medians"]), report_table.footnote(result))


def _short(value: float | None) -> str:
    return "–" if value is None else short(value)


def _times(target: Target, ours: float, theirs: float | None) -> str:
    if theirs is None:
        return "–"
    ratio = target.times_better(ours, theirs)
    return "∞" if ratio == float("inf") else f"{ratio:.2f}"


SHARDS = 100_000
MANY = 1_000
"""Workers, to see what it costs."""
SOME = 100
"""Workers, to see how even it is: of so many a join has to move 1 %."""


def assign_ms(*, shuffle: bool) -> float:
    """From nothing to each of `MANY` workers' list of shards."""
    workers = _names(MANY)
    began = time.perf_counter()
    held = _assign(workers, shuffle=shuffle)
    seconds = time.perf_counter() - began
    del held  # not before the clock was read
    return seconds * 1e3


def peak_mb() -> float:
    """The most that Python had allocated for that at once (tracemalloc), shuffled; in 10**6 bytes."""
    workers = _names(MANY)
    tracemalloc.start()
    try:
        _assign(workers, shuffle=True)
        return tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()


def unevenness_percent() -> float:
    """How far the worker that has most, or least, is from the mean."""
    loads = [len(shards) for shards in _assign(_names(SOME), shuffle=True)[1].values()]
    mean = SHARDS / SOME
    return max(abs(load - mean) for load in loads) / mean * 100


def moved_percent() -> float:
    """How many shards have another owner when one worker more has joined."""
    ledger, before = _assign(_names(SOME), shuffle=True)
    owner = {shard: name for name, shards in before.items() for shard in shards}
    ledger.set_workers(_names(SOME + 1))
    moved = sum(owner[shard] != name for name in ledger.workers for shard in ledger.shards_of(name, 0))
    return moved / SHARDS * 100


def _assign(workers: list[str], *, shuffle: bool) -> tuple[Ledger, dict[str, list[int]]]:
    plan = ShardPlan(dataset_id="corpus", total_samples=SHARDS, shard_size=1, shuffle=shuffle, seed=1)
    ledger = Ledger(plan, workers)
    return ledger, {name: ledger.shards_of(name, 0) for name in workers}


def _names(number: int) -> list[str]:
    return [f"worker-{rank:04d}" for rank in range(number)]
