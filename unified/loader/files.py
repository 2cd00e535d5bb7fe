"""Rows of files, through pyarrow: parquet, csv, json lines, arrow, orc, on any file system that it knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from unified.errors import UsageError


class Piece(NamedTuple):
    """A part of a file that can be read by itself: a row group where the format has them, else the file."""

    fragment: Any
    columns: list[str] | None

    def rows(self) -> Iterator[dict[str, Any]]:
        """Its rows, one record batch in memory at a time."""
        for batch in self.fragment.to_batches(columns=self.columns):
            yield from batch.to_pylist()


def find_pieces(
    paths: str | Sequence[str], kind: str | None = None, columns: Sequence[str] | None = None
) -> list[Piece]:
    """The pieces of these files, in the order of their names and rows; see `Dataset.from_files`."""
    try:
        from pyarrow import dataset as files
    except ImportError:
        raise UsageError("Dataset.from_files needs pyarrow: pip install 'unified-runtime[data]'.") from None
    try:
        whole = files.dataset(paths if isinstance(paths, str) else list(paths), format=kind or _format(paths))
    except ValueError as error:
        raise UsageError(f"Dataset.from_files: {error}") from error
    names = list(columns) if columns is not None else None
    if names is not None and (unknown := set(names) - set(whole.schema.names)):
        raise UsageError(f"the files have no column {min(unknown)!r}; they have {', '.join(whole.schema.names)}.")
    pieces = []
    for fragment in whole.get_fragments():
        parts = fragment.split_by_row_group() if hasattr(fragment, "split_by_row_group") else [fragment]
        pieces += [Piece(part, names) for part in parts]
    return pieces


def _format(paths: str | Sequence[str]) -> str:
    first = paths if isinstance(paths, str) else next(iter(paths), "")
    suffix = first.rsplit(".", 1)[-1].lower() if "." in first else ""
    return {"jsonl": "json", "arrow": "feather"}.get(suffix, suffix) or "parquet"
