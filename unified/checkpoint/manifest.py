"""The manifest of a checkpoint, which names its parts. Pure: names, records, and their bytes.

A checkpoint exists when its manifest does. The manifest of step 1 is ``step-000001.json``. Its *parts* are written
before it, under names that no other save uses: ``step-000001.TOKEN.bin``. So one rename (or one put) makes a
checkpoint, or replaces the one of the same step. A crash before this changes nothing.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import warnings
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from unified.config.runtime import Compression
from unified.errors import CheckpointCorruptError, UsageError
from unified.values import Value

FORMAT = 2
"""Newest format of manifests: 2 if a checksum is XXH3, else 1. Only a later version writes a higher number."""
XXH3 = "xxh3_64:"

Kind = Literal["bytes", "state", "sharded", "files", "metadata"]
"""`bytes`: the user's. `state`: a state dict, written by ``torch.save``. `sharded`: the state of several ranks.
`files`: a directory. `metadata`: nothing but the manifest."""


_MANIFEST = re.compile(r"step-(\d{6,})\.json")
_PART = re.compile(r"step-(\d{6,})\.([0-9a-z]+)\.(?:bin|parts/.+)")


class Part(Value, frozen=True, kw_only=True):
    """One stored object."""

    key: str
    """Key relative to the place of the manifests."""
    size_bytes: int
    """Size as stored, after compression."""
    checksum: str
    """Checksum of the stored bytes: ``xxh3_64:`` and 16 hexadecimal digits, or ``crc32:`` and eight."""
    name: str = ""
    """Name of a file in its directory."""


class Manifest(Value, frozen=True, kw_only=True):
    """A checkpoint. Sizes are bytes, times seconds since 1970."""

    step: int
    kind: Kind = "bytes"
    size_bytes: int = 0
    """Size of all parts, as stored."""
    checksum: str = ""
    """Checksum of its only part, or a checksum over the checksums of its parts."""
    compression: Compression | None = None
    rank: int = 0
    """Rank that wrote it."""
    world_size: int = 1
    saved_at: float = 0.0
    writer: str = ""
    """Name of the manager's incarnation that wrote it."""
    parts: list[Part] = []
    metadata: dict[str, Any] = {}
    """Metadata of the user."""
    format: int = 1


def make_manifest(parts: Iterable[Part], *, step: int, **fields: Any) -> Manifest:
    """Return a manifest whose size and checksum are those of its parts."""
    parts = list(parts)
    if len(parts) == 1:
        checksum = parts[0].checksum
    elif parts:
        joined = "\n".join(f"{part.name} {part.size_bytes} {part.checksum}" for part in parts)
        checksum = "sha256:" + hashlib.sha256(joined.encode()).hexdigest()
    else:
        checksum = ""
    fields.setdefault("format", 2 if any(part.checksum.startswith(XXH3) for part in parts) else 1)
    size_bytes = sum(part.size_bytes for part in parts)
    return Manifest(step=step, parts=parts, size_bytes=size_bytes, checksum=checksum, **fields)


