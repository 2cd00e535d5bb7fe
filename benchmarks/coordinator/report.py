"""The figures of `coordinator.py` beside what the reference publishes, beside a bare echo, and against our floors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from benchmarks import report_table
from benchmarks.bus.report import short
from benchmarks.bus.work import Row

Medians = Mapping[str, Mapping[str, float]]
"""By contender, then by row."""


class Target(NamedTuple):
    """One row of the table, and what it is held against."""

    row: Row
    published: float | None = None
    """By the reference, on 64 cores."""
    limit: float | None = None
    """Ours, on two cores: a rate at least so high, anything else at most so high."""

    def times_better(self, ours: float, theirs: float) -> float:
        better, worse = (ours, theirs) if self.row.is_rate else (theirs, ours)
        return better / worse if worse else float("inf")

    def is_passed(self, ours: float) -> bool | None:
        """None: nothing was promised."""
        return None if self.limit is None else self.times_better(ours, self.limit) >= 1


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
    """Of each row that was measured, the cells."""
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


def verdicts(found: Medians) -> Iterator[tuple[bool | None, str]]:
    """Of each floor whether it is held, and a line that says so. None: not measured."""
    for target in TARGETS:
        ours = found.get("unified", {}).get(target.row.name)
        if target.limit is not None:
            is_passed = None if ours is None else target.is_passed(ours)
            word = {True: "pass", False: "FAIL", None: "not measured"}[is_passed]
            sign = "at least" if target.row.is_rate else "at most"
            value = f" {short(ours)}" if ours is not None else ""
            yield is_passed, f"{target.row.title}, {target.row.unit}:{value} ({sign} {target.limit:g}): {word}"


def show(result: dict[str, Any]) -> None:
    report_table.show(HEADINGS, lines(result["medians"]), result["problems"], footnote(result), 160)


def markdown(result: dict[str, Any]) -> str:
    return report_table.markdown(HEADINGS, lines(result["medians"]), footnote(result))


def footnote(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return (
        f"Medians of {result['rounds']} rounds, the two in turn, on {machine['cores']} cores, Python "
        f"{machine['python']}, {machine['date']}, load {machine['load_1min']} at the start. “×” is how many times "
        "better ours is."
    )


def _short(value: float | None) -> str:
    return "–" if value is None else short(value)


def _times(target: Target, ours: float, theirs: float | None) -> str:
    if theirs is None:
        return "–"
    ratio = target.times_better(ours, theirs)
    return "∞" if ratio == float("inf") else f"{ratio:.2f}"
