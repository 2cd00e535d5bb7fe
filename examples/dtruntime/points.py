"""A small dataset in several parquet files: points of the plane, and a value at each that is to be learnt."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet

ROWS_OF_FILES = (700, 130, 850, 420, 90, 610, 1000, 200)
"""Not multiples of a shard: some shards lie in two files, and most files hold several."""


def make(folder: Path) -> None:
    """Write the files, unless some are there."""
    if any(folder.glob("*.parquet")):
        return
    folder.mkdir(parents=True, exist_ok=True)
    chance, first = random.Random(0), 0
    for number, rows in enumerate(ROWS_OF_FILES):
        x, y = ([chance.uniform(-1, 1) for _ in range(rows)] for _ in range(2))
        value = [math.sin(3 * a) * b for a, b in zip(x, y, strict=True)]
        table = pyarrow.table({"id": list(range(first, first + rows)), "x": x, "y": y, "value": value})
        pyarrow.parquet.write_table(table, folder / f"part_{number}.parquet")
        first += rows


def ids(folder: Path) -> list[int]:
    """Return the ids of all samples in the files that are there."""
    return [each for file in folder.glob("*.parquet") for each in pyarrow.parquet.read_table(file)["id"].to_pylist()]
