"""Rows of files for a pipeline: the files and formats of `unified.data`, cut into pieces that are read apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from unified.data.files import DataFiles, formats_of
from unified.data.formats import open_format
from unified.errors import UsageError

_NAMES = {"json": "jsonl", "feather": "arrow", "ipc": "arrow"}
"""Other names of formats."""


class Piece(NamedTuple):
    """A part of a file that can be read by itself: a row group where the format has them, else the file."""

    path: str
    format: str
    start: int
    """Its first row."""
    end: int
    """The row after its last one."""
    columns: list[str] | None

    def rows(self) -> Iterator[Any]:
        """Its rows, some of them in memory at a time."""
        with DataFiles() as files:
            yield from open_format(self.format, self.columns).rows(files.file(self.path), self.start, self.end)


def find_pieces(
    paths: str | Sequence[str], kind: str | None = None, columns: Sequence[str] | None = None
) -> list[Piece]:
    """The pieces of these files, in the order of their names and rows; see `Dataset.from_files`."""
    names = list(columns) if columns is not None else None
    pieces: list[Piece] = []
    with DataFiles() as files:
        for path in [paths] if isinstance(paths, str) else paths:
            if kind is None:
                found = formats_of(path, files)
            else:
                format_ = _NAMES.get(kind, kind)
                found = dict.fromkeys(files.find(path, format_), format_)
            for each, format_ in found.items():
                rows = open_format(format_, names)
                file = files.file(each)
                if names is not None and not pieces:
                    _check_columns(names, next(open_format(format_).rows(file, 0, 1), None))
                pieces += [Piece(each, format_, start, end, names) for start, end in rows.pieces(file)]
    return pieces


def _check_columns(columns: list[str], row: dict[str, Any] | None) -> None:
    if row is not None and (unknown := set(columns) - set(row)):
        raise UsageError(f"the files have no column {min(unknown)!r}; they have {', '.join(row)}.")
