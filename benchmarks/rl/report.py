"""The figures of `benchmarks/rl/run.py` beside Ray's, and against our floors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks import report_table
from benchmarks.bus.checks import Judged, Medians, times_better
from benchmarks.bus.report import short
from benchmarks.bus.work import Row
from benchmarks.rl import work

CONTENDERS = {"unified": "unified", "ray": "Ray", "bare": "bare"}
HEADINGS = ["", *CONTENDERS.values(), "× Ray", "our floor"]
FLOORS = {
    **dict.fromkeys(("queue", "queue_read", "argument", "argument_read", "call_p50", "calls"), 1.0),
    "start": 2.0,
    "start_preload": 2.5,
    "start_agent": 10.0,
}
"""Least ratio to Ray. The rows that are left out have one reading a round of memory that is new, or a p99."""


def lines(found: Medians) -> Iterator[list[str]]:
    for row in work.ROWS:
        values = [_figure(found, contender, row) for contender in CONTENDERS]
        if any(row.name in found.get(contender, {}) for contender in CONTENDERS):
            ratio = _ratio(found, row)
            yield [
                f"{row.title}, {row.unit}",
                *("–" if value is None else short(value) for value in values),
                "–" if ratio is None else f"{ratio:.2f}",
                _limit(row),
            ]


def verdicts(found: Medians) -> Iterator[Judged]:
    for row in work.ROWS:
        if row.name in FLOORS:
            ratio = _ratio(found, row)
            word = "not measured" if ratio is None else "pass" if ratio >= FLOORS[row.name] else "FAIL"
            yield Judged(word, f"{row.title}: {'–' if ratio is None else f'{ratio:.2f} × Ray'} ({_limit(row)})")


def show(result: dict[str, Any]) -> None:
    report_table.show(HEADINGS, lines(result["medians"]), result["problems"], _footnote(result), 120)


def markdown(result: dict[str, Any]) -> str:
    return report_table.markdown(HEADINGS, lines(result["medians"]), _footnote(result))


def _figure(found: Medians, contender: str, row: Row) -> float | None:
    """Return a figure; where only ours has the row, the peers' figure of the plain one."""
    name = row.plain if row.plain and contender != "unified" else row.name
    return found.get(contender, {}).get(name)


def _ratio(found: Medians, row: Row) -> float | None:
    ours, theirs = _figure(found, "unified", row), _figure(found, "ray", row)
    return None if ours is None or theirs is None else times_better(row.name, ours, theirs, [row])


def _limit(row: Row) -> str:
    return f"≥ {FLOORS[row.name]:g} × Ray" if row.name in FLOORS else "–"


def _footnote(result: dict[str, Any]) -> str:
    machine, sizes = result["machine"], result["sizes"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    missing = " Ray is not installed here." if result["missing"] else ""
    return (
        f"{work.ARRAYS} arrays, {sizes['mib']} MiB in all; {sizes['workers']} workers that import {sizes['imports']}. "
        f"Medians of {result['rounds']} rounds, contenders in turn, on {machine['cores']} cores, Python "
        f"{machine['python']}, {machine['date']}, load {machine['load_1min']} at the start and "
        f"{result['loads'][-1]} at the end; {versions}. “× Ray” is how many times better ours is.{missing}"
    )
