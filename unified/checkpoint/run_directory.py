"""What a run keeps beside the data of its checkpoints: metadata, directories of files, its configuration, its logs.

A stored checkpoint as a directory on the local disk.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import secrets
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from unified.checkpoint.load import Wanted, tell_of_damage
from unified.checkpoint.location import Place, Writer, joined
from unified.checkpoint.manifest import (
    Checksum,
    Manifest,
    Part,
    check_part,
    check_step,
    encode,
    make_manifest,
    manifest_name,
)
from unified.checkpoint.payload import CHUNK_BYTES, Chunk, Payload
from unified.checkpoint.retention import is_whole
from unified.checkpoint.store import CheckpointStore, Order, describe
from unified.errors import CheckpointCorruptError, CheckpointNotFoundError, UsageError
from unified.extras import needed_by

FILE_NAMES = {"bytes": "data.bin", "state": "state.pt"}


def materialize(store: CheckpointStore, manifest: Manifest, within: Path) -> Path:
    """Make ``checkpoint-<step>`` in a directory: as a whole or not at all, in the place of one that is there.

    Raises:
        CheckpointCorruptError: a part is not what was saved.
    """
    within.mkdir(parents=True, exist_ok=True)
    target = within / f"checkpoint-{manifest.step}"
    making = within / f".checkpoint-{manifest.step}.{secrets.token_hex(4)}"
    making.mkdir()
    try:
        if manifest.kind == "sharded":
            _save_whole(store, manifest, making / FILE_NAMES["state"])
        for part in manifest.parts if manifest.kind != "sharded" else ():
            path = making / (_safe(part.name) if part.name else FILE_NAMES.get(manifest.kind, "data.bin"))
            path.parent.mkdir(parents=True, exist_ok=True)
            if manifest.compression is None:
                _copy(store, part, path)
            else:
                path.write_bytes(store.read(manifest))
        (making / manifest_name(manifest.step)).write_bytes(encode(manifest))
        if target.exists():
            shutil.rmtree(target)
        os.replace(making, target)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return target


def _save_whole(store: CheckpointStore, manifest: Manifest, path: Path) -> None:
    import torch

    from unified.checkpoint.sharded.load import whole_state

    torch.save(whole_state(store, manifest, map_location="cpu", weights_only=True), path)


def _copy(store: CheckpointStore, part: Part, path: Path) -> None:
    checksum = Checksum()
    try:
        with store.backend.open_read(store.key(part.key)) as source, path.open("wb") as file:
            while chunk := source.read(CHUNK_BYTES):
                checksum.update(chunk)
                file.write(chunk)
    except FileNotFoundError as error:
        raise CheckpointCorruptError(f"{part.key} is gone") from error
    check_part(part, checksum.nbytes, checksum.text)


def _safe(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise CheckpointCorruptError(f"the manifest names a file {name!r}, which would be outside of its directory")
    return path


CONFIG_NAME = "run.json"


class FilePayload:
    """A file that is saved as it is when it is read; see `unified.checkpoint.payload.Payload`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.nbytes = path.stat().st_size

    def chunks(self) -> Iterator[Chunk]:
        with self._path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk

    def release(self) -> None:
        """Nothing is held."""


