"""Plain text for terminals and pipes: columns, moments, JSON."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence

import msgspec

REASON_WIDTH = 160
"""Of the last column, where no terminal says how wide it may be."""


def table(header: Sequence[str], rows: Sequence[Sequence[object]], width: int | None = None) -> list[str]:
    """Rows under a header, columns two spaces apart; the last one is not padded.

    With a `width`, columns that say nothing in any row are left out, and what goes beyond it is cut, so that no line
    wraps. Without one, all columns are there, for programs that count them, and only a last column, the reason, that is
    beyond 160 characters is cut.
    """
    texts = [[str(cell) for cell in row] for row in rows]
    if width is None:
        texts = [[*row[:-1], cut(row[-1], REASON_WIDTH)] for row in texts]
    told = [
        column for column in range(len(header)) if width is None or any(row[column] not in ("", "-") for row in texts)
    ]
    cells = [[row[column] for column in told] for row in (list(header), *texts)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(told))]
    lines = ["  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip() for row in cells]
    return lines if width is None else [cut(line, width) for line in lines]


def cut(text: str, width: int) -> str:
    """The text in so many characters."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is; None for a file or a pipe, where nothing need be cut."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def moment(at: float | None) -> str:
    """``07:49:42`` today, ``2025-03-01 07:49`` before; ``-`` for None."""
    if at is None or at <= 0:
        return "-"
    then, today = time.localtime(at), time.localtime()
    is_today = then[:3] == today[:3]
    return time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M", then)


def first_line(text: str) -> str:
    """The first line of a text that may have none."""
    return text.partition("\n")[0]


def print_json(value: object) -> None:
    """A record, or a list of them, as indented JSON on stdout."""
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def amount(value: float) -> str:
    """``8``, ``0.5``: no trailing zeros."""
    return f"{value:.6g}"
