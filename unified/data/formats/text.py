"""JSON lines and CSV: formats whose rows end with an end of line; samples are dicts."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from itertools import islice
from typing import Any, BinaryIO

import msgspec

from unified.data.files import DataFile
from unified.data.formats.columnar import ROWS_AT_ONCE, pyarrow
from unified.data.formats.row_format import RowFormat
from unified.errors import DatasetError

LONGEST_LINE = 256 << 20
"""Bytes. A file that is not text may have no end of line, and would be read into memory as a whole."""
_BLANK = b"\xef\xbb\xbf\r\n"
"""A byte order mark, and ends of lines."""
_SAMPLE = 1 << 20
"""The approximate number of bytes of a CSV file from which the types of its columns are inferred."""


class JsonLinesFormat(RowFormat):
    """One JSON object per line; blank lines are skipped."""

    name = "jsonl"

    def _count(self, file: DataFile) -> int:
        number = -1
        last = b""
        for number, line in enumerate(lines(file, 0)):
            if number == 0:
                self._parse(file, 0, line)
            last = line
        if number > 0:
            self._parse(file, number, last)  # fails if the file was cut short
        return number + 1

    def _rows(self, file: DataFile, start: int, end: int) -> Iterator[dict[str, Any]]:
        for number, line in enumerate(islice(lines(file, start), end - start), start):
            row = self._parse(file, number, line)
            if self.columns is None:
                yield row
            else:
                self._check_columns(file, list(row))
                yield {name: row[name] for name in self.columns}

    def _parse(self, file: DataFile, number: int, line: bytes) -> dict[str, Any]:
        try:
            row = _parse_json(line)
        except (ValueError, RecursionError) as error:
            raise DatasetError(
                f"row {number} of {file.path} is not JSON: {error}. Is the file cut short, or of another format?"
            ) from error
        if not isinstance(row, dict):
            raise DatasetError(
                f"row {number} of {file.path} is no JSON object but {type(row).__name__}: write it as one."
            )
        return row


class CsvFormat(RowFormat):
    """Comma separated, quoted as in RFC 4180 (also with ends of line in quotes), names of columns in the first line.

    Types are inferred by pyarrow from about the first MiB of each file; a later value that does not fit is an error.
    Blank lines are skipped.
    """

    name = "csv"

    def _count(self, file: DataFile) -> int:
        return sum(table.num_rows for table in self._tables(file, 0, None))  # parsed, to find errors now

    def _rows(self, file: DataFile, start: int, end: int) -> Iterator[dict[str, Any]]:
        for table in self._tables(file, start, end):
            yield from table.to_pylist()

    def _tables(self, file: DataFile, start: int, end: int | None) -> Iterator[Any]:
        head, types = self._head(file)
        self._check_columns(file, list(types))
        rows = islice(lines(file, start, first=head, is_quoted=True), None if end is None else end - start)
        number = start
        while some := list(islice(rows, ROWS_AT_ONCE)):
            try:
                table = _parse_csv(b"".join(some), types, self.columns)
            except ValueError as error:
                raise DatasetError(
                    f"rows {number} to {number + len(some)} of {file.path} cannot be read as csv: {error}. The types "
                    "of columns are those of the file's first MiB: write the odd value as those before it, or the "
                    "file as parquet."
                ) from error
            if table.num_rows != len(some):
                raise DatasetError(
                    f"rows {number} to {number + len(some)} of {file.path} are not well-formed CSV: is there a quote "
                    "that does not end?"
                )
            yield table
            number += len(some)

    def _head(self, file: DataFile) -> tuple[int, dict[str, Any]]:
        """Return the length of the line of names, and the type of each column."""
        if "head" not in file.notes:
            with file.open() as opened:
                names = _next_row(opened, file, is_quoted=True)
                while not names.strip(_BLANK) and (more := _next_row(opened, file, is_quoted=True)):
                    names += more
                sample, size = [names], 0
                while size < _SAMPLE and (row := _next_row(opened, file, is_quoted=True)):
                    sample.append(row)
                    size += len(row)
            if names.startswith(b'{"'):  # CSV puts a column name that has a quote in quotes
                raise DatasetError(f"{file.path} is not csv but jsonl: give format='jsonl'.")
            if sample[-1][-1:] != b"\n":
                sample.append(b"\n")  # pyarrow needs one after the names
            schema = _parse_csv(b"".join(sample), None, None).schema
            if len(set(schema.names)) < len(schema.names):
                raise DatasetError(f"{file.path} has two columns of one name: {', '.join(schema.names)}.")
            arrow = pyarrow()
            types = {field.name: arrow.string() if arrow.types.is_null(field.type) else field.type for field in schema}
            file.notes["head"] = len(names), types
        head: tuple[int, dict[str, Any]] = file.notes["head"]
        return head


def lines(file: DataFile, start: int, *, first: int = 0, is_quoted: bool = False) -> Iterator[bytes]:
    """Yield the rows of a file from row `start` on, as bytes, without blank lines. Use the file's row offsets, and add
    to them.

    Args:
        first: the byte at which row 0 begins.
        is_quoted: an end of line between double quotes does not end a row.
    """
    row, offset = file.row_offsets.before(start, first)
    with file.open() as opened:
        opened.seek(offset)
        while line := _next_row(opened, file, is_quoted):
            if line.strip(b"\r\n") if is_quoted else line.strip():
                file.row_offsets.note(row, offset)
                if row >= start:
                    yield line
                row += 1
            offset += len(line)


def _parse_json(line: bytes) -> Any:
    """Parse JSON several times as fast as `json`. For a line that is not strict JSON use `json`: NaN, Infinity, half of
    a surrogate, a byte order mark."""
    try:
        return msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return json.loads(line)


def _next_row(opened: BinaryIO, file: DataFile, is_quoted: bool) -> bytes:
    line = opened.readline(LONGEST_LINE)
    if is_quoted and line.count(b'"') % 2:
        parts, size, is_open = [line], len(line), True
        while is_open and size < LONGEST_LINE:
            if not (more := opened.readline(LONGEST_LINE)):
                raise DatasetError(
                    f"{file.path} has a quote that does not end, in the row that begins with {line[:60]!r}: is the "
                    "file cut short?"
                )
            parts.append(more)
            size += len(more)
            is_open ^= more.count(b'"') % 2 == 1
        line = b"".join(parts)
    if len(line) >= LONGEST_LINE:
        raise DatasetError(f"{file.path} has a row of {LONGEST_LINE >> 20} MiB or more: is it of another format?")
    return line


def _parse_csv(text: bytes, types: dict[str, Any] | None, columns: list[str] | None) -> Any:
    csv = pyarrow("csv")
    return csv.read_csv(
        io.BytesIO(text),
        csv.ReadOptions(
            column_names=None if types is None else list(types), use_threads=False, block_size=max(len(text), 1)
        ),
        csv.ParseOptions(newlines_in_values=True),
        csv.ConvertOptions(column_types=types, include_columns=columns),
    )
