"""The checkpoint store. A crash during a write changes no checkpoint, and a read detects damage."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from unified.checkpoint.location import WriterIdentity, resolve
from unified.checkpoint.manifest import (
    Checksum,
    Kind,
    Manifest,
    Part,
    check_part,
    decode,
    encode,
    make_manifest,
    manifest_name,
    part_name,
    step_of,
)
from unified.checkpoint.payload import Chunk, MeasuredStream, Payload, decompress
from unified.checkpoint.retention import StoredObject, is_whole, plan_sweep
from unified.config.runtime import Compression
from unified.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    UsageError,
)

if TYPE_CHECKING:
    from unified.storage.backend import StorageBackend

logger = logging.getLogger(__name__)

MAX_NAMED = 8
RANK_ERRORS = (CheckpointError, CheckpointCorruptError, CheckpointNotFoundError, UsageError)
"""Errors of rank 0 that the other ranks raise as they are."""


@dataclass(frozen=True, eq=False)
class SaveRequest:
    step: int
    token: str
    """A word in the names of its parts; no other save has it."""
    payloads: dict[str, Payload] = field(default_factory=dict)
    """Payloads by the part's name, which is empty if there is only one."""
    kind: Kind = "bytes"
    compression: Compression | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    world_size: int | None = None
    """Number of ranks that write it together; None: the world size of its writer."""


class Existing(NamedTuple):
    """An existing checkpoint of a step that is to be saved."""

    etag: str
    """Entity tag of the manifest in the storage."""
    manifest: Manifest | None
    """None: it cannot be read."""


