"""The base of every format of data files: the number of rows in a file, and its rows by number."""

from __future__ import annotations

import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from unified.data.files import DataFile
from unified.errors import DataFileNotFoundError, DatasetError, UsageError

_FIRST_BYTES = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow", b"\x1f\x8b": "gzip"}


class RowFormat(ABC):
    """Reads files of one format. Rows are numbered from 0 in each file. Methods raise DatasetError for a file that is
    empty, cannot be read, or is not of this format.

    Args:
        columns: names of the columns to read, in this order; None: all.

    Raises:
        UsageError: `columns` is not a list, or is empty.
    """

    name: ClassVar[str]
    is_counted: ClassVar[bool] = False
    """True if a file says how many rows it has; otherwise it has to be read through."""

    def __init__(self, columns: Sequence[str] | None = None) -> None:
        if isinstance(columns, str) or (columns is not None and not columns):
            raise UsageError(f"columns={columns!r}: give a list of at least one name, or None for all.")
        self.columns = None if columns is None else list(columns)

    def count(self, file: DataFile) -> int:
        """Return the number of rows of the file. They are counted once per `DataFile`."""
        if "count" not in file.notes:
            with named(file, self.name):
                self._check_first_bytes(file)
                file.notes["count"] = self._count(file)
        return int(file.notes["count"])

    def check(self, file: DataFile) -> None:
        """Read the first row: this finds most faults of a file at little cost."""
        if next(self.rows(file, 0, 1), None) is None:
            raise DatasetError(f"{file.path} holds no sample: write it again, or take it out of the dataset.")

    def rows(self, file: DataFile, start: int, end: int) -> Iterator[Any]:
        """Yield rows `start` to `end` (not included) in order, as far as the file has them."""
        with named(file, self.name):
            if "first-bytes" not in file.notes:
                self._check_first_bytes(file)
            if start < end:
                yield from self._rows(file, start, end)

    def pieces(self, file: DataFile) -> list[tuple[int, int]]:
        """Return runs of rows that can be read without earlier rows, each as first row and the row after the last.

        A file whose rows have to be counted is one run without an end.
        """
        with named(file, self.name):
            self._check_first_bytes(file)
            return self._pieces(file)

    def _pieces(self, file: DataFile) -> list[tuple[int, int]]:
        return [(0, sys.maxsize)]

    @abstractmethod
    def _count(self, file: DataFile) -> int: ...

    @abstractmethod
    def _rows(self, file: DataFile, start: int, end: int) -> Iterator[Any]: ...

    def _check_first_bytes(self, file: DataFile) -> None:
        with file.open() as opened:
            first = opened.read(8)
        if not first:
            raise DatasetError(
                f"{file.path} is empty: write it again if it should hold samples, or take it out of the dataset."
            )
        for magic, kind in _FIRST_BYTES.items():
            if first.startswith(magic) and kind != self.name:
                advice = "end its name in .gz" if kind == "gzip" else f"give format={kind!r}"
                raise DatasetError(f"{file.path} is not {self.name} but {kind}: {advice}.")
        file.notes["first-bytes"] = first

    def _check_columns(self, file: DataFile, there: Sequence[str]) -> None:
        if unknown := [name for name in self.columns or () if name not in there]:
            raise DatasetError(f"{file.path} has no column {unknown[0]!r}; it has {', '.join(there)}.")


@contextmanager
def named(file: DataFile, format: str) -> Iterator[None]:  # noqa: A002
    """Name the file in errors that are raised within."""
    try:
        yield
    except DatasetError:
        raise
    except FileNotFoundError as error:
        raise DataFileNotFoundError(
            f"{file.path} is not there: was it moved or deleted, or does this host not see it?"
        ) from error
    except PermissionError as error:
        raise DatasetError(f"{file.path} may not be read: {error}. Change who may read it.") from error
    except (ValueError, OSError, EOFError, NotImplementedError, zlib.error) as error:  # include pyarrow's errors
        raise DatasetError(
            f"{file.path} cannot be read as {format}: {str(error).rstrip('.')}. Is it cut short, or of another format?"
        ) from error
