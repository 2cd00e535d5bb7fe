"""Writes real data files of each format, for tests."""

import csv
import gzip
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet

from unified.coordinator.core.file_layout import FileLayout
from unified.data.formats.tfrecord import masked_crc32c
from unified.protocol.coordinator import FileRun, ShardAssignment


def samples(start: int, end: int) -> list[dict[str, Any]]:
    return [
        {"number": number, "text": f'row "{number}",\nand more', "half": number / 2} for number in range(start, end)
    ]


def write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    pyarrow.parquet.write_table(_table(rows), path, row_group_size=7)


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        writer = csv.DictWriter(file, ["number", "text", "half"])
        writer.writeheader()
        writer.writerows(rows)


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def write_arrow(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with pa.ipc.new_file(path, _SCHEMA) as writer:
        writer.write_table(_table(rows), max_chunksize=5)


def write_arrow_stream(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with pa.ipc.new_stream(path, _SCHEMA) as writer:
        writer.write_table(_table(rows), max_chunksize=5)


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))


def write_tfrecord(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb") as file:
        for row in rows:
            file.write(record(json.dumps(row).encode()))


def write_orc(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with pyarrow.orc.ORCWriter(path, batch_size=1, stripe_size=1) as writer:
        for first in range(0, len(rows), 9):
            writer.write(_table(rows[first : first + 9]))


WRITERS: dict[str, tuple[str, str, Callable[[Path, Sequence[dict[str, Any]]], None]]] = {
    "parquet": ("parquet", ".parquet", write_parquet),
    "csv": ("csv", ".csv", write_csv),
    "csv.gz": ("csv", ".csv.gz", write_csv),
    "jsonl": ("jsonl", ".jsonl", write_jsonl),
    "jsonl.gz": ("jsonl", ".jsonl.gz", write_jsonl),
    "arrow": ("arrow", ".arrow", write_arrow),
    "arrow stream": ("arrow", ".arrow", write_arrow_stream),
    "orc": ("orc", ".orc", write_orc),
    "tfrecord": ("tfrecord", ".tfrecord", write_tfrecord),
    "tfrecord.gz": ("tfrecord", ".tfrecord.gz", write_tfrecord),
}
"""Format, suffix and writer of each kind of file."""


def plain(format: str, sample: Any) -> dict[str, Any]:  # noqa: A002
    """The row that was written, from the sample that was read."""
    row: dict[str, Any] = json.loads(sample) if format == "tfrecord" else sample
    return row


_SCHEMA = pa.schema({"number": pa.int64(), "text": pa.string(), "half": pa.float64()})


def _table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), _SCHEMA)


def assign_files(runs: Sequence[FileRun], shard_id: int, start: int, end: int) -> ShardAssignment:
    """Return the assignment of a shard: samples `start` to `end` of a dataset that consists of these files."""
    found = FileLayout(run.num_samples for run in runs).locate(start, end)
    return ShardAssignment(
        shard_id=shard_id,
        file_paths=[runs[rows.file].path for rows in found],
        start_sample=start,
        end_sample=end,
        first_row=found[0].start if found else 0,
    )
