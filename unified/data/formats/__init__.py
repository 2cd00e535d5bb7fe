"""Formats of data files: `open_format` gives the reader of each."""

from __future__ import annotations

from collections.abc import Sequence

from unified.data.files import check_format
from unified.data.formats.columnar import ArrowFormat, OrcFormat, ParquetFormat
from unified.data.formats.row_format import RowFormat
from unified.data.formats.text import CsvFormat, JsonLinesFormat
from unified.data.formats.tfrecord import TFRecordFormat
from unified.errors import UsageError

_WITH_COLUMNS: dict[str, type[RowFormat]] = {
    each.name: each for each in (ParquetFormat, ArrowFormat, OrcFormat, CsvFormat, JsonLinesFormat)
}


def open_format(format: str, columns: Sequence[str] | None = None, *, verify: bool = False) -> RowFormat:  # noqa: A002
    """Return the reader of a format: ``parquet``, ``csv``, ``tfrecord``, ``jsonl``, ``arrow`` or ``orc``.

    Args:
        columns: names of the columns to read, None for all. Not for ``tfrecord``, whose samples are bytes.
        verify: check the checksums of ``tfrecord`` samples, too. Checksums of their lengths are always checked.
    """
    check_format(format)
    if format != "tfrecord":
        return _WITH_COLUMNS[format](columns)
    if columns is not None:
        raise UsageError("tfrecord files have no columns: take what is wanted from each sample's bytes.")
    return TFRecordFormat(verify=verify)
