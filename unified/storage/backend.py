"""The interface of a store of named objects."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, BinaryIO, NamedTuple, cast

from unified.errors import AlreadyExistsError, NotFoundError, UsageError
from unified.values import ClosedOnExit

Buffer = bytes | bytearray | memoryview
Source = Buffer | BinaryIO | Iterable[Buffer]
"""Data to be written: one buffer, an open binary file (read from its current position), or a sequence of buffers."""
READ_AHEAD_NBYTES = 1 << 20


class Stat(NamedTuple):
    """Size, time and version of one object when it was looked up."""

    key: str
    nbytes: int
    modified_at: float
    """Seconds since the epoch, by the store's clock."""
    etag: str
    """Entity tag, a new one after each write. Each store has its own format."""


class StorageBackend(ABC, ClosedOnExit):
    """Objects by key. Every method may be called from any thread, and in processes that are forked later.

    A key is made of parts joined by `/`; no part is empty, `.` or `..`. A reader sees only whole objects: a write that
    fails, or whose process is killed, leaves the previous object.

    Methods raise `UsageError` for an invalid key, and these errors:
        NotFoundError: there is no such object (also a FileNotFoundError).
        AlreadyExistsError: with `if_absent`, the object exists already (also a FileExistsError).
        StorageDeniedError: the store refuses this user, or there are no credentials (also a PermissionError).
        StorageFullError: there is no room; the partial write was removed.
        StorageUnavailableError: the store did not answer, not even to retries. A later try may succeed.
        StorageError: any other error.
    """

    @abstractmethod
    def write(self, key: str, data: Source, *, if_absent: bool = False) -> Stat:
        """Make an object of `data`, or replace the existing one. It is durable on return.

        Args:
            if_absent: never replace: of several concurrent writes one succeeds, and the others raise.
        """

    @abstractmethod
    def read_into(self, key: str, buffer: bytearray | memoryview, start: int = 0) -> int:
        """Fill `buffer` with the bytes of one version from `start` on, up to its end; return their number."""

    @abstractmethod
    def list(self, prefix: str = "") -> list[Stat]:
        """Return every object whose key begins with `prefix`, sorted by key. `prefix` need not end at a `/`."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete an object, if there is one."""

    @abstractmethod
    def stat(self, key: str) -> Stat:
        """Return size, time and version of one object."""

    def replace(self, key: str, data: Source, etag: str) -> Stat:
        """Replace the version `etag` of an object: of several concurrent calls one succeeds.

        A store that does not override this method checks and then writes: a write in between is lost.

        Raises:
            AlreadyExistsError: the object has another version by now, or is gone.
        """
        if not self.exists(key) or self.stat(key).etag != etag:
            raise replaced_meanwhile(key)
        return self.write(key, data)

    def read(self, key: str) -> bytes:
        """Read a whole object. For a large one use `read_into`, which needs no second copy."""
        while True:
            before = self.stat(key)
            buffer = bytearray(before.nbytes)
            if self.read_into(key, buffer) == before.nbytes and self.stat(key).etag == before.etag:
                return bytes(buffer)

    def exists(self, key: str) -> bool:
        """Return whether there is such an object."""
        try:
            self.stat(key)
        except NotFoundError:
            return False
        return True

    def open_read(self, key: str) -> BinaryIO:
        """Open an object as a file: seekable, buffered, to be closed by the caller.

        If an object in a bucket is replaced meanwhile, the file may mix bytes of both versions.
        """
        return cast(BinaryIO, io.BufferedReader(_ObjectFile(self, self.stat(key)), READ_AHEAD_NBYTES))

    def close(self) -> None:
        """Close connections and threads. The next use opens them again."""


def check_key(key: str) -> str:
    """Return `key`; raise UsageError if it is invalid or could leave its store."""
    if not key or "\0" in key or any(part in ("", ".", "..") for part in key.split("/")):
        raise UsageError(
            f"{key!r} is no key of a store: use parts joined by '/', such as 'run-1/step-000001.json'; no part may be "
            "empty, '.' or '..', and the key neither begins nor ends with '/'"
        )
    return key


def replaced_meanwhile(key: str) -> AlreadyExistsError:
    return AlreadyExistsError(f"cannot replace {key!r}: another write has changed it meanwhile")


def check_start(start: int) -> None:
    if start < 0:
        raise UsageError(f"invalid start {start}: it may not be negative")


class _ObjectFile(io.RawIOBase):
    """An object of known size, read by ranges."""

    def __init__(self, backend: StorageBackend, stat: Stat) -> None:
        self._backend = backend
        self._stat = stat
        self._position = 0

    @property
    def name(self) -> str:
        return self._stat.key

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._stat.nbytes}[whence]
        if base + offset < 0:
            raise ValueError(f"cannot go to byte {base + offset} of {self._stat.key!r}")
        self._position = base + offset
        return self._position

    def readall(self) -> bytes:
        """Read the rest in one go; the inherited method would ask for it in pieces of a few KiB."""
        rest = bytearray(max(0, self._stat.nbytes - self._position))
        num_read = self.readinto(rest)
        return bytes(memoryview(rest)[:num_read])

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted = min(len(view), max(0, self._stat.nbytes - self._position))
        if wanted == 0:
            return 0
        num_read = self._backend.read_into(self._stat.key, view[:wanted], self._position)
        self._position += num_read
        return num_read
