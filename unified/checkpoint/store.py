"""Checkpoints in a store: written so that a crash at any byte changes nothing, read so that damage is noticed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from unified.checkpoint.location import Judgement, Writer, judge
from unified.checkpoint.manifest import (
    Checksum,
    Compression,
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
from unified.checkpoint.payload import Chunk, Measured, Payload, decompress
from unified.checkpoint.retention import Stored, plan_sweep
from unified.errors import CheckpointCorruptError, CheckpointExistsError, CheckpointNotFoundError

if TYPE_CHECKING:
    from unified.storage.backend import StorageBackend

logger = logging.getLogger(__name__)

MAX_NAMED = 8


@dataclass(frozen=True, eq=False)
class Order:
    """A checkpoint that is to be written."""

    step: int
    token: str
    """In the names of its parts; no other save has it."""
    payloads: dict[str, Payload] = field(default_factory=dict)
    """By the part's name, which is empty where there is only one."""
    kind: Kind = "bytes"
    compression: Compression | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    world_size: int | None = None
    """How many ranks write it together; None: as many as its writer says that there are."""


class Existing(NamedTuple):
    """What there is of a step that is to be saved."""

    etag: str
    """Of the manifest, as the storage knows it."""
    manifest: Manifest | None
    """None: it cannot be read."""


