"""The figures of the recovery benchmark: rows, floors, table, Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks import report_table
from benchmarks.bus.checks import Floor, Medians, Verdict, times_better, verdicts
from benchmarks.bus.report import short
from benchmarks.bus.work import Row

RANKS = (2, 4)
TITLES = {
    "in_place": "unified, in place",
    "process": "unified, same script as torchrun",
    "torchrun": "torchrun",
    "torchft": "torchft",
}
ALLOWED = "allowed"
"""A contender of no kind: the time that a node's loss may take."""
COLUMNS = {**TITLES, ALLOWED: "allowed"}
PEERS = ("torchrun", "torchft")
WITH_NODES = ("in_place", "process")
LEASE_S = 5.0
"""Of the nodes that are lost: shorter than the default of 15 s, as the loss of a silent node takes all of it."""
TOLD, SILENT = "node_told", "node_silent"
ROWS = [
    *(Row(f"seconds_{ranks}", f"kill -9 of a rank of {ranks} to all past a step", "s", False) for ranks in RANKS),
    *(Row(f"lost_{ranks}", f"steps lost, {ranks} ranks", "steps", False) for ranks in RANKS),
    Row(TOLD, "kill -9 of a node's agent, which its lease keeper tells, to all past a step", "s", False),
    Row(SILENT, f"kill -9 of all of a node at once, with a lease of {LEASE_S:g} s, to all past a step", "s", False),
]
FLOORS = [
    *(Floor("process", f"seconds_{ranks}", "torchrun", f"seconds_{ranks}", 10) for ranks in RANKS),
    *(Floor("in_place", f"seconds_{ranks}", "torchrun", f"seconds_{ranks}", 20) for ranks in RANKS),
    *(Floor(name, row, ALLOWED, SILENT, 1) for name in WITH_NODES for row in (TOLD, SILENT)),
]
HEADINGS = ["", *COLUMNS.values(), "torchrun ÷ in place", "torchrun ÷ same script"]


def lines(found: Medians) -> Iterator[list[str]]:
    for row in ROWS:
        figures = {name: found.get(name, {}).get(row.name) for name in COLUMNS}
        if any(value is not None for value in figures.values()):
            ratios = [_times(row, figures[name], figures["torchrun"]) for name in ("in_place", "process")]
            yield [f"{row.title}, {row.unit}", *("–" if v is None else short(v) for v in figures.values()), *ratios]


def _times(row: Row, ours: float | None, theirs: float | None) -> str:
    is_time = row.name.startswith("seconds")
    return "–" if ours is None or theirs is None or not is_time else f"{times_better(row.name, ours, theirs, ROWS):.1f}"


def judged(found: Medians) -> list[Verdict]:
    return list(verdicts(found, FLOORS, ROWS))


def show(result: dict[str, Any]) -> None:
    report_table.show(HEADINGS, lines(result["medians"]), result["problems"], footnote(result), 170)


def markdown(result: dict[str, Any]) -> str:
    return report_table.markdown(HEADINGS, lines(result["medians"]), footnote(result))


def footnote(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return (
        f"Medians of {result['rounds']} rounds, contenders in turn, on {machine['cores']} cores, Python "
        f"{machine['python']}, torch {machine['torch']}, {machine['date']}, load {machine['load_1min']} at the start."
    )
