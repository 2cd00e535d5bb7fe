"""Locations: from a path or an address to a store and a key prefix in it."""

from __future__ import annotations

import glob
import os
import re
from typing import TYPE_CHECKING

from unified.errors import UsageError
from unified.storage.backend import check_key
from unified.storage.local import LocalBackend

if TYPE_CHECKING:
    from unified.storage.backend import StorageBackend


def open_storage(
    path: str | os.PathLike[str],
    *,
    region: str | None = None,
    endpoint_url: str | None = None,
    is_private: bool = False,
) -> tuple[StorageBackend, str]:
    """Return the store of a path, and the key or key prefix of the path in that store.

    ====================== ============================= ==================
    path                   store                         key prefix
    ====================== ============================= ==================
    ``s3://bucket/a/b``    ``S3Backend("bucket")``       ``a/b``
    ``/data`` (or nothing) ``LocalBackend("/data")``     nothing
    ``/data/a.csv`` (file) ``LocalBackend("/data")``     ``a.csv``
    ``/data/a/*.csv``      ``LocalBackend("/data/a")``   ``*.csv``
    ====================== ============================= ==================

    A slash at the end is ignored. A local path may begin with ``file://``, and `~` is the home folder.

    Args:
        region: of an S3 bucket; by default from the environment or the user's AWS configuration.
        endpoint_url: of an S3 store other than Amazon's; by default from the same sources.
        is_private: for a local store; see `LocalBackend`.

    Raises:
        UsageError: no path, no bucket, an unknown kind of store, or a key with an empty part (``s3://bucket/a//b``).
    """
    text = os.fspath(path)
    scheme, separator, rest = text.partition("://")
    if not separator:
        rest = text
    elif scheme == "s3":
        from unified.storage.s3 import S3Backend

        bucket, _, key = rest.partition("/")
        prefix = check_key(key.strip("/")) if key.strip("/") else ""  # now, and not at the first write
        return S3Backend(bucket, region, endpoint_url=endpoint_url), prefix
    elif scheme != "file":
        raise UsageError(
            f"{text!r} names an unknown kind of store: give a local path, file:///path or s3://bucket/path"
        )
    if not rest:
        raise UsageError("an empty path is in no store: give a local path or s3://bucket/path")
    local = os.path.abspath(os.path.expanduser(rest))
    if os.path.isdir(local):
        return LocalBackend(local, is_private=is_private), ""
    if os.path.exists(local):
        folder, name = os.path.split(local)
        return LocalBackend(folder, is_private=is_private), name
    if glob.has_magic(local):
        folder = re.split(r"[*?[]", local, maxsplit=1)[0].rpartition("/")[0]
        return LocalBackend(folder or "/", is_private=is_private), local[len(folder) + 1 :]
    return LocalBackend(local, is_private=is_private), ""