class CheckpointStore:
    """One series of checkpoints at one place. Safe for threads.

    Args:
        backend: of the storage.
        prefix: of all its keys, without a slash at the end; empty: the root of the backend.
        writer: who writes here.
        place: the same place in words.
    """

    def __init__(self, backend: StorageBackend, prefix: str, writer: Writer, *, place: str = "the storage") -> None:
        self.backend = backend
        self.prefix = prefix
        self.writer = writer
        self.place = place
        self.known_bad: set[int] = set()
        """Steps whose checkpoint was damaged when it was loaded."""
        self.on_damage: Callable[[str], object] = lambda text: None
        """Is told when an older checkpoint is used instead of damaged ones."""
        self._found: dict[str, str] | None = None
        """The manifests that were there at the first look, by name, with their etags: those of earlier lives."""
        self._read_before: dict[str, tuple[str, Manifest]] = {}
        self._writing: set[str] = set()
        self._lock = threading.Lock()

    def key(self, name: str) -> str:
        """In the backend."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def write(self, order: Order) -> Manifest:
        """Write a checkpoint: its parts, then its manifest.

        Returns:
            Its manifest; another rank's, if one with the same state was faster.

        Raises:
            CheckpointExistsError: somebody else writes the same step here.
            OSError: the store does not take it.
        """
        existing = self._existing(order.step)
        if (kept := self._kept(existing, order.step)) is not None:
            return kept
        self.begin(order.token)
        try:
            parts = [
                self.write_part(order, name, payload, order.compression) for name, payload in order.payloads.items()
            ]
            return self.publish(order, parts, existing)
        finally:
            self.end(order.token)

    def begin(self, token: str) -> None:
        """No sweep takes parts with this token for left over, until its `end`."""
        with self._lock:
            self._writing.add(token)

    def end(self, token: str) -> None:
        """Of a save that began. Can be called twice."""
        with self._lock:
            self._writing.discard(token)

    def replaceable(self, step: int) -> Existing | None:
        """What a save of that step by several ranks would replace; None: there is nothing.

        Raises:
            CheckpointExistsError: it is not this writer's.
        """
        existing = self._existing(step)
        if (kept := self._kept(existing, step)) is not None:
            raise CheckpointExistsError(
                f"Rank {kept.rank} has saved a checkpoint of step {step} in {self.place} by itself; save each step in "
                "one way."
            )
        return existing

    def write_part(self, order: Order, name: str, payload: Payload, compression: Compression | None = None) -> Part:
        """Write one part, which belongs to nothing before `publish`."""
        measured = Measured(payload, compression)
        key = part_name(order.step, order.token, name)
        self.backend.write(self.key(key), measured)
        checksum = measured.checksum
        return Part(key=key, size_bytes=checksum.nbytes, checksum=checksum.text, name=name)

    def publish(self, order: Order, parts: Iterable[Part], existing: Existing | None = None) -> Manifest:
        """Make a checkpoint of parts that are written: the last step of `write`, which see.

        Args:
            existing: what there is of that step and may be replaced.
        """
        manifest = make_manifest(
            parts,
            step=order.step,
            kind=order.kind,
            compression=order.compression,
            rank=self.writer.rank,
            world_size=self.writer.world_size if order.world_size is None else order.world_size,
            saved_at=time.time(),
            writer=self.writer.name,
            metadata=order.metadata,
        )
        data = encode(manifest)
        try:
            self._put(order.step, data, existing)
        except FileExistsError:  # another writer was faster
            existing = self._existing(order.step)
            try:
                kept = self._kept(existing, order.step)
            except CheckpointExistsError:
                self.delete(part.key for part in manifest.parts)
                raise
            if kept is not None:
                self.delete(part.key for part in manifest.parts)
                return kept
            self._put(order.step, data, existing)
        self.known_bad.discard(order.step)
        if existing is not None and existing.manifest is not None:
            ours = {part.key for part in manifest.parts}
            self.delete(part.key for part in existing.manifest.parts if part.key not in ours)
        return manifest

    def steps(self) -> list[int]:
        """Of every checkpoint there is, in order."""
        return sorted(step for each in self.stored() if (step := step_of(each.key)) is not None)

    def stored(self, prefix: str = "step-") -> list[Stored]:
        """Every object at this place whose key, relative to it, begins so.

        Of all checkpoints that the first call finds this writer takes it that an earlier life has left them.
        """
        start = self.key(prefix)
        cut = len(start) - len(prefix)
        found = [
            Stored(key=stat.key[cut:], size_bytes=stat.nbytes, modified_at=stat.modified_at, etag=stat.etag)
            for stat in self.backend.list(start)
        ]
        with self._lock:
            if self._found is None and prefix == "step-":
                self._found = {each.key: each.etag for each in found if step_of(each.key) is not None}
        return found

    def manifest(self, step: int) -> Manifest:
        """Of one checkpoint.

        Raises:
            CheckpointNotFoundError: there is none; the message names those there are.
            CheckpointCorruptError: it cannot be read.
        """
        name = manifest_name(step)
        try:
            return decode(self.backend.read(self.key(name)), name)
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(
                f"There is no checkpoint of step {step} in {self.place}: {describe(self.steps())}."
            ) from error

    def read(self, manifest: Manifest) -> Chunk:
        """The data of a checkpoint of one part, as they were given to be saved.

        Raises:
            CheckpointCorruptError: they are not what was saved.
        """
        return decompress(self.read_part(manifest.parts[0]), manifest.compression)

    def read_part(self, part: Part) -> bytearray:
        """What is stored of one part.

        Raises:
            CheckpointCorruptError: it is not what was saved, or gone.
        """
        try:
            data = bytearray(self.backend.stat(self.key(part.key)).nbytes)
            check_part(part, len(data), part.checksum)  # of the wrong size: there is no need to read it
            num_read = self.backend.read_into(self.key(part.key), data)
        except FileNotFoundError as error:
            raise CheckpointCorruptError(f"{part.key} is gone") from error
        checksum = Checksum()
        checksum.update(data)
        check_part(part, num_read, checksum.text)
        return data

    def sweep(self, keep_last_n: int | None, protected: Collection[int]) -> list[Manifest]:
        """Delete what `unified.checkpoint.retention` says may go.

        Returns:
            Of those that stay, the ones that an earlier life or another run has written.
        """
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
        return [
            manifest
            for etag, manifest in self._read_before.values()
            if manifest.writer != self.writer.name and self._judge(Existing(etag, manifest), manifest.step) != "leave"
        ]

    def _existing(self, step: int) -> Existing | None:
        """What a new checkpoint would replace."""
        if self._found is None:
            self.stored()  # the first look
        name = manifest_name(step)
        try:
            etag = self.backend.stat(self.key(name)).etag
        except FileNotFoundError:
            return None
        try:
            return Existing(etag, self.manifest(step))
        except CheckpointNotFoundError:
            return None
        except CheckpointCorruptError:
            return Existing(etag, None)

    def _put(self, step: int, data: bytes, existing: Existing | None) -> None:
        """Write a manifest; FileExistsError: there is another one than was seen."""
        key = self.key(manifest_name(step))
        if existing is None:
            self.backend.write(key, data, if_absent=True)
        else:
            self.backend.replace(key, data, existing.etag)

    def _judge(self, existing: Existing | None, step: int) -> Judgement:
        if existing is None:
            return "write"
        is_older = (self._found or {}).get(manifest_name(step)) == existing.etag
        return judge(existing.manifest, self.writer, is_older=is_older)

    def _kept(self, existing: Existing | None, step: int) -> Manifest | None:
        """Another rank's checkpoint, which stays; None: this writer writes that step."""
        judgement = self._judge(existing, step)
        manifest = existing.manifest if existing is not None else None
        if manifest is None or judgement == "write":
            return None
        if judgement == "leave":
            logger.info("event=checkpoint-shared step=%d: rank %d has saved it", step, manifest.rank)
            return manifest
        raise CheckpointExistsError(
            f"The checkpoint of step {step} in {self.place} was saved meanwhile by another writer "
            f"({manifest.writer}, rank {manifest.rank} of {manifest.world_size}). "
            "Give each run a storage_path of its own; nothing of the other's was changed."
        )

    def _read_once(self, each: Stored, step: int) -> Manifest | None:
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
        """Objects by their keys relative to this place."""
        for name in names:
            self.backend.delete(self.key(name))


def describe(steps: list[int]) -> str:
    """Which checkpoints there are, in words."""
    if not steps:
        return "there is none at all"
    more = f" and {len(steps) - MAX_NAMED} before" if len(steps) > MAX_NAMED else ""
    return f"there are those of steps {', '.join(map(str, steps[-MAX_NAMED:]))}{more}"
