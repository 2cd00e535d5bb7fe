"""The figures of `checkpoint.py` beside its peers and what the reference publishes: table, Markdown, picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import report_table
from benchmarks.bus.checks import Medians, Verdict, times_better, verdicts
from benchmarks.bus.report import short
from benchmarks.checkpoint import work

HEADINGS = ["", *work.TITLES.values(), "reference, 64 cores", *(f"× {work.TITLES[peer]}" for peer in work.PEERS)]


def lines(found: Medians) -> Iterator[list[str]]:
    for row in work.ROWS:
        figures = {name: found.get(name, {}).get(row.name) for name in work.TITLES}
        if any(value is not None for value in figures.values()):
            ours = figures["unified"]
            yield [
                f"{row.title}, {row.unit}",
                *map(_figure, figures.values()),
                _figure(work.PUBLISHED.get(row.name)),
                *(_times(row.name, ours, figures[peer]) for peer in work.PEERS),
            ]


def judged(found: Medians) -> list[Verdict]:
    return list(verdicts({**found, **work.SIZES}, work.FLOORS, work.ROWS))


def show(result: dict[str, Any]) -> None:
    report_table.show(HEADINGS, lines(result["medians"]), result["problems"], footnote(result), 180)


def markdown(result: dict[str, Any]) -> str:
    return report_table.markdown(HEADINGS, lines(result["medians"]), footnote(result))


def footnote(result: dict[str, Any]) -> str:
    machine, mib = result["machine"], result["mib"]
    return (
        f"A state of {mib} MiB; medians of {result['rounds']} rounds, contenders in turn, on {machine['cores']} cores, "
        f"Python {machine['python']}, torch {machine['torch']}, "
        f"{machine['date']}, load {machine['load_1min']} at the start. “×” is how many times better ours is."
    )


def plot(result: dict[str, Any], file: Path) -> None:
    """How far each floor is exceeded: to the right of 1 it is held."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    there = [(verdict, ratio) for verdict in judged(result["medians"]) if (ratio := verdict.ratio) is not None]
    if not there:
        return
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.5 * len(there)), layout="constrained")
    margins = [ratio / verdict.floor.at_least for verdict, ratio in there]
    bars = axes.barh(range(len(there)), margins)
    axes.bar_label(bars, [f"{margin:.2f}" for margin in margins], padding=3, fontsize=8)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(there)), [_title(verdict) for verdict, _ in there])
    axes.invert_yaxis()
    axes.set_xlabel("times what is asked for")
    figure.savefig(file)
    pyplot.close(figure)


def _title(verdict: Verdict) -> str:
    floor = verdict.floor
    row = next(row for row in work.ROWS if row.name == floor.row)
    limit = f"at least {floor.at_least:g} ×" if row.is_rate else f"at most {1 / floor.at_least:.3g} ×"
    return f"{row.title}:\n{limit} {work.TITLES.get(floor.peer, 'the ' + floor.peer)}"


def _figure(value: float | None) -> str:
    return "–" if value is None else short(value)


def _times(row: str, ours: float | None, theirs: float | None) -> str:
    return "–" if ours is None or theirs is None else f"{times_better(row, ours, theirs, work.ROWS):.2f}"