class CheckpointStore:
    """One series of checkpoints at one place. Safe for threads.

    Args:
        backend: the storage.
        prefix: the prefix of all its keys, without a slash at the end; empty: the root of the backend.
        writer: the manager that writes here.
        place: the same place in words.
    """

    def __init__(
        self, backend: StorageBackend, prefix: str, writer: WriterIdentity, *, place: str = "the storage"
    ) -> None:
        self.backend = backend
        self.prefix = prefix
        self.writer = writer
        self.place = place
        self.known_bad: set[int] = set()
        """Steps whose checkpoint was damaged when it was loaded."""
        self._found: dict[str, str] | None = None
        """Manifests that were there at the first look, by name, with their etags: those of earlier incarnations."""
        self._read_before: dict[str, tuple[str, Manifest]] = {}
        self._writing: set[str] = set()
        self._lock = threading.Lock()

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def write(self, request: SaveRequest) -> Manifest:
        """Write a checkpoint: its parts, then its manifest.

        Returns:
            Its manifest; another rank's manifest, if that rank saved the same state first.
        """
        existing = self._existing(request.step)
        if (kept := self._kept(existing, request.step)) is not None:
            return kept
        self.begin(request.token)
        try:
            parts = [
                self.write_part(request, name, payload, request.compression)
                for name, payload in request.payloads.items()
            ]
            return self.publish(request, parts, existing)
        finally:
            self.end(request.token)

    def begin(self, token: str) -> None:
        """Protect parts with this token from sweeps, until `end`."""
        with self._lock:
            self._writing.add(token)

    def end(self, token: str) -> None:
        """Note the end of a save that began. Can be called twice."""
        with self._lock:
            self._writing.discard(token)

    def replaceable(self, step: int) -> Existing | None:
        """Return the checkpoint that a save of that step by several ranks would replace; None: there is none."""
        existing = self._existing(step)
        if (kept := self._kept(existing, step)) is not None:
            raise CheckpointExistsError(
                f"Rank {kept.rank} has saved a checkpoint of step {step} in {self.place} by itself; save each step in "
                "one way."
            )
        return existing

    def write_part(
        self, request: SaveRequest, name: str, payload: Payload, compression: Compression | None = None
    ) -> Part:
        """Write one part; it belongs to no checkpoint before `publish`."""
        measured = MeasuredStream(payload, compression)
        key = part_name(request.step, request.token, name)
        self.backend.write(self.key(key), measured)
        checksum = measured.checksum
        return Part(key=key, size_bytes=checksum.nbytes, checksum=checksum.text, name=name)

    def publish(self, request: SaveRequest, parts: Iterable[Part], existing: Existing | None = None) -> Manifest:
        """Make a checkpoint of written parts: the last step of `write`. Returns what `write` returns."""
        manifest = make_manifest(
            parts,
            step=request.step,
            kind=request.kind,
            compression=request.compression,
            rank=self.writer.rank,
            world_size=self.writer.world_size if request.world_size is None else request.world_size,
            saved_at=time.time(),
            writer=self.writer.name,
            metadata=request.metadata,
        )
        data = encode(manifest)
        try:
            self._put(request.step, data, existing)
        except FileExistsError:  # another writer was faster
            existing = self._existing(request.step)
            try:
                kept = self._kept(existing, request.step)
            except CheckpointExistsError:
                self.delete(part.key for part in manifest.parts)
                raise
            if kept is not None:
                self.delete(part.key for part in manifest.parts)
                return kept
            self._put(request.step, data, existing)
        self.known_bad.discard(request.step)
        if existing is not None and existing.manifest is not None:
            ours = {part.key for part in manifest.parts}
            self.delete(part.key for part in existing.manifest.parts if part.key not in ours)
        return manifest

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, in order."""
        return sorted(step for each in self.stored() if (step := step_of(each.key)) is not None)

    def stored(self, prefix: str = "step-") -> list[StoredObject]:
        """Return every object at this place whose relative key begins with `prefix`.

        Checkpoints that the first call finds count as checkpoints of an earlier incarnation.
        """
        start = self.key(prefix)
        cut = len(start) - len(prefix)
        found = [
            StoredObject(key=stat.key[cut:], size_bytes=stat.nbytes, modified_at=stat.modified_at, etag=stat.etag)
            for stat in self.backend.list(start)
        ]
        with self._lock:
            if self._found is None and prefix == "step-":
                self._found = {each.key: each.etag for each in found if step_of(each.key) is not None}
        return found

    def manifest(self, step: int) -> Manifest:
        """Read the manifest of one checkpoint."""
        name = manifest_name(step)
        try:
            return decode(self.backend.read(self.key(name)), name)
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(
                f"There is no checkpoint of step {step} in {self.place}: {describe(self.steps())}."
            ) from error

    def read(self, manifest: Manifest) -> Chunk:
        """Read the data of a checkpoint of one part, and decompress them."""
        return decompress(self.read_part(manifest.parts[0]), manifest.compression)

    def read_part(self, part: Part) -> bytearray:
        """Read one part as stored; raise CheckpointCorruptError if it is gone or differs from the saved one."""
        try:
            data = bytearray(self.backend.stat(self.key(part.key)).nbytes)
            check_part(part, len(data), part.checksum)  # finds a wrong size without a read
            num_read = self.backend.read_into(self.key(part.key), data)
        except FileNotFoundError as error:
            raise CheckpointCorruptError(f"{part.key} is gone") from error
        checksum = Checksum(part.checksum)
        checksum.update(data)
        check_part(part, num_read, checksum.text)
        return data

    def sweep(self, keep_last_n: int | None, protected: Collection[int]) -> None:
        """Delete the objects that `plan_sweep` of `unified.checkpoint.retention` names."""
        stored = self.stored()
        manifests = {}
        for each in stored:
            if (step := step_of(each.key)) is not None and (manifest := self._read_once(each, step)) is not None:
                manifests[step] = manifest
        with self._lock:
            plan = plan_sweep(
                stored,
                manifests,
                keep_last_n=keep_last_n,
                now=time.time(),
                protected=protected,
                known_bad=self.known_bad,
                writing=self._writing,
            )
        self.delete(plan.manifests)
        self.delete(plan.parts)
        there = {each.key for each in stored}.difference(plan.manifests)
        self._read_before = {key: known for key, known in self._read_before.items() if key in there}

    def discard_after(self, step: int) -> tuple[Manifest, list[int]]:
        """Delete every checkpoint after that of `step`, newest first, so that a crash leaves the older ones.

        Returns:
            The manifest of `step`, and the steps that were deleted, in order.
        """
        manifest = self.manifest(step)
        if not is_whole(manifest, {each.key: each.size_bytes for each in self.stored()}):
            raise CheckpointCorruptError(
                f"Parts of the checkpoint of step {step} in {self.place} are gone or cut short; those after it were "
                "kept."
            )
        later = [each for each in self.steps() if each > step]
        for each in reversed(later):
            try:
                parts = [part.key for part in self.manifest(each).parts]
            except (CheckpointNotFoundError, CheckpointCorruptError):
                parts = []  # a sweep deletes them as orphans
            self.delete([manifest_name(each), *parts])
        return manifest, later

    def _existing(self, step: int) -> Existing | None:
        """Return the checkpoint that a new one would replace."""
        if self._found is None:
            self.stored()  # the first look
        name = manifest_name(step)
        try:
            etag = self.backend.stat(self.key(name)).etag
            return Existing(etag, self.manifest(step))
        except FileNotFoundError:
            return None
        except CheckpointCorruptError:
            return Existing(etag, None)

    def _put(self, step: int, data: bytes, existing: Existing | None) -> None:
        """Write a manifest; raise FileExistsError if the stored one is no longer `existing`."""
        key = self.key(manifest_name(step))
        if existing is None:
            self.backend.write(key, data, if_absent=True)
        else:
            self.backend.replace(key, data, existing.etag)

    def _kept(self, existing: Existing | None, step: int) -> Manifest | None:
        """Return another rank's checkpoint if it stays; None: this writer writes the step."""
        if existing is None or existing.manifest is None:
            return None
        manifest = existing.manifest
        is_older = (self._found or {}).get(manifest_name(step)) == existing.etag
        resolution = resolve(manifest, self.writer, is_older=is_older)
        if resolution == "write":
            return None
        if resolution == "leave":
            logger.info("event=checkpoint-shared step=%d: rank %d has saved it", step, manifest.rank)
            return manifest
        raise CheckpointExistsError(
            f"The checkpoint of step {step} in {self.place} was saved meanwhile by another writer "
            f"({manifest.writer}, rank {manifest.rank} of {manifest.world_size}). "
            "Give each run a storage_path of its own; nothing of the other's was changed."
        )

    def _read_once(self, each: StoredObject, step: int) -> Manifest | None:
        known = self._read_before.get(each.key)
        if known is not None and known[0] == each.etag:
            return known[1]
        try:
            manifest = self.manifest(step)
        except (CheckpointNotFoundError, CheckpointCorruptError):
            return None
        self._read_before[each.key] = (each.etag, manifest)
        return manifest

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects by their keys relative to this place."""
        for name in names:
            self.backend.delete(self.key(name))


def describe(steps: list[int]) -> str:
    if not steps:
        return "there is none at all"
    more = f" and {len(steps) - MAX_NAMED} before" if len(steps) > MAX_NAMED else ""
    return f"there are those of steps {', '.join(map(str, steps[-MAX_NAMED:]))}{more}"
