"""A stored checkpoint as a directory on the local disk."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path, PurePosixPath

from unified.checkpoint.manifest import Checksum, Manifest, Part, check_part, encode, manifest_name
from unified.checkpoint.payload import CHUNK_BYTES
from unified.checkpoint.store import CheckpointStore
from unified.errors import CheckpointCorruptError

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
