"""From what a user writes to a storage and a key prefix in it."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, NamedTuple

from unified.errors import UsageError

if TYPE_CHECKING:
    from unified.storage.backend import StorageBackend

_NAME = re.compile(r"[A-Za-z0-9][\w.=+@-]*")


class Place(NamedTuple):
    """Where a manager keeps its objects."""

    storage: StorageBackend
    prefix: str
    """Of its keys there, without a slash at the end."""
    text: str
    """For people."""
    is_own: bool
    """The storage was opened here, and is to be closed."""


def open_place(
    storage_path: str | os.PathLike[str],
    backend: str | StorageBackend,
    bucket: str | None,
    run_id: str | None,
    framework: str | None,
) -> Place:
    """Open the storage of a manager.

    Raises:
        UsageError: a backend, a bucket or a name of a run that cannot be.
    """
    path = os.fspath(storage_path)
    within = run_prefix(run_id, framework)
    if not isinstance(backend, str):
        prefix = joined(path.strip("/"), within)
        return Place(backend, prefix, joined(repr(backend), prefix), False)
    from unified.storage import LocalBackend, open_storage

    if backend not in ("local", "s3"):
        raise UsageError(f"There is no storage backend {backend!r}; there are 'local' and 's3'.")
    if backend == "local" and not path.startswith("s3://"):
        # Not by `open_storage`, which would take a name with brackets for a pattern.
        path = path.removeprefix("file://")
        if not path or os.path.isfile(path):
            raise UsageError(f"Checkpoints are kept in a directory, and {path!r} is none.")
        local = LocalBackend(path)
        return Place(local, within, joined(str(local.root), within), True)
    region = None
    if not path.startswith("s3://"):
        if not bucket:
            from unified.runtime_settings import RuntimeSettings

            settings = RuntimeSettings.load_shared().storage
            bucket, region = settings.bucket, settings.region or None
        if not bucket:
            raise UsageError(
                f"The S3 path {path!r} names no bucket. Write s3://BUCKET/PREFIX, give bucket=, or set "
                "UNIFIED_STORAGE_BUCKET or [storage] bucket of the settings."
            )
        path = f"s3://{bucket}/{path.strip('/')}"
    storage, prefix = open_storage(path, region=region)
    return Place(storage, joined(prefix.strip("/"), within), joined(path.rstrip("/"), within), True)


def run_prefix(run_id: str | None, framework: str | None) -> str:
    """``RUN_ID/framework=FRAMEWORK``, or nothing.

    Raises:
        UsageError: one without the other, or a name that would lead elsewhere.
    """
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
    """Parts of a key, without the empty ones."""
    return "/".join(part for part in parts if part)
