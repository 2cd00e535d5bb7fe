"""Named objects on a local file system or an S3 store, written whole or not at all."""

from typing import TYPE_CHECKING

from unified import lazy

if TYPE_CHECKING:
    from unified.storage.backend import Buffer as Buffer
    from unified.storage.backend import Source as Source
    from unified.storage.backend import Stat as Stat
    from unified.storage.backend import StorageBackend as StorageBackend
    from unified.storage.local import LocalBackend as LocalBackend
    from unified.storage.location import open_storage as open_storage
    from unified.storage.s3 import S3Backend as S3Backend

__getattr__, __dir__ = lazy.exports(__name__)
