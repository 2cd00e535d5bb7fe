"""What is where in a sharded checkpoint. Pure: records, their bytes, and the names of what ranks leave for each other.

Each rank writes one part, ``rank-00003.bin``, and beside it a note of what is in it, ``rank-00003.note``; or, if it
cannot, ``rank-00003.failed``, which says why. Rank 0 makes the *index* of the notes, and then the manifest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from unified.checkpoint.manifest import Manifest, Part, manifest_name, part_name
from unified.errors import CheckpointCorruptError
from unified.values import Value

INDEX = "index"
_LEFT = re.compile(r"rank-(\d{5,})\.(note|failed)")


class Shard(Value, frozen=True, kw_only=True):
    """A piece of a tensor, or an object, in a rank's part."""

    rank: int
    start: int
    """Bytes from the part's beginning."""
    nbytes: int
    """As stored, so after compression."""
    checksum: str
    """Of what is stored."""
    offsets: list[int] | None = None
    """Of its beginning in the whole tensor; None: an object."""
    sizes: list[int] = []
    is_raw: bool = True
    """The tensor's memory; otherwise as ``torch.save`` writes it."""


class Entry(Value, frozen=True, kw_only=True):
    """A tensor or an object of a state dict."""

    path: list[str | int]
    """Keys of dicts and positions in lists that lead to it."""
    dtype: str = ""
    """As torch names it, such as ``float32``; empty: it is an object."""
    size: list[int] = []
    shards: list[Shard] = []


class Note(Value, frozen=True, kw_only=True):
    """What one rank wrote."""

    part: Part
    shards: dict[str, list[Shard]]
    """By the name of the entry."""


class Standing(Value, frozen=True, kw_only=True):
    """How far a save of several ranks is, by what lies in the store."""

    written: frozenset[int]
    failed: frozenset[int]
    has_manifest: bool
    """There is one of that step; whether it is this save's is not known."""


def data_name(rank: int) -> str:
    return f"rank-{rank:05d}.bin"


def note_name(rank: int) -> str:
    return f"rank-{rank:05d}.note"


def failed_name(rank: int) -> str:
    return f"rank-{rank:05d}.failed"


def standing(keys: Iterable[str], step: int, token: str) -> Standing:
    """Read from the keys at the place of the manifests."""
    written, failed = set[int](), set[int]()
    has_manifest = False
    start = part_name(step, token, "_").removesuffix("_")
    for key in keys:
        if key == manifest_name(step):
            has_manifest = True
        elif key.startswith(start) and (found := _LEFT.fullmatch(key[len(start) :])):
            (written if found[2] == "note" else failed).add(int(found[1]))
    return Standing(written=frozenset(written), failed=frozenset(failed), has_manifest=has_manifest)


def is_of(manifest: Manifest, token: str) -> bool:
    """Whether a manifest is that of the save with this token."""
    return any(part.key == part_name(manifest.step, token, INDEX) for part in manifest.parts)


def with_shards(entries: dict[str, Entry], notes: Iterable[Note]) -> dict[str, Entry]:
    """The entries of a state dict, each with where it is."""
    found: dict[str, list[Shard]] = {name: [] for name in entries}
    for note in notes:
        for name, shards in note.shards.items():
            found[name].extend(shards)
    return {name: msgspec.structs.replace(entry, shards=found[name]) for name, entry in entries.items()}


def encode_index(entries: dict[str, Entry]) -> bytes:
    return msgspec.msgpack.encode(entries)


def decode_index(data: bytes) -> dict[str, Entry]:
    """Raises CheckpointCorruptError for what is no index."""
    try:
        return msgspec.msgpack.decode(data, type=dict[str, Entry])
    except msgspec.DecodeError as error:
        raise CheckpointCorruptError(f"its index cannot be read: {error}") from error


def encode_note(note: Note) -> bytes:
    return msgspec.msgpack.encode(note)


def decode_note(data: bytes) -> Note:
    """Raises CheckpointCorruptError for what is no note."""
    try:
        return msgspec.msgpack.decode(data, type=Note)
    except msgspec.DecodeError as error:
        raise CheckpointCorruptError(f"what a rank noted cannot be read: {error}") from error
