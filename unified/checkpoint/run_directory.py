"""The directory of a run: its configuration, its logs, and files of checkpoints to and from the local disk."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from unified.checkpoint.location import joined
from unified.checkpoint.manifest import Checksum, Manifest, Part, check_part, encode, manifest_name
from unified.checkpoint.payload import CHUNK_BYTES, Chunk, Payload
from unified.checkpoint.store import CheckpointStore
from unified.errors import CheckpointCorruptError, UsageError

CONFIG_NAME = "run.json"
FILE_NAMES = {"bytes": "data.bin", "state": "state.pt"}


class FilePayload:
    """A file, saved with its contents at the time of reading; see `unified.checkpoint.payload.Payload`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.nbytes = path.stat().st_size

    def chunks(self) -> Iterator[Chunk]:
        with self._path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk

    def release(self) -> None:
        """Do nothing: no memory is held."""


class RunDirectory:
    """The part of a storage that the training service uses beside the data of checkpoints."""

    def __init__(self, store: CheckpointStore, root: str) -> None:
        self.root = root
        self._store = store
        self._backend = store.backend

    def materialize(self, manifest: Manifest, directory: str | os.PathLike[str] | None) -> Path:
        """Make ``checkpoint-<step>`` in a directory, whole or not at all; replace an existing one.

        Args:
            directory: None: a new temporary one.
        """
        within = Path(tempfile.mkdtemp(prefix="unified-checkpoint-") if directory is None else directory)
        within.mkdir(parents=True, exist_ok=True)
        target = within / f"checkpoint-{manifest.step}"
        making = within / f".checkpoint-{manifest.step}.{secrets.token_hex(4)}"
        making.mkdir()
        try:
            self._fill(making, manifest)
            (making / manifest_name(manifest.step)).write_bytes(encode(manifest))
            if target.exists():
                shutil.rmtree(target)
            os.replace(making, target)
        except BaseException:
            shutil.rmtree(making if directory is not None else within, ignore_errors=True)
            raise
        return target

    def persist_config(self, config: object, name: str) -> str:
        """Keep a configuration in ``config/``, and make ``logs/``; return the configuration's key."""
        data = json.dumps(plain(config), indent=2, default=_as_text) + "\n"
        key = joined(self.root, "config", name)
        self._backend.write(key, data.encode())
        keep = joined(self.root, "logs", ".keep")
        if not self._backend.exists(keep):
            self._backend.write(keep, b"")
        return key

    def sync(self, directory: str | os.PathLike[str], name: str | None) -> list[str]:
        """Copy the files of a local directory that changed since the last time; return their keys."""
        path = Path(directory)
        prefix = joined(self.root, (path.resolve().name if name is None else name).strip("/"))
        there = {stat.key: stat for stat in self._backend.list(f"{prefix}/")}
        written = []
        for relative, file in files_of(path).items():
            key, local, stat = f"{prefix}/{relative}", file.stat(), there.get(f"{prefix}/{relative}")
            if stat is not None and stat.nbytes == local.st_size and stat.modified_at > local.st_mtime:
                continue
            with file.open("rb") as source:
                self._backend.write(key, source)
            written.append(key)
        return written

    def _fill(self, directory: Path, manifest: Manifest) -> None:
        if manifest.kind == "sharded":
            import torch

            from unified.checkpoint.sharded.load import whole_state

            state = whole_state(self._store, manifest, map_location="cpu", weights_only=True)
            torch.save(state, directory / FILE_NAMES["state"])
            return
        for part in manifest.parts:
            path = directory / (_safe(part.name) if part.name else FILE_NAMES.get(manifest.kind, "data.bin"))
            path.parent.mkdir(parents=True, exist_ok=True)
            if manifest.compression is None:
                self._copy(part, path)
            else:
                path.write_bytes(self._store.read(manifest))

    def _copy(self, part: Part, path: Path) -> None:
        checksum = Checksum(part.checksum)
        try:
            with self._backend.open_read(self._store.key(part.key)) as source, path.open("wb") as file:
                while chunk := source.read(CHUNK_BYTES):
                    checksum.update(chunk)
                    file.write(chunk)
        except FileNotFoundError as error:
            raise CheckpointCorruptError(f"{part.key} is gone") from error
        check_part(part, checksum.nbytes, checksum.text)


def file_payloads(directory: str | os.PathLike[str], step: int) -> dict[str, Payload]:
    """Return the files of a directory as the parts of a checkpoint."""
    found: dict[str, Payload] = {name: FilePayload(path) for name, path in files_of(Path(directory)).items()}
    if not found:
        raise UsageError(f"There are no files in {os.fspath(directory)}, so nothing was saved as step {step}.")
    return found


def files_of(directory: Path) -> dict[str, Path]:
    """Return every file below a directory, by its relative path with slashes."""
    if not directory.is_dir():
        raise UsageError(f"{directory} is no directory.")
    found = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    return dict(sorted(found.items()))


def plain(config: object) -> Any:
    """Return a configuration as containers."""
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


def _safe(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise CheckpointCorruptError(f"the manifest names a file {name!r}, which would be outside of its directory")
    return path
