"""The index of a sharded checkpoint: records, their bytes, the names of ranks' objects, and reading its pieces.

Each rank writes one part, ``rank-00003.bin``, and, except rank 0, a note of its contents, ``rank-00003.note``. A rank
that fails writes the reason to ``rank-00003.failed``. Rank 0 makes the *index* from the notes, and then the manifest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal

import msgspec

from unified.checkpoint.manifest import Checksum, Manifest, Part, check_part, manifest_name, part_name
from unified.errors import CheckpointCorruptError
from unified.values import Value

if TYPE_CHECKING:
    from unified.checkpoint.store import CheckpointStore


INDEX = "index"
OF_RANK = "\0rank-"
"""Separates a value's name from the number of the rank whose value this is, if the ranks saved different ones."""
_LEFT = re.compile(r"rank-(\d{5,})\.(note|failed)")


class Shard(Value, frozen=True, kw_only=True):
    """A piece of a tensor, or an object, in a rank's part."""

    rank: int
    start: int
    """Offset in the part, in bytes."""
    nbytes: int
    """Size as stored, after compression."""
    checksum: str
    """Checksum of the stored bytes."""
    offsets: list[int] | None = None
    """Indices of its beginning in the whole tensor; None: an object."""
    sizes: list[int] = []
    is_raw: bool = True
    """True: the bytes are the tensor's memory. False: ``torch.save`` wrote them."""


class IndexEntry(Value, frozen=True, kw_only=True):
    """A tensor or an object of a state dict."""

    path: list[str | int]
    """Keys of dicts and positions in lists that lead to it."""
    dtype: str = ""
    """Name of the dtype in torch, such as ``float32``; empty: an object."""
    size: list[int] = []
    shards: list[Shard] = []


class RankNote(Value, frozen=True, kw_only=True):
    """The pieces that one rank wrote."""

    part: Part
    shards: dict[str, list[Shard]]
    """Pieces by the name of the entry."""


class SaveProgress(Value, frozen=True, kw_only=True):
    """The progress of a save of several ranks, read from the keys in the store."""

    written: frozenset[int]
    failed: frozenset[int]
    has_manifest: bool
    """A manifest of that step is there, of this save or of another one."""


def rank_file(rank: int, suffix: Literal["bin", "note", "failed"]) -> str:
    return f"rank-{rank:05d}.{suffix}"


def progress_of(keys: Iterable[str], step: int, token: str) -> SaveProgress:
    """Read the progress from the keys at the place of the manifests."""
    written, failed = set[int](), set[int]()
    has_manifest = False
    start = part_name(step, token, "_").removesuffix("_")
    for key in keys:
        if key == manifest_name(step):
            has_manifest = True
        elif key.startswith(start) and (found := _LEFT.fullmatch(key[len(start) :])):
            (written if found[2] == "note" else failed).add(int(found[1]))
    return SaveProgress(written=frozenset(written), failed=frozenset(failed), has_manifest=has_manifest)


def is_of(manifest: Manifest, token: str) -> bool:
    return any(part.key == part_name(manifest.step, token, INDEX) for part in manifest.parts)


def with_shards(entries: dict[str, IndexEntry], notes: Iterable[RankNote]) -> dict[str, IndexEntry]:
    """Return the entries of a state dict, each with its pieces."""
    found: dict[str, list[Shard]] = {name: [] for name in entries}
    for note in notes:
        for name, shards in note.shards.items():
            found[name].extend(shards)
    return {name: msgspec.structs.replace(entry, shards=found[name]) for name, entry in entries.items()}


def decode_index(data: bytes) -> dict[str, IndexEntry]:
    """Decode an index; raise CheckpointCorruptError if the bytes are not an index."""
    try:
        return msgspec.msgpack.decode(data, type=dict[str, IndexEntry])
    except msgspec.DecodeError as error:
        raise CheckpointCorruptError(f"its index cannot be read: {error}") from error


def decode_note(data: bytes) -> RankNote:
    """Decode a note; raise CheckpointCorruptError if the bytes are not a note."""
    try:
        return msgspec.msgpack.decode(data, type=RankNote)
    except msgspec.DecodeError as error:
        raise CheckpointCorruptError(f"the note of a rank cannot be read: {error}") from error


MAX_GAP_BYTES = 1 << 20
"""Largest gap between pieces that are read together: to read the gap is cheaper than another request."""
MAX_RUN_BYTES = 32 << 20
"""Largest size of pieces that are read together; a single piece may be larger."""


def runs(shards: Iterable[Shard]) -> list[list[Shard]]:
    """Return the pieces by offset, in groups that are read at once."""
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
    """Yield each piece as stored, in any order; raise CheckpointCorruptError if it differs from the saved one."""
    key = store.key(part.key)
    try:
        check_part(part, store.backend.stat(key).nbytes, part.checksum)
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
    checksum = Checksum(shard.checksum)
    checksum.update(piece)
    if num_read < shard.nbytes or checksum.text != shard.checksum:
        where = f"{part.key}, bytes {shard.start} to {shard.start + shard.nbytes},"
        raise CheckpointCorruptError(f"{where} has the checksum {checksum.text}, {shard.checksum} was saved")
