"""Locations: from a path that a user writes to a storage and a key prefix in it, and who writes there."""

from __future__ import annotations

import os
import re
import secrets
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from unified.checkpoint.manifest import Manifest
from unified.coordinator.worker_identity import check_rank, discover
from unified.errors import UsageError
from unified.values import Value

if TYPE_CHECKING:
    from unified.checkpoint.options import CheckpointOptions
    from unified.config.runtime import StorageSettings
    from unified.storage.backend import StorageBackend

_NAME = re.compile(r"[A-Za-z0-9][\w.=+@-]*")

Resolution = Literal["write", "leave", "refuse"]


class CheckpointLocation(NamedTuple):
    """The storage of a manager, and the place of its objects there."""

    storage: StorageBackend
    prefix: str
    """Prefix of its keys there, without a slash at the end."""
    text: str
    """The place in words."""
    is_own: bool
    """The storage was opened here, and is to be closed."""
    is_local: bool
    """The storage is a directory."""


class WriterIdentity(Value, frozen=True, kw_only=True):
    """One incarnation of a manager, as manifests name it."""

    name: str
    """Host, process and a random word: no other incarnation has it."""
    rank: int = 0
    world_size: int = 1


def open_location(
    storage_path: str | os.PathLike[str],
    backend: str | StorageBackend | None,
    options: CheckpointOptions,
    settings: StorageSettings,
) -> CheckpointLocation:
    """Open the storage of a manager. `settings` stand in for a backend or bucket that is not given."""
    from unified.storage.backend import check_key
    from unified.storage.local import LocalBackend
    from unified.storage.location import open_storage

    path = os.fspath(storage_path)
    within = run_prefix(options["run_id"], options["framework"])
    backend = settings.backend if backend is None else backend
    if not isinstance(backend, str):
        prefix = joined(check_key(path.strip("/")) if path.strip("/") else "", within)
        is_local = isinstance(backend, LocalBackend)
        return CheckpointLocation(backend, prefix, joined(repr(backend), prefix), False, is_local)
    if backend not in ("local", "s3"):
        raise UsageError(f"There is no storage backend {backend!r}; there are 'local' and 's3'.")
    if backend == "local" and not path.startswith("s3://"):
        # Not with `open_storage`: it would read a name with brackets as a pattern.
        path = path.removeprefix("file://")
        _check_no_address(path)
        if not path:
            raise UsageError("Checkpoints are kept in a directory, and '' is none.")
        local = LocalBackend(path)
        _check_can_be_made(local.root)
        return CheckpointLocation(local, within, joined(str(local.root), within), True, True)
    if not path.startswith("s3://"):
        _check_no_address(path)
        bucket = options["bucket"] or settings.bucket
        if not bucket:
            raise UsageError(
                f"The S3 path {path!r} names no bucket. Write s3://BUCKET/PREFIX, give bucket=, or set "
                "UNIFIED_STORAGE_BUCKET or [storage] bucket of the settings."
            )
        path = f"s3://{bucket}/{path.strip('/')}"
    storage, prefix = open_storage(path, region=settings.region or None)
    prefix = joined(prefix.strip("/"), within)
    return CheckpointLocation(storage, prefix, joined(path.rstrip("/"), within), True, False)


def run_prefix(run_id: str | None, framework: str | None) -> str:
    """Return ``RUN_ID/framework=FRAMEWORK``, or nothing."""
    if run_id is None and framework is None:
        return ""
    if run_id is None or framework is None:
        raise UsageError("run_id and framework are given together, or neither is.")
    for what, name in (("run_id", run_id), ("framework", framework)):
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{what} is a name of letters, digits and . _ = + @ - that begins with a letter or digit, not {name!r}."
            )
    return f"{run_id}/framework={framework}"


def joined(*parts: str) -> str:
    """Join the parts that are not empty to a key."""
    return "/".join(part for part in parts if part)


def this_writer(rank: int | None, world_size: int | None) -> WriterIdentity:
    """Return a new incarnation of a manager in this process.

    Rank and world size that are not given are those of the job, else of ``RANK`` and ``WORLD_SIZE``, else 0 and 1.
    """
    identity = discover()
    rank = next(each for each in (rank, identity.rank, 0) if each is not None)
    world_size = next(each for each in (world_size, identity.world_size, 1) if each is not None)
    check_rank(rank, world_size)
    name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
    return WriterIdentity(name=name, rank=rank, world_size=world_size)


def resolve(existing: Manifest | None, writer: WriterIdentity, *, is_older: bool) -> Resolution:
    """Return what a writer does with a step that may be there already. Pure.

    A run that went back to an older checkpoint saves the later steps again. They replace the checkpoints of this and of
    earlier incarnations. Data-parallel ranks that save the same step have the same state: the first checkpoint stays.
    Any other writer is another run at the same place.

    Args:
        is_older: `existing` was there when the writer first looked. Clocks of two hosts may differ, so none decides.
    """
    if existing is None or existing.writer == writer.name or is_older:
        return "write"
    if existing.world_size == writer.world_size > 1 and existing.rank != writer.rank:
        return "leave"
    return "refuse"


def _check_no_address(path: str) -> None:
    if "://" in path:
        raise UsageError(
            f"Checkpoints are kept in a directory or a bucket (s3://BUCKET/PREFIX), and {path!r} is neither."
        )


def _check_can_be_made(root: Path) -> None:
    """Raise UsageError if `root` is no directory and cannot be made; an existing directory may be read-only."""
    above = next(folder for folder in (root, *root.parents) if os.path.exists(folder))
    if not above.is_dir():
        raise UsageError(f"Checkpoints are kept in a directory, and {str(above)!r} is none.")
    if above != root:
        try:
            os.rmdir(tempfile.mkdtemp(prefix=".unified-", dir=above))
        except OSError as error:
            raise UsageError(
                f"Checkpoints cannot be kept in {root}, which is not there: no folder can be made in {above} "
                f"({error.strerror})."
            ) from error
