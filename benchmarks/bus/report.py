"""The figures of `bus.py` as a table, as Markdown and as a picture."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.bus import checks, work

TITLES = {
    "direct": "unified",
    "relay": "unified, relay",
    "ray": "Ray",
    "monarch": "Monarch",
    "xoscar": "xoscar",
    "zmq": "bare ZeroMQ",
    "socket": "bare socket",
    "memory": "memcpy",
}
PEERS = ["ray", "monarch", "xoscar"]


class Line(NamedTuple):
    title: str
    figures: list[str]
    ratios: list[str]


def lines(result: dict[str, Any]) -> Iterator[Line]:
    found = result["medians"]
    for row in work.ROWS:
        values = [_figure(found, name, row) for name in result["contenders"]]
        if any(row.name in found.get(name, {}) for name in result["contenders"]):
            yield Line(
                f"{row.title}, {row.unit}",
                ["–" if value is None else short(value) for value in values],
                [_ratio(found, row, peer) for peer in peers_of(result)],
            )


def peers_of(result: dict[str, Any]) -> list[str]:
    return [name for name in PEERS if name in result["contenders"]]


def show(result: dict[str, Any]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table("", *map(_title, result["contenders"]), title="Medians")
    ratios = Table("", *map(_title, peers_of(result)), title="How many times better unified is")
    for line in lines(result):
        table.add_row(line.title, *line.figures)
        ratios.add_row(line.title, *line.ratios)
    console.print(table)
    if peers_of(result):
        console.print(ratios)
    for inline in _inline(result):
        console.print(inline)
    for problem in result["problems"]:
        console.print(problem, style="red", markup=False, highlight=False)
    console.print(footnote(result), markup=False)


def markdown(result: dict[str, Any]) -> str:
    peers = peers_of(result)
    headings = ["", *map(_title, result["contenders"]), *(f"× {_title(peer)}" for peer in peers)]
    rows = [headings, ["---", *["---:"] * (len(headings) - 1)]]
    rows += [[line.title, *line.figures, *line.ratios] for line in lines(result)]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return "\n\n".join([table, *_inline(result), footnote(result)])


def footnote(result: dict[str, Any]) -> str:
    machine = result["machine"]
    versions = ", ".join(f"{_title(name)} {version}" for name, version in result["versions"].items())
    missing = "".join(f" {_title(name)} is not installed here." for name in result["missing"])
    plain = " In shared memory: only ours can; beside it stand the peers' plain arrays." if peers_of(result) else ""
    return (
        f"Medians of {result['rounds']} rounds, contenders in turn, on {machine['cores']} cores, Python "
        f"{machine['python']}, {machine['date']}; {versions}. “× Ray” is how many times better ours, direct, is."
        f"{plain}{missing}"
    )


def plot(result: dict[str, Any], file: Path) -> None:
    """Each row's ratio to each peer, on a logarithmic axis: to the right of 1, ours is better."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    found, peers = result["medians"], peers_of(result)
    rows = [row for row in work.ROWS if any(_ratio(found, row, peer) != "–" for peer in peers)]
    if not rows:
        return
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.42 * len(rows)), layout="constrained")
    height = 0.8 / len(peers)
    for place, peer in enumerate(peers):
        there = [(at, ratio) for at, row in enumerate(rows) if (ratio := better(found, row, peer)) is not None]
        bars = axes.barh(
            [at + (place - (len(peers) - 1) / 2) * height for at, _ in there],
            [ratio - 1 for _, ratio in there],
            height,
            left=1,
            label=_title(peer),
        )
        axes.bar_label(bars, [f"{ratio:.1f}" for _, ratio in there], padding=3, fontsize=7)
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row.title for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("times better than the peer")
    axes.legend(loc="lower right")
    figure.savefig(file)
    pyplot.close(figure)


def better(found: checks.Medians, row: work.Row, peer: str) -> float | None:
    """How many times better ours, direct, is than a peer; None where one was not measured."""
    ours, theirs = _figure(found, "direct", row), _figure(found, peer, row)
    return None if ours is None or theirs is None else checks.times_better(row.name, ours, theirs)


def _figure(found: checks.Medians, contender: str, row: work.Row) -> float | None:
    name = row.plain if row.plain and contender in PEERS else row.name
    return found.get(contender, {}).get(name)


def _ratio(found: checks.Medians, row: work.Row, peer: str) -> str:
    ratio = better(found, row, peer)
    return "–" if ratio is None else f"{ratio:.1f}"


def _inline(result: dict[str, Any]) -> Iterator[str]:
    ours = result["medians"].get("direct", {})
    parts = [
        f"{row.title} {short(ours[f'inline_{row.name}'])} {row.unit}"
        for row in work.ROWS
        if f"inline_{row.name}" in ours
    ]
    if parts:
        yield f"With `@rpc(inline=True)`: {', '.join(parts)}."


def _title(name: str) -> str:
    return TITLES[name]


def short(value: float) -> str:
    """Three digits that mean something."""
    if value >= 100:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"