class RunFiles(ABC):
    """The part of `CheckpointManager` that the training service uses. These calls return when all is stored.

    Args:
        place: where everything is.
        writer: who writes here.
        is_run: checkpoints are in ``checkpoints/`` under the prefix, beside ``logs/`` and ``config/``.
    """

    def __init__(self, place: Place, writer: Writer, *, is_run: bool) -> None:
        self.root = place.prefix
        within = "checkpoints" if is_run else ""
        self.store = CheckpointStore(
            place.storage, joined(place.prefix, within), writer, place=joined(place.text, within)
        )

    def save_checkpoint(
        self,
        step: int,
        metadata: Mapping[str, Any] | None = None,
        *,
        directory: str | os.PathLike[str] | None = None,
    ) -> Manifest:
        """Record that there is a checkpoint of `step`: ``step-000001.json`` and, if given, the files of a directory.

        Args:
            metadata: kept in the manifest; plain numbers, text, lists and dicts.
            directory: whose files belong to the checkpoint. `materialize_checkpoint` brings them back.

        Raises:
            UsageError: metadata that JSON cannot say, or a directory that is none or empty.
            CheckpointExistsError: another run writes the same step here.
            OSError: the storage does not take it.
        """
        metadata = checked_metadata(check_step(step), metadata)
        payloads: dict[str, Payload] = {}
        if directory is not None:
            payloads = {name: FilePayload(path) for name, path in files_of(Path(directory)).items()}
            if not payloads:
                raise UsageError(f"There are no files in {os.fspath(directory)}, so nothing was saved as step {step}.")
        manifest = self.store.write(
            Order(
                step=int(step),
                token=secrets.token_hex(6),
                payloads=payloads,
                kind="files" if payloads else "metadata",
                metadata=metadata,
            )
        )
        self._after_save(manifest)
        return manifest

    def checkpoint(self, step: int) -> Manifest:
        """What is known of one checkpoint.

        Raises:
            CheckpointNotFoundError: there is none of that step.
            CheckpointCorruptError: its manifest cannot be read.
        """
        self._before_load()
        return self.store.manifest(check_step(step))

    def latest_checkpoint(self) -> Manifest | None:
        """The newest checkpoint that looks whole: readable, its parts there in full size. None: there is none."""
        self._before_load()
        sizes = {each.key: each.size_bytes for each in self.store.stored()}
        skipped: list[tuple[int, str]] = []
        for step in self.store.steps()[::-1]:
            try:
                manifest = self.store.manifest(step)
            except CheckpointNotFoundError:
                continue
            except CheckpointCorruptError as error:
                skipped.append((step, str(error)))
                continue
            if not is_whole(manifest, sizes):
                skipped.append((step, "parts of it are gone or cut short"))
                continue
            if skipped:
                tell_of_damage(self.store, skipped, f"The latest that is whole is that of step {step}.")
            return manifest
        if skipped:
            tell_of_damage(self.store, skipped, "There is none before.")
        return None

    @needed_by("CheckpointManager.materialize_checkpoint()")
    def materialize_checkpoint(
        self, checkpoint: Manifest | Wanted = None, directory: str | os.PathLike[str] | None = None
    ) -> Path:
        """Bring a checkpoint to the local disk.

        Args:
            checkpoint: as `latest_checkpoint` gives it, or a step; None: the latest that is whole.
            directory: where to make ``checkpoint-<step>``; by default a new temporary one, which is the caller's.

        Returns:
            The directory of the checkpoint: its files, or ``data.bin`` or ``state.pt``, and its manifest. It is there
            as a whole or not at all; one that is there already is replaced.

        Raises:
            CheckpointNotFoundError: there is none.
            CheckpointCorruptError: it is damaged.
        """
        self._before_load()
        if checkpoint is None or checkpoint == "latest":
            checkpoint = self.latest_checkpoint()
            if checkpoint is None:
                raise CheckpointNotFoundError(
                    f"There is no checkpoint in {self.store.place} that is whole: {describe(self.store.steps())}."
                )
        manifest = checkpoint if isinstance(checkpoint, Manifest) else self.store.manifest(check_step(checkpoint))
        within = Path(tempfile.mkdtemp(prefix="unified-checkpoint-") if directory is None else directory)
        try:
            return materialize(self.store, manifest, within)
        except BaseException:
            if directory is None:
                shutil.rmtree(within, ignore_errors=True)
            raise

    def persist_config(self, config: object, name: str = CONFIG_NAME) -> str:
        """Keep the configuration of a run as ``config/run.json``, and make ``logs/``.

        Args:
            config: a mapping, a pydantic or dataclass object, an OmegaConf config, or an argparse namespace. What JSON
                cannot say is kept as text.

        Returns:
            Its key in the storage.
        """
        data = json.dumps(plain(config), indent=2, default=_as_text) + "\n"
        key = joined(self.root, "config", name)
        self.store.backend.write(key, data.encode())
        keep = joined(self.root, "logs", ".keep")
        if not self.store.backend.exists(keep):
            self.store.backend.write(keep, b"")
        return key

    def sync_directory(self, directory: str | os.PathLike[str], name: str | None = None) -> list[str]:
        """Copy the files of a local directory to the run's storage, those alone that changed since the last time.

        Args:
            name: of the directory there, such as ``"logs"``; by default that of `directory`.

        Returns:
            The keys that were written. Files that are gone here stay there.

        Raises:
            UsageError: `directory` is none.
            OSError: a file cannot be read, or the storage does not take it.
        """
        path = Path(directory)
        prefix = joined(self.root, (path.resolve().name if name is None else name).strip("/"))
        backend = self.store.backend
        there = {stat.key: stat for stat in backend.list(f"{prefix}/")}
        written = []
        for relative, file in files_of(path).items():
            key, local, stat = f"{prefix}/{relative}", file.stat(), there.get(f"{prefix}/{relative}")
            if stat is not None and stat.nbytes == local.st_size and stat.modified_at > local.st_mtime:
                continue
            with file.open("rb") as source:
                backend.write(key, source)
            written.append(key)
        return written

    @abstractmethod
    def _after_save(self, manifest: Manifest) -> None:
        """A checkpoint was written."""

    @abstractmethod
    def _before_load(self) -> None:
        """Checkpoints are going to be read."""


def files_of(directory: Path) -> dict[str, Path]:
    """Every file in a directory and those in it, by its relative name with slashes.

    Raises:
        UsageError: it is no directory.
    """
    if not directory.is_dir():
        raise UsageError(f"{directory} is no directory.")
    found = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    return dict(sorted(found.items()))


def checked_metadata(step: int, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """A user's metadata, refused before anything is written if they cannot be kept."""
    if metadata is not None and not isinstance(metadata, Mapping):
        raise UsageError(f"A checkpoint's metadata are a dict, not {type(metadata).__name__}.")
    made = dict(metadata or {})
    encode(make_manifest([], step=step, metadata=made))
    return made


def plain(config: object) -> Any:
    """A configuration as containers."""
    if isinstance(config, argparse.Namespace):
        return vars(config)
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.asdict(config)
    dump: Callable[..., Any] | None = getattr(config, "model_dump", None)
    if dump is not None:
        return dump(mode="json")
    if type(config).__module__.startswith("omegaconf"):
        from omegaconf import OmegaConf

        return OmegaConf.to_container(config, resolve=True)
    if isinstance(config, Mapping):
        return dict(config)
    raise UsageError(f"A configuration is a mapping or an object with fields, not {type(config).__name__}.")


def _as_text(value: object) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset | tuple):
        return sorted(value, key=str)
    return str(value)
