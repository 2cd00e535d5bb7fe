"""A table of figures with a line below it: on the terminal, and as Markdown."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

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


def footnote(result: dict[str, Any]) -> str:
    """Return the line below a table of two contenders, measured in turn."""
    machine = result["machine"]
    return (
        f"Medians of {result['rounds']} rounds, the two in turn, on {machine['cores']} cores, Python "
        f"{machine['python']}, {machine['date']}, load {machine['load_1min']} at the start. “×” is how many times "
        "better ours is."
    )
