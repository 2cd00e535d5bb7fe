"""The figures of the page beside Ray's dashboard, and against our floors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks import report_table
from benchmarks.bus.checks import Judged, Medians
from benchmarks.bus.report import short
from benchmarks.bus.scale import count

WORKERS, NODES, CHANGES, ENDED, VIEWERS = 10_000, 1_250, 500, 1_000, 20
CONTENDERS = {
    "none": "nobody looks",
    "one": "1 viewer",
    "twenty": f"{VIEWERS} viewers",
    "browser": f"{VIEWERS}, one a browser",
    "ray": "Ray's dashboard",
}


class Figure(NamedTuple):
    """One row of the table, and its floor: at most so much, in one column or compared with another."""

    name: str
    title: str
    at_most: float | None = None
    of: str = "browser"
    beside: str = ""
    """Column of which `at_most` is a multiple; empty: it is the value itself."""


ROWS = [
    Figure("first_s", "first page usable, s", 2.0),
    Figure("cold_s", "first page of a gateway and a browser just started, s"),
    Figure("job_s", f"page of {count(WORKERS)} workers usable, s", 2.0),
    Figure("update_s", "from an event to the screen, median, s"),
    Figure("update_most_s", "the slowest, s", 1.5),
    Figure("elements", "most DOM elements of a page", 1500),
    Figure("heap_mb", "most heap of JavaScript, MB", 60),
    Figure("gateway_cpu", "CPU of the gateway, % of a core", 50),
    Figure("gateway_mb", "memory of the gateway (PSS), MB", 200),
    Figure("master_kb_s", "from the master to the gateway, kB/s", 1.1, "twenty", "one"),
    Figure("master_cpu", "CPU of the master, % of a core", 1.1, "twenty", "one"),
    Figure("beat_p50", "an agent's heartbeat, median, ms"),
    Figure("beat_p99", "an agent's heartbeat, p99, ms", 1.2, "twenty", "none"),
]
NAMES = [row.name for row in ROWS]
HEADINGS = ["", *CONTENDERS.values(), "our floor"]


def lines(found: Medians) -> Iterator[list[str]]:
    for row in ROWS:
        values = [found.get(contender, {}).get(row.name) for contender in CONTENDERS]
        if any(value is not None for value in values):
            yield [row.title, *("–" if value is None else short(value) for value in values), _limit(row)]


def verdicts(found: Medians) -> Iterator[Judged]:
    for row in ROWS:
        if row.at_most is None:
            continue
        value, word = found.get(row.of, {}).get(row.name), "not measured"
        if value is not None and row.beside:
            other = found.get(row.beside, {}).get(row.name)
            value = value / other if other else None
        if value is not None:
            word = "pass" if value <= row.at_most else "FAIL"
        yield Judged(word, f"{row.title}: {'' if value is None else f'{value:.2f} '}({_limit(row)})")


def show(result: dict[str, Any]) -> None:
    report_table.show(HEADINGS, lines(result["medians"]), result["problems"], footnote(result), 150)


def markdown(result: dict[str, Any]) -> str:
    return report_table.markdown(HEADINGS, lines(result["medians"]), footnote(result))


def footnote(result: dict[str, Any]) -> str:
    here = result["machine"]
    actors = f"; Ray {result['ray']} with {result['actors']} actors" if result.get("actors") else ""
    return (
        f"{result['workers']} workers on {result['nodes']} nodes, {result['changes']} changes a second, "
        f"{result['ended']} ended jobs. Medians of {result['rounds']} rounds, the columns in turn, on {here['cores']} "
        f"cores, Python {here['python']}, {here['date']}, load {here['load_1min']} at the start{actors}."
    )


def _limit(row: Figure) -> str:
    if row.at_most is None:
        return "–"
    return f"≤ {row.at_most:g}" + (f" × {CONTENDERS[row.beside]}" if row.beside else "")
