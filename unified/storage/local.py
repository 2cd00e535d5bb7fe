"""The local backend: objects as files below a folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from unified.errors import (
    AlreadyExistsError,
    NotFoundError,
    StorageDeniedError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
)
from unified.storage.backend import Source, Stat, StorageBackend, check_key, check_start, replaced_meanwhile
from unified.storage.blocks import pieces_of, write_pieces

PREFIX = ".unified-"
SUFFIX = ".part"
SAFE_AGE_S = 60.0
"""Age at which an unlocked temporary file is an orphan: a writer locks its file right after making it."""
NUM_TRIES = 10
"""Number of tries to make a folder and a file in it before a delete removes the empty folder."""


class LocalBackend(StorageBackend):
    """Objects as files below `root`: the key `a/b` is the file `<root>/a/b`.

    Works on any POSIX file system with rename and hard links, also a shared one. Links to files and folders are
    followed. A write first goes to a hidden file in the same folder, which no listing shows. If the process is killed
    then, the next writer to that folder removes the file.

    Args:
        root: the folder; made at the first write if it is not there.
        fsync: a write or a delete has reached the disk when it returns. Without it, a crash of the machine (not of the
            process) may undo it.
        is_private: only this user may read the files and enter the folders that are made; else the umask decides.
    """

    def __init__(self, root: str | os.PathLike[str], *, fsync: bool = True, is_private: bool = False) -> None:
        self.root = Path(os.path.abspath(os.path.expanduser(root)))
        self._fsync = fsync
        self._file_mode, self._folder_mode = (0o600, 0o700) if is_private else (0o666, 0o777)
        self._swept: set[Path] = set()

    def __repr__(self) -> str:
        return f"LocalBackend({str(self.root)!r})"

    def write(self, key: str, data: Source, *, if_absent: bool = False) -> Stat:
        path = self._path(key)
        with _errors(key, path, "write"):
            if if_absent and path.exists():  # an early answer; the link below decides
                raise FileExistsError(errno.EEXIST, "it is there", str(path))

        def put(temporary: Path, path: Path) -> None:
            if if_absent:
                os.link(temporary, path)
                os.unlink(temporary)
            else:
                os.rename(temporary, path)

        return self._write(key, data, put)

    def replace(self, key: str, data: Source, etag: str) -> Stat:
        """See `StorageBackend`. On a file system without locks, a write between check and rename is lost."""

        def put(temporary: Path, path: Path) -> None:
            with _locked(path.parent):
                if not self.exists(key) or self.stat(key).etag != etag:
                    raise replaced_meanwhile(key)
                os.rename(temporary, path)

        return self._write(key, data, put)

    def _write(self, key: str, data: Source, put: Callable[[Path, Path], None]) -> Stat:
        """Write a temporary file beside the object's; `put` moves it into place."""
        path = self._path(key)
        with _errors(key, path, "write"):
            temporary, descriptor = self._open_temporary(path)
            try:
                with os.fdopen(descriptor, "wb", buffering=0) as file:
                    write_pieces(file.fileno(), pieces_of(data))
                    if self._fsync:
                        os.fsync(file.fileno())
                    put(temporary, path)
                    # From the descriptor: another write may have replaced the path since.
                    stat = _stat(key, os.fstat(file.fileno()))
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            self._sync_folder(path.parent)
            return stat

    def read(self, key: str) -> bytes:
        with self._open(key) as file:
            return file.read()

    def read_into(self, key: str, buffer: bytearray | memoryview, start: int = 0) -> int:
        view = memoryview(buffer).cast("B")
        check_start(start)
        with self._open(key) as file:
            file.seek(start)
            num_read = 0
            while num_read < len(view) and (count := file.readinto(view[num_read:])):  # type: ignore[attr-defined]
                num_read += count
            return num_read

    def open_read(self, key: str) -> BinaryIO:
        path = self._path(key)
        with _errors(key, path, "read"):
            return open(path, "rb")

    def list(self, prefix: str = "") -> list[Stat]:
        folder = prefix.rpartition("/")[0]
        if folder:
            check_key(folder)
        with _errors(prefix, self.root / folder, "list"):
            # By bytes, as S3 sorts.
            return sorted(self._walk(folder, prefix, frozenset()), key=lambda stat: os.fsencode(stat.key))

    def delete(self, key: str) -> None:
        """Delete an object, and folders that it leaves empty, up to the root."""
        path = self._path(key)
        with _errors(key, path, "delete"):
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                return
            folder = path.parent
            while folder != self.root:
                try:
                    folder.rmdir()
                except OSError:  # not empty, or a writer was faster
                    break
                folder = folder.parent
            self._sync_folder(folder)

    def stat(self, key: str) -> Stat:
        path = self._path(key)
        with _errors(key, path, "stat"):
            found = path.stat()
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "a folder", str(path))
            return _stat(key, found)

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    @contextlib.contextmanager
    def _open(self, key: str) -> Iterator[BinaryIO]:
        path = self._path(key)
        with _errors(key, path, "read"), open(path, "rb", buffering=0) as file:
            yield file

    def _open_temporary(self, path: Path) -> tuple[Path, int]:
        """Make a hidden file beside `path`, locked until its writer ends."""
        for tries_left in reversed(range(NUM_TRIES)):
            self._make_folder(path.parent)
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "a folder", str(path))
            if path.parent not in self._swept:
                self._swept.add(path.parent)
                _remove_orphans(path.parent)
            temporary = path.parent / temporary_name(secrets.token_hex(8))
            try:
                descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, self._file_mode)
            except FileNotFoundError:  # a delete removed the empty folder meanwhile
                if not tries_left:
                    raise
                continue
            # Some file systems have no locks: there, orphans stay (see `_remove_orphans`).
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return temporary, descriptor
        raise AssertionError("unreachable")

    def _make_folder(self, folder: Path) -> None:
        missing = []
        while not folder.is_dir():
            missing.append(folder)
            if folder == folder.parent:
                break
            folder = folder.parent
        for each in reversed(missing):
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                each.mkdir(self._folder_mode)
            # If the entry of a new folder is not durable, every file in it may be lost.
            self._sync_folder(each.parent)

    def _sync_folder(self, folder: Path) -> None:
        if not self._fsync:
            return
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # a delete removed it
            return
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # this file system cannot sync folders
                raise
        finally:
            os.close(descriptor)

    def _walk(self, folder: str, prefix: str, above: frozenset[tuple[int, int]]) -> Iterator[Stat]:
        try:
            here = os.stat(self.root / folder)
            identity = (here.st_dev, here.st_ino)
            if identity in above:  # a link to a folder above
                return
            entries = [*os.scandir(self.root / folder)]
        except (FileNotFoundError, NotADirectoryError):  # not there, or gone meanwhile
            return
        for entry in entries:
            key = f"{folder}/{entry.name}" if folder else entry.name
            if is_temporary(entry.name) or not (key.startswith(prefix) or prefix.startswith(f"{key}/")):
                continue
            if entry.is_dir():
                yield from self._walk(key, prefix, above | {identity})
                continue
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile, or a link to nothing
                if entry.is_file():
                    yield _stat(key, entry.stat())


