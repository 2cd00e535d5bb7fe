"""Snapshots on storage: one object each, written by a process that gets only a rank's buffer and credentials.

    python -m unified.snapshot.storage BUFFER_FD LENGTH LOCATION FOLDER NAME --parent PID

The snapshot server starts the process, so that a store's library is not loaded into the server, and a job's credentials
do not enter its environment. An object is the image as it is in memory, with a checksum at its end. The last two
objects of each rank are kept.
"""

from __future__ import annotations

import argparse
import mmap
import os
import re
import signal
import struct
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from unified import process
from unified.errors import SnapshotError, UnifiedError
from unified.protocol.snapshots import NO_STAMP, SnapshotSeries, SnapshotStamp, StorageTarget, StoredSnapshot
from unified.values import ClosedOnExit

if TYPE_CHECKING:
    from unified.storage.backend import StorageBackend

CHUNK_BYTES = 4 << 20
WRITE_WITHIN_S = 300.0
SLOWEST_BYTES_PER_S = 20 << 20
KEPT = 2
"""Snapshots of each rank that are kept: the ranks of one step may be written at different times."""
_FOOTER = struct.Struct("<4sI")
_MAGIC = b"CRC1"
_NAME = re.compile(r"(\d{12})\.(\d+)\.(.+)\.snapshot")
_CREDENTIALS = ("AWS_", "UNIFIED_STORAGE_", "SSL_CERT_", "HTTPS_PROXY", "NO_PROXY")


def target_of(location: str, series: SnapshotSeries, env: Mapping[str, str], *, is_replicated: bool) -> StorageTarget:
    """Return the location of a rank's snapshots, with the credentials for it from an environment."""
    if "://" not in location:
        location = os.path.abspath(os.path.expanduser(location))
    folder = "replicated" if is_replicated else f"{series.rank}-of-{series.world_size}"
    kept = {name: value for name, value in env.items() if name.startswith(_CREDENTIALS)}
    return StorageTarget(location=location, folder=f"snapshots/{series.role}/{folder}", env=kept)


def name_of(job_id: str, stamp: SnapshotStamp) -> str:
    return f"{stamp.step:012d}.{stamp.round}.{job_id}.snapshot"


def write_within_s(length: int) -> float:
    """Return the seconds after which the write of an image of `length` bytes is given up."""
    return WRITE_WITHIN_S + length / SLOWEST_BYTES_PER_S


class SnapshotStorage(ClosedOnExit):
    def __init__(self, location: str, folder: str) -> None:
        self.location = location
        self._backend, prefix = _opened(location)
        self._prefix = str(PurePosixPath(prefix) / folder)

    def steps(self) -> list[StoredSnapshot]:
        parsed = (_parsed(stat.key) for stat in self._backend.list(self._prefix + "/"))
        return [found for found in parsed if found is not None]

    def read(self, snapshot: StoredSnapshot) -> memoryview:
        """Return the image of a snapshot. SnapshotError: it is damaged, or gone."""
        name = name_of(snapshot.job_id, snapshot.stamp)
        key = f"{self._prefix}/{name}"
        try:
            nbytes = self._backend.stat(key).nbytes
            view = memoryview(mmap.mmap(-1, max(nbytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        except OSError as error:
            raise SnapshotError(f"The snapshot {name} in {self.location} cannot be read: {error}") from error
        length = nbytes - _FOOTER.size
        num_read = self._backend.read_into(key, view[:nbytes])
        if num_read != nbytes or length < 0 or not _is_whole(view, length):
            raise SnapshotError(f"The snapshot {name} in {self.location} is damaged: its checksum does not match.")
        return view[:length]

    def write(self, descriptor: int, length: int, name: str) -> None:
        """Write an object from a buffer, and delete all but the newest of the rank; other jobs' count as older."""
        self._backend.write(f"{self._prefix}/{name}", _chunks(descriptor, length))
        written = _parsed(name)
        ages: dict[str, tuple[bool, SnapshotStamp, float]] = {}
        for stat in self._backend.list(self._prefix + "/"):
            if (found := _parsed(stat.key)) is not None:
                is_ours = written is not None and found.job_id == written.job_id
                ages[stat.key] = is_ours, found.stamp if is_ours else NO_STAMP, stat.modified_at
        for key in sorted(ages, key=ages.__getitem__)[:-KEPT]:
            self._backend.delete(key)

    def close(self) -> None:
        self._backend.close()


def _parsed(key: str) -> StoredSnapshot | None:
    """Return the snapshot that an object's name says; None: no snapshot."""
    match = _NAME.fullmatch(key.rpartition("/")[2])
    if match is None:
        return None
    step, round_number, job_id = match.groups()
    return StoredSnapshot(job_id=job_id, stamp=SnapshotStamp(int(round_number), int(step)))


def _opened(location: str) -> tuple[StorageBackend, str]:
    if location.startswith("s3://"):
        from unified.storage.location import open_storage

        return open_storage(location)
    from unified.storage.local import LocalBackend  # `open_storage` takes brackets as a pattern

    return LocalBackend(location.removeprefix("file://")), ""


def _chunks(descriptor: int, length: int) -> Iterator[bytes]:
    checksum = done = 0
    while done < length:
        chunk = os.pread(descriptor, min(CHUNK_BYTES, length - done), done)
        if not chunk:
            raise EOFError(f"the buffer ends at {done}, and the snapshot has {length} bytes")
        checksum = zlib.crc32(chunk, checksum)
        done += len(chunk)
        yield chunk
    yield _FOOTER.pack(_MAGIC, checksum)


def _is_whole(view: memoryview, length: int) -> bool:
    return bool(_FOOTER.unpack_from(view, length) == (_MAGIC, _checksum(view[:length])))


def _checksum(view: memoryview) -> int:
    checksum = 0
    for start in range(0, len(view), CHUNK_BYTES):
        checksum = zlib.crc32(view[start : start + CHUNK_BYTES], checksum)
    return checksum


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m unified.snapshot.storage", description="Writes one snapshot.")
    parser.add_argument("descriptor", type=int, metavar="BUFFER_FD")
    parser.add_argument("length", type=int, metavar="LENGTH")
    for name in ("location", "folder", "name"):
        parser.add_argument(name)
    parser.add_argument("--parent", type=int)
    arguments = parser.parse_args()
    process.die_with_parent(signal.SIGKILL, arguments.parent)
    process.set_title("unified-snapst")
    try:
        with SnapshotStorage(arguments.location, arguments.folder) as storage:
            storage.write(arguments.descriptor, arguments.length, arguments.name)
    except (UnifiedError, OSError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
