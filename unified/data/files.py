"""Finds the files of a dataset, and opens them: here, or in an S3 bucket."""

from __future__ import annotations

import glob
import gzip
import os
import re
import threading
from array import array
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, cast

from unified.config.runtime import RuntimeSettings
from unified.errors import DataFileNotFoundError, DatasetError, UsageError, nearest
from unified.values import ClosedOnExit

if TYPE_CHECKING:
    from unified.storage.backend import StorageBackend

Order = Literal["natural", "lexical"]
SUFFIXES = {
    "parquet": (".parquet", ".pq"),
    "csv": (".csv",),
    "tfrecord": (".tfrecord", ".tfrecords"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "arrow": (".arrow", ".feather", ".ipc"),
    "orc": (".orc",),
}
"""Suffixes of the files of each format that are taken from a directory. Those of csv, tfrecord and jsonl may be
followed by ``.gz``."""
_COMPRESSED = ".gz"
_NUMBERED = re.compile(r"-\d+-of-\d+$")  # name.tfrecord-00003-of-00016


class RowOffsetIndex:
    """Byte offsets of every `every`-th row, added while rows are read in order.

    A reader that looks for a row begins at the last indexed row before it, not at the file's first byte. So all shards
    of a file are read in one pass over the file, not in one pass per shard.
    """

    def __init__(self, every: int = 256) -> None:
        self._every = every
        self._offsets = array("Q")

    def note(self, row: int, offset: int) -> None:
        """Add that `row` begins at byte `offset`. A row that is not the next one to be indexed is ignored."""
        if row == len(self._offsets) * self._every:
            self._offsets.append(offset)

    def before(self, row: int, first: int = 0) -> tuple[int, int]:
        """Return the last indexed row that is not after `row`, and its offset. Without one: row 0 at offset `first`."""
        index = min(row // self._every, len(self._offsets) - 1)
        return (index * self._every, self._offsets[index]) if index >= 0 else (0, first)


class DataFile:
    """One file of a dataset, which can be opened again and again.

    Attributes:
        path: absolute, or ``s3://bucket/key``.
        row_offsets: the begin of some of its rows, as far as it was read.
        notes: facts that a format found out about the file and needs again.
    """

    def __init__(self, path: str, files: DataFiles) -> None:
        self.path = path
        self.row_offsets = RowOffsetIndex()
        self.notes: dict[str, Any] = {}
        self._files = files

    @property
    def is_mappable(self) -> bool:
        return not is_remote(self.path) and not self.path.endswith(_COMPRESSED)

    def open(self) -> BinaryIO:
        """Open the file for reading and seeking; a ``.gz`` is decompressed."""
        raw = self._files.open(self.path)
        return cast(BinaryIO, _DecompressedFile(raw)) if self.path.endswith(_COMPRESSED) else raw


class _DecompressedFile(gzip.GzipFile):
    """A decompressing file that closes the compressed file under it."""

    def __init__(self, packed: BinaryIO) -> None:
        super().__init__(fileobj=packed, mode="rb")
        self._packed = packed

    def close(self) -> None:
        super().close()
        self._packed.close()


class DataFiles(ClosedOnExit):
    """Finds and opens files. Each bucket has one connection, made at first use. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets: dict[str, StorageBackend] = {}

    def close(self) -> None:
        """End the connections. A later `open` makes new ones."""
        with self._lock:
            buckets = list(self._buckets.values())
            self._buckets.clear()
        for backend in buckets:
            backend.close()

    def find(self, path: str, format: str, order: Order = "natural") -> list[str]:  # noqa: A002
        """Find the files of a dataset.

        Args:
            path: a file, a directory or a glob; on this host or as ``s3://bucket/…``. A directory means all files in
                and below it with a suffix of the format, without files and folders whose names begin with ``.`` or
                ``_``. A glob means all files that match, with any suffix; ``**`` is any number of folders.
            order: the order of the files, and so of the samples: ``"natural"`` sorts ``part-2`` before ``part-10``,
                ``"lexical"`` sorts by code points.

        Returns:
            Absolute paths, or ``s3://`` addresses.

        Raises:
            DataFileNotFoundError: there is no file, or none of that format.
            UsageError: there is no such format or order.
        """
        check_format(format)
        if order not in ("natural", "lexical"):
            raise UsageError(f"files are in 'natural' or 'lexical' order, not {order!r}.")
        path = absolute(path)
        found = self._in_bucket(path, format) if is_remote(path) else _here(path, format)
        return sorted(found, key=natural_key if order == "natural" else None)

    def open(self, path: str) -> BinaryIO:
        if not is_remote(path):
            return open(path, "rb")
        backend, key = self._bucket(path)
        return backend.open_read(key)

    def file(self, path: str) -> DataFile:
        """Return a file in the form that formats read."""
        return DataFile(path, self)

    def _bucket(self, path: str) -> tuple[StorageBackend, str]:
        from unified.storage import open_storage

        bucket, _, key = path.removeprefix("s3://").partition("/")
        if not bucket:
            raise UsageError(f"{path!r} names no bucket: write s3://bucket/path.")
        with self._lock:
            if bucket not in self._buckets:
                region = RuntimeSettings.load_shared().storage.region
                self._buckets[bucket] = open_storage(f"s3://{bucket}", region=region or None)[0]
            return self._buckets[bucket], key

    def _in_bucket(self, path: str, format: str) -> list[str]:  # noqa: A002
        backend, key = self._bucket(path)
        bucket = path[: len(path) - len(key)].rstrip("/")

        def keys(prefix: str) -> list[str]:
            return [stat.key for stat in backend.list(prefix) if not stat.key.endswith("/")]

        if key and not key.endswith("/") and backend.exists(key):
            names = [key]
        elif glob.has_magic(key):
            fixed = re.split(r"[*?[]", key, maxsplit=1)[0].rpartition("/")[0]
            pattern = key.split("/")
            names = [each for each in keys(fixed and f"{fixed}/") if matches(each.split("/"), pattern)]
            if not names:
                raise DataFileNotFoundError(_no_match(path))
        else:
            folder = key.rstrip("/") and f"{key.rstrip('/')}/"
            within = keys(folder)
            if not within:
                raise DataFileNotFoundError(
                    f"{path} is not there: no object of that name, and none below it. Check the bucket and the prefix."
                )
            names = [folder + each for each in of_format((each[len(folder) :] for each in within), format, path)]
        return [f"{bucket}/{name}" for name in names]


def is_remote(path: str) -> bool:
    return path.startswith("s3://")


def absolute(path: str) -> str:
    """Return the absolute path on this host; ``file://`` is removed, ``s3://`` stays."""
    if is_remote(path):
        return path
    path = path.removeprefix("file://")
    if "://" in path:
        raise UsageError(f"data files are read here and in buckets of S3 (s3://bucket/path), not at {path!r}.")
    return os.path.abspath(os.path.expanduser(path))


def check_format(format: str) -> None:  # noqa: A002
    """Raise UsageError if the format is unknown."""
    if format not in SUFFIXES:
        raise UsageError(
            f"there is no format {format!r}; a dataset is {', '.join(SUFFIXES)}.{nearest(str(format), SUFFIXES)}"
        )


def format_of(path: str, default: str = "") -> str:
    for name in SUFFIXES:
        if _has_suffix(path.rpartition("/")[2], name):
            return name
    if default:
        return default
    raise DatasetError(f"the name of {path} does not tell its format: give format=, one of {', '.join(SUFFIXES)}.")


def formats_of(path: str, files: DataFiles, default: str = "") -> dict[str, str]:
    """Return the format of each file at `path`, in natural order.

    Args:
        path: anything that `DataFiles.find` takes.
        default: format of a file whose name shows none; empty: this is an error.

    Raises:
        DataFileNotFoundError: there is no file, or none whose name shows a format.
        DatasetError: a file's name shows no format; or a directory holds files of several formats.
    """
    found: dict[str, list[str]] = {}
    error: DataFileNotFoundError | None = None
    for name in SUFFIXES:
        try:
            paths = files.find(path, name)
        except DataFileNotFoundError as raised:
            error = raised
            continue
        if any(not _has_suffix(each.rpartition("/")[2], name) for each in paths):  # a file, or a glob
            return {each: format_of(each, default) for each in paths}
        found[name] = paths
    if len(found) > 1:
        raise DatasetError(f"{path} holds files of several formats ({', '.join(found)}): say which to read.")
    if not found and error is not None:
        raise DataFileNotFoundError(
            f"{path} holds no file whose name tells its format ({', '.join(SUFFIXES)}): {error}"
        ) from error
    return {each: name for name, paths in found.items() for each in paths}


def natural_key(path: str) -> tuple[list[list[tuple[int, int, str]]], str]:
    """Return a key that sorts by folder, then by name, and sorts numbers in names by value."""
    pieces = [
        [(0, int(each), "") if each.isdecimal() else (1, 0, each) for each in re.split(r"([0-9]+)", part) if each]
        for part in path.split("/")
    ]
    return pieces, path


def matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether the components of a path match those of a glob, by the rules of a shell: ``**`` stands for any
    number of components, and no wildcard matches a component that begins with a dot."""
    if not pattern:
        return not parts
    if pattern[0] == "**" and matches(parts, pattern[1:]):
        return True
    if not parts or (parts[0].startswith(".") and not pattern[0].startswith(".")):
        return False
    return (
        matches(parts[1:], pattern)
        if pattern[0] == "**"
        else (fnmatchcase(parts[0], pattern[0]) and matches(parts[1:], pattern[1:]))
    )


def of_format(names: Iterable[str], format: str, directory: str) -> list[str]:  # noqa: A002
    """Return the names, relative to `directory`, that are files of the format."""
    seen = [name for name in names if not any(part.startswith((".", "_")) for part in name.split("/"))]
    found = [name for name in seen if _has_suffix(name.rpartition("/")[2], format)]
    if not found:
        there = f"it holds, for example, {min(seen)}" if seen else "it is empty"
        raise DataFileNotFoundError(
            f"{directory} holds no {format} files ({', '.join(SUFFIXES[format])}); {there}. Give the right format, or "
            f"a glob such as {directory.rstrip('/')}/* to take files whatever their names."
        )
    return found


def _has_suffix(name: str, format: str) -> bool:  # noqa: A002
    name = name.lower()
    if format not in ("parquet", "arrow", "orc"):  # these formats compress inside the file
        name = name.removesuffix(_COMPRESSED)
    return _NUMBERED.sub("", name).endswith(SUFFIXES[format])


def _no_match(path: str) -> str:
    return f"no file matches {path}: check the pattern, and that this host sees the files."


def _here(path: str, format: str) -> list[str]:  # noqa: A002
    if os.path.isdir(path):
        names = []
        for folder, folders, files in os.walk(path, followlinks=True, onerror=_refuse):
            folders[:] = [
                name
                for name in folders
                if not name.startswith((".", "_")) and not _leads_back(os.path.join(folder, name))
            ]
            names += [os.path.relpath(os.path.join(folder, name), path) for name in files]
        return [os.path.join(path, name) for name in of_format(names, format, path)]
    if os.path.exists(path):
        return [path]
    if glob.has_magic(path):
        found = [each for each in glob.glob(path, recursive=True) if os.path.isfile(each)]
        if not found:
            raise DataFileNotFoundError(_no_match(path))
        return found
    raise DataFileNotFoundError(f"{path} is not there: check the path, and that this host sees it.")


def _leads_back(folder: str) -> bool:
    """Return whether a folder is a link to a folder that contains it: the walk would never end."""
    if not os.path.islink(folder):
        return False
    real, here = os.path.realpath(folder), os.path.realpath(os.path.dirname(folder))
    return os.path.commonpath([real, here]) == real


def _refuse(error: OSError) -> None:
    raise DatasetError(f"{error.filename} cannot be listed: {error.strerror}. Check who may read it.") from error
