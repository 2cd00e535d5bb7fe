"""Parquet, Arrow and ORC files, by pyarrow; samples are dicts."""

from __future__ import annotations

import importlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from unified.data.files import DataFile
from unified.data.formats.row_format import RowFormat

ROWS_AT_ONCE = 1024
"""The number of rows that are converted to Python objects together."""


def pyarrow(part: str = "") -> Any:
    """Import the module ``pyarrow``, or a part of it such as ``"parquet"``."""
    try:
        return importlib.import_module(f"pyarrow.{part}" if part else "pyarrow")
    except ImportError as error:
        raise ImportError(f"this needs pyarrow: pip install 'unified-runtime[data]' ({error}).") from error


def dicts(batches: Iterable[Any], start: int, end: int) -> Iterator[dict[str, Any]]:
    """Yield rows `start` to `end`, counted over all these record batches."""
    row = 0
    for batch in batches:
        low, high = max(start - row, 0), min(end - row, batch.num_rows)
        for at in range(low, high, ROWS_AT_ONCE):
            yield from batch.slice(at, min(ROWS_AT_ONCE, high - at)).to_pylist()
        row += batch.num_rows
        if row >= end:
            return


class _Columnar(RowFormat):
    is_counted = True

    def _in_order(self, batches: Iterable[Any]) -> Iterable[Any]:
        """Select only the wanted columns, in the order of `columns`."""
        return batches if self.columns is None else (batch.select(self.columns) for batch in batches)


class ParquetFormat(_Columnar):
    """Reads only the row groups that hold the wanted rows."""

    name = "parquet"

    def _count(self, file: DataFile) -> int:
        with self._open(file) as opened:
            return int(opened.metadata.num_rows)

    def _rows(self, file: DataFile, start: int, end: int) -> Iterator[dict[str, Any]]:
        with self._open(file) as opened:
            self._check_columns(file, opened.schema_arrow.names)
            base = 0
            for group in range(opened.metadata.num_row_groups):
                size = opened.metadata.row_group(group).num_rows
                if base >= end:
                    return
                if base + size > start:
                    batches = opened.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=self.columns)
                    yield from dicts(self._in_order(batches), start - base, end - base)
                base += size

    def _pieces(self, file: DataFile) -> list[tuple[int, int]]:
        with self._open(file) as opened:
            groups = range(opened.metadata.num_row_groups)
            ends = list(accumulate(opened.metadata.row_group(group).num_rows for group in groups))
        return list(zip([0, *ends], ends, strict=False))

    @contextmanager
    def _open(self, file: DataFile) -> Iterator[Any]:
        with file.open() as raw, pyarrow("parquet").ParquetFile(raw) as opened:
            yield opened


class ArrowFormat(_Columnar):
    """Arrow's file and stream formats. A file's record batches are found without reading earlier ones."""

    name = "arrow"

    def _count(self, file: DataFile) -> int:
        with self._open(file) as (opened, is_stream):
            return sum(batch.num_rows for batch in opened) if is_stream else int(opened.count_rows())

    def _rows(self, file: DataFile, start: int, end: int) -> Iterator[dict[str, Any]]:
        with self._open(file) as (opened, is_stream):
            self._check_columns(file, opened.schema.names)
            base, batches = (0, iter(opened)) if is_stream else self._from(file, opened, start)
            yield from dicts(self._in_order(batches), start - base, end - base)

    def _from(self, file: DataFile, opened: Any, start: int) -> tuple[int, Iterator[Any]]:
        """Return the first row of the batch that has row `start`, and the batches from this one on."""
        ends: list[int] = file.notes.setdefault("batch-ends", [])  # of the batches read so far
        index = bisect_right(ends, start)

        def batches() -> Iterator[Any]:
            for number in range(index, opened.num_record_batches):
                batch = opened.get_batch(number)
                if number == len(ends):
                    ends.append((ends[-1] if ends else 0) + batch.num_rows)
                yield batch

        return (ends[index - 1] if index else 0), batches()

    @contextmanager
    def _open(self, file: DataFile) -> Iterator[tuple[Any, bool]]:
        arrow, ipc = pyarrow(), pyarrow("ipc")
        is_file = file.notes["first-bytes"].startswith(b"ARROW1")
        if file.is_mappable:
            with arrow.memory_map(file.path) as raw, (ipc.open_file if is_file else ipc.open_stream)(raw) as opened:
                yield opened, not is_file
        else:
            with file.open() as raw, (ipc.open_file if is_file else ipc.open_stream)(raw) as opened:
                yield opened, not is_file


class OrcFormat(_Columnar):
    """Reads the stripes that hold the wanted rows. Stripes before them are read once, to learn their row counts."""

    name = "orc"

    def _count(self, file: DataFile) -> int:
        with self._open(file) as opened:
            return int(opened.nrows)

    def _rows(self, file: DataFile, start: int, end: int) -> Iterator[dict[str, Any]]:
        with self._open(file) as opened:
            self._check_columns(file, opened.schema.names)
            ends: list[int] = file.notes.setdefault("stripe-ends", [])  # of the stripes read so far
            first = bisect_right(ends, start)
            base = ends[first - 1] if first else 0
            for number in range(first, opened.nstripes):
                if base >= end:
                    return
                stripe = opened.read_stripe(number, columns=self.columns)
                if number == len(ends):
                    ends.append(base + stripe.num_rows)
                yield from dicts(self._in_order([stripe]), start - base, end - base)
                base += stripe.num_rows

    @contextmanager
    def _open(self, file: DataFile) -> Iterator[Any]:
        with file.open() as raw:
            yield pyarrow("orc").ORCFile(raw)