def _stat(key: str, found: os.stat_result) -> Stat:
    etag = f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"
    return Stat(key, found.st_size, found.st_mtime_ns / 1e9, etag)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one writer at a time replace files in a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _first_missing(folder: Path) -> Path:
    while folder != folder.parent and not os.path.exists(folder.parent):
        folder = folder.parent
    return folder


@contextlib.contextmanager
def _errors(key: str, path: Path, action: str) -> Iterator[None]:
    """Turn each OSError into a StorageError."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise _store_error(error, f"cannot {action} {key!r}", path, action) from error


def _store_error(error: OSError, what: str, path: Path, action: str) -> StorageError:
    reason = error.strerror or str(error)
    match error.errno:
        case errno.ENOENT if action == "write":
            missing = _first_missing(path.parent)
            return NotFoundError(f"{what}: there is no folder {missing}, and it cannot be made")
        case errno.ENOENT:
            return NotFoundError(f"{what}: there is no {path}")
        case errno.EEXIST:
            return AlreadyExistsError(f"{what}: there is a {path} already")
        case errno.EISDIR:
            return NotFoundError(f"{what}: {path} is a folder, not a file")
        case errno.ENOTDIR:
            kind = NotFoundError if action in ("read", "stat") else StorageError
            return kind(f"{what}: a part of {path} is a file, not a folder")
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return StorageDeniedError(f"{what}: {path}: {reason}; check its owner and mode, and those of its folder")
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return StorageFullError(f"{what}: {path}: {reason}; nothing was changed. Make room, or store less")
        case errno.ESTALE | errno.ETIMEDOUT | errno.EHOSTDOWN | errno.ENOTCONN:
            return StorageUnavailableError(f"{what}: {path}: {reason}; is it mounted?")
        case _:
            return StorageError(f"{what}: {path}: {reason}")


def temporary_name(token: str) -> str:
    """Return the name of a file that is being written; `token` is chosen at random."""
    return f"{PREFIX}{token}{SUFFIX}"


def is_temporary(name: str) -> bool:
    return name.startswith(PREFIX) and name.endswith(SUFFIX)


def _remove_orphans(folder: Path) -> None:
    """Remove temporary files of killed writers; others stay hidden."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if is_temporary(name) and _is_orphan(folder / name):
                with contextlib.suppress(OSError):
                    os.unlink(folder / name)


def _is_orphan(path: Path) -> bool:
    try:
        # Open for writing: NFS requires it for an exclusive lock.
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if time.time() - os.fstat(descriptor).st_mtime < SAFE_AGE_S:
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # a writer holds the lock, or this file system has no locks
        return False
    finally:
        os.close(descriptor)
    return True
