"""Pieces of one part, read in few requests: those that lie side by side together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from unified.checkpoint.manifest import Checksum, Part
from unified.checkpoint.sharded.index import Shard
from unified.errors import CheckpointCorruptError

if TYPE_CHECKING:
    from unified.checkpoint.store import CheckpointStore

MAX_GAP_BYTES = 1 << 20
"""Reading so much for nothing is cheaper than another request."""
MAX_RUN_BYTES = 32 << 20
"""Of several pieces; one alone may be larger."""


def runs(shards: Iterable[Shard]) -> list[list[Shard]]:
    """Pieces in the order in which they lie, in groups that are read at once."""
    found: list[list[Shard]] = []
    for shard in sorted(shards, key=lambda each: (each.start, each.nbytes)):
        if found:
            run = found[-1]
            gap = shard.start - (run[-1].start + run[-1].nbytes)
            if gap <= MAX_GAP_BYTES and shard.start + shard.nbytes - run[0].start <= MAX_RUN_BYTES:
                run.append(shard)
                continue
        found.append([shard])
    return found


def read_shards(store: CheckpointStore, part: Part, shards: Iterable[Shard]) -> Iterator[tuple[Shard, bytearray]]:
    """What is stored of each piece, in any order.

    Raises:
        CheckpointCorruptError: a piece is not what was saved, or the part is gone or of another size.
    """
    key = store.key(part.key)
    try:
        nbytes = store.backend.stat(key).nbytes
        if nbytes != part.size_bytes:
            raise CheckpointCorruptError(f"{part.key} has {nbytes} bytes, {part.size_bytes} were saved")
        for run in runs(shards):
            start = run[0].start
            data = bytearray(run[-1].start + run[-1].nbytes - start)
            num_read = store.backend.read_into(key, data, start)
            for shard in run:
                first = shard.start - start
                piece = data if len(run) == 1 else data[first : first + shard.nbytes]
                _check(part, shard, piece, num_read - first)
                yield shard, piece
    except FileNotFoundError as error:
        raise CheckpointCorruptError(f"{part.key} is gone") from error


def _check(part: Part, shard: Shard, piece: bytearray, num_read: int) -> None:
    checksum = Checksum()
    checksum.update(piece)
    if num_read < shard.nbytes or checksum.text != shard.checksum:
        where = f"{part.key}, bytes {shard.start} to {shard.start + shard.nbytes},"
        raise CheckpointCorruptError(f"{where} has the checksum {checksum.text}, {shard.checksum} was saved")
