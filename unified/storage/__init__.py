"""Named objects on a local file system or an S3 store, written whole or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unified.lazy import exports

if TYPE_CHECKING:
    from unified.storage.backend import Buffer, Source, Stat, StorageBackend
    from unified.storage.local import LocalBackend
    from unified.storage.location import open_storage
    from unified.storage.s3 import S3Backend

__all__ = ["Buffer", "LocalBackend", "S3Backend", "Source", "Stat", "StorageBackend", "open_storage"]

__getattr__, __dir__ = exports(
    __name__,
    {
        "unified.storage.backend": ["Buffer", "Source", "Stat", "StorageBackend"],
        "unified.storage.local": ["LocalBackend"],
        "unified.storage.location": ["open_storage"],
        "unified.storage.s3": ["S3Backend"],
    },
)
