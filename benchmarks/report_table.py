"""A table of figures with a line below it: on the terminal, and as Markdown."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def show(
    headings: Sequence[str],
    lines: Iterable[Sequence[str]],
    problems: Iterable[str],
    note: str,
    width: int,
    title: str = "Medians",
) -> None:
    """Print it.

    Args:
        problems: what went wrong, in red.
        width: characters, where the output is no terminal, which has its own.
    """
    console = Console(width=None if sys.stdout.isatty() else width)
    table = Table(*headings, title=title)
    for line in lines:
        table.add_row(*line)
    console.print(table)
    for problem in problems:
        console.print(problem, style="red", markup=False, highlight=False)
    console.print(note, markup=False)


def markdown(headings: Sequence[str], lines: Iterable[Sequence[str]], note: str) -> str:
    rows = [headings, ["---", *["---:"] * (len(headings) - 1)], *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + f"\n\n{note}"