def checked_metadata(step: int, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a user's metadata; raise UsageError, before anything is written, if JSON cannot hold them."""
    if metadata is not None and not isinstance(metadata, Mapping):
        raise UsageError(f"A checkpoint's metadata are a dict, not {type(metadata).__name__}.")
    made = dict(metadata or {})
    encode(make_manifest([], step=step, metadata=made))
    return made


def encode(manifest: Manifest) -> bytes:
    """Return a manifest as it is stored: JSON that people can read."""
    try:
        plain = msgspec.to_builtins(manifest)
        return (json.dumps(plain, indent=2, sort_keys=False, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"The metadata of the checkpoint of step {manifest.step} cannot be written as JSON: {error}. "
            "Give plain numbers, text, lists and dicts."
        ) from error


def decode(data: bytes, name: str) -> Manifest:
    """Read a manifest.

    Args:
        name: the name of the file, for errors; it must name the same step as the manifest.
    """
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointCorruptError(f"{name} is not the manifest of a checkpoint: {error}") from error
    if manifest.format > FORMAT:
        raise CheckpointCorruptError(
            f"{name} was written by a later version of unified (format {manifest.format}, known is {FORMAT}); update it"
        )
    if manifest.step != step_of(name):
        raise CheckpointCorruptError(f"{name} says that it is of step {manifest.step}: it was renamed or copied")
    return manifest


def manifest_name(step: int) -> str:
    """Return ``step-000001.json``; steps of more than six digits have longer names."""
    return f"step-{step:06d}.json"


def part_name(step: int, token: str, name: str = "") -> str:
    """Return the name of a part of one save: its only payload, or the file `name` of several."""
    return f"step-{step:06d}.{token}." + (f"parts/{name}" if name else "bin")


def step_of(name: str) -> int | None:
    """Return the step in a manifest's name; None for any other name, also ``step-1.json``: a step has only one name."""
    found = _MANIFEST.fullmatch(name)
    if found is None or manifest_name(int(found[1])) != name:
        return None
    return int(found[1])


def part_of(key: str) -> tuple[int, str] | None:
    """Return the step and the token in a part's key; None for any other key."""
    found = _PART.fullmatch(key)
    return (int(found[1]), found[2]) if found else None


def check_step(step: object) -> int:
    """Return a user's step as an int; raise UsageError if it is no step."""
    is_whole = isinstance(step, int) or hasattr(step, "__index__")  # numpy's integers have it
    if isinstance(step, bool) or not is_whole or int(step) < 0:  # type: ignore[call-overload]
        raise UsageError(f"A checkpoint's step is a whole number from 0 up, not {step!r}.")
    return int(step)  # type: ignore[call-overload, no-any-return]


class CheckpointUnverifiedWarning(UserWarning):
    """A checkpoint was loaded, but its checksums could not be compared."""


class Checksum:
    """Checksum of a stream. It detects damage by a disk, a network or a truncated write, not by an attacker.

    It is XXH3 of 64 bits if the package xxhash is installed, else CRC-32, which takes several times as long.

    Args:
        expected: the saved checksum as text; its algorithm is used. If the algorithm is not installed, `text` is
            `expected`, and a CheckpointUnverifiedWarning says so.
    """

    def __init__(self, expected: str = "") -> None:
        self.nbytes = 0
        self._crc = 0
        self._unverified = ""
        wants_xxh3 = expected.startswith(XXH3) or not expected
        module = _xxhash() if wants_xxh3 else None
        self._xxh3 = None if module is None else module.xxh3_64()
        if expected and wants_xxh3 and self._xxh3 is None:
            self._unverified = expected
            warnings.warn(
                "A checkpoint is loaded of which only the sizes are compared: its checksums need the package xxhash: "
                "pip install 'unified-runtime[xxhash]'",
                CheckpointUnverifiedWarning,
                stacklevel=2,
            )

    def update(self, chunk: bytes | bytearray | memoryview) -> None:
        self.nbytes += len(chunk)
        if self._xxh3 is not None:
            self._xxh3.update(chunk)
        elif not self._unverified:
            self._crc = zlib.crc32(chunk, self._crc)

    @property
    def text(self) -> str:
        if self._xxh3 is not None:
            return f"{XXH3}{self._xxh3.hexdigest()}"
        return self._unverified or f"crc32:{self._crc:08x}"


@functools.cache
def _xxhash() -> Any:
    """Return the package; None: it is not installed."""
    try:
        import xxhash
    except ImportError:
        return None
    return xxhash


def check_part(part: Part, nbytes: int, checksum: str) -> None:
    """Raise CheckpointCorruptError if what was read differs from what was saved."""
    if nbytes != part.size_bytes:
        raise CheckpointCorruptError(f"{part.key} has {nbytes} bytes, {part.size_bytes} were saved")
    if checksum != part.checksum:
        raise CheckpointCorruptError(f"{part.key} has the checksum {checksum}, {part.checksum} was saved")
