"""The gateway's figures beside a bare FastAPI route, and against our floors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks import report_table
from benchmarks.bus.checks import Judged, Medians, times_better
from benchmarks.bus.report import short
from benchmarks.bus.work import Row

CLIENTS = 100


class GatewayFloor(NamedTuple):
    """One row of the table, and its floor."""

    row: Row
    times_bare: float | None = None
    """At least so many times as good as the bare route, in the same run."""
    at_most: float | None = None


FLOORS = [
    GatewayFloor(Row("reads", f"status reads, {CLIENTS} clients", "/s", True), times_bare=0.5),
    GatewayFloor(Row("read_p50", "one status read at a time, median", "µs", False)),
    GatewayFloor(Row("read_p99", "one status read at a time, p99", "µs", False)),
    GatewayFloor(Row("lists", f"lists of 20 runs, {CLIENTS} clients", "/s", True)),
    GatewayFloor(Row("queries", f"queries to the master, while {CLIENTS} clients read", "/s", False), at_most=1.2),
    GatewayFloor(Row("idle_queries", "queries to the master, while nobody reads", "/s", False), at_most=0.2),
]
NAMES = [floor.row.name for floor in FLOORS]
HEADINGS = ["", "gateway", "bare FastAPI route", "× bare", "our floor"]


def lines(found: Medians) -> Iterator[list[str]]:
    for floor in FLOORS:
        ours, bare = (found.get(contender, {}).get(floor.row.name) for contender in ("gateway", "fastapi"))
        if ours is not None:
            yield [
                f"{floor.row.title}, {floor.row.unit}",
                short(ours),
                "–" if bare is None else short(bare),
                "–" if bare is None else f"{_times(floor, ours, bare):.2f}",
                _limit(floor),
            ]


def verdicts(found: Medians) -> Iterator[Judged]:
    for floor in FLOORS:
        if floor.times_bare is None and floor.at_most is None:
            continue
        ours, bare = (found.get(contender, {}).get(floor.row.name) for contender in ("gateway", "fastapi"))
        is_passed, value = None, ""
        if ours is not None and floor.at_most is not None:
            is_passed, value = ours <= floor.at_most, f" {short(ours)}"
        elif ours is not None and bare is not None and floor.times_bare is not None:
            ratio = _times(floor, ours, bare)
            is_passed, value = ratio >= floor.times_bare, f" {ratio:.2f} ×"
        word = {True: "pass", False: "FAIL", None: "not measured"}[is_passed]
        yield Judged(word, f"{floor.row.title}:{value} ({_limit(floor)})")


def show(result: dict[str, Any]) -> None:
    report_table.show(HEADINGS, lines(result["medians"]), result["problems"], report_table.footnote(result), 120)


def markdown(result: dict[str, Any]) -> str:
    return report_table.markdown(HEADINGS, lines(result["medians"]), report_table.footnote(result))


def _times(floor: GatewayFloor, ours: float, theirs: float) -> float:
    return times_better(floor.row.name, ours, theirs, [floor.row])


def _limit(floor: GatewayFloor) -> str:
    if floor.at_most is not None:
        return f"≤ {floor.at_most:g}"
    return "–" if floor.times_bare is None else f"≥ {floor.times_bare:g} × bare"
