"""The frame of a benchmark's program: its options, its files, its table in the README, and its floors."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.bus.checks import Medians, medians
from benchmarks.launch.run import fill, machine

README = Path(__file__).with_name("README.md")
Figures = dict[str, dict[str, list[float]]]
"""By contender and row."""


class Verdict(Protocol):
    """One floor, as a line of text."""

    @property
    def word(self) -> str: ...


class Report(Protocol):
    """The module of a benchmark that presents its result."""

    def show(self, result: dict[str, Any]) -> None: ...

    def markdown(self, result: dict[str, Any]) -> str: ...


def parser(description: str | None, rows: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=5, help="how often each contender is measured (default: 5)")
    parser.add_argument("--rows", type=names_of(rows), default=[], help="comma-separated; default: all")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="where the figures go, and their picture")
    parser.add_argument("--readme", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--check", action="store_true", help="hold the medians against the floors; 1 if one is missed")
    parser.add_argument("--check-only", action="store_true", help="the same for the figures of an earlier run")
    return parser


def names_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        given = text.split(",")
        if unknown := [name for name in given if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(known)}")
        return given

    return names


def run(
    name: str,
    args: argparse.Namespace,
    measure: Callable[[], tuple[Figures, list[str]]],
    report: Report,
    verdicts: Callable[[Medians], Iterable[Verdict]],
    **more: Any,
) -> int:
    """Measure, or read what was measured; present it; the exit code.

    Args:
        measure: returns the figures and what went wrong.
        more: what else the file of figures shall say.
    """
    file = args.out / f"{name}.json"
    if args.check_only:
        return check(verdicts(json.loads(file.read_text())["medians"]))
    began_on = machine()
    figures, problems = measure()
    found = medians(figures)
    result = {
        "machine": began_on,
        "rounds": args.rounds,
        **more,
        "medians": found,
        "figures": figures,
        "problems": problems,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1))
    if plot := getattr(report, "plot", None):
        plot(result, file.with_suffix(".svg"))
    report.show(result)
    if args.readme:
        fill(README, report.markdown(result), f"<!-- filled from benchmarks/{name}/run.py -->")
    code = check(verdicts(found)) if args.check else 0
    return 1 if problems else code


def check(verdicts: Iterable[Verdict]) -> int:
    """Print each floor; 1 if one was missed."""
    found = list(verdicts)
    for verdict in found:
        print(verdict)
    counts = {word: sum(verdict.word == word for verdict in found) for word in ("pass", "FAIL", "not measured")}
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    return int(counts["FAIL"] > 0)
