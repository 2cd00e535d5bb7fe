"""The files of one worker's stream: the newest bytes in `0.err`, older bytes in `0.err.1`, `0.err.2` …

Readers use absolute offsets, from the first byte ever written, so that a rotation does not disturb a reader who
follows a log. `0.err.base` holds the offset at which `0.err` begins; without that file it is 0.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from unified.config.settings import make_folder
from unified_agent.logs.times import TimeIndex

log = logging.getLogger("unified_agent")
MAX_SLICE_BYTES = 1024 * 1024
HELD_BYTES = 256 * 1024
"""Most output of a stream that is held in memory while the disk refuses it."""
LEAST_FREE = 4 * HELD_BYTES
"""Free bytes on the disk, beside the reserve, from which on a file that was refused is written again."""
RESERVE = 64 * 1024 * 1024
"""Free bytes of a disk (at most a 16th of it) that logs leave to the state of the master, which may be there, too."""
RETRY_S = 1.0
_TAIL_BYTES = 16384
_TAIL_LINES = 40
_NOISE = "Extension modules: "
"""Beginning of the last line of `faulthandler`, which is long and says nothing of the fault."""


class _Hole:
    """Output that the disk refuses. The newest part is held for readers, and is written once the disk has space.

    Args:
        before: an earlier hole of the same file, whose losses count as well.
    """

    def __init__(self, why: str, before: _Hole | None) -> None:
        self.why = why
        self.began_at: float = time.time() if before is None else before.began_at
        self.lost_before: tuple[int, int] = (0, 0) if before is None else before.lost
        self.try_at = time.monotonic() + RETRY_S
        self.num_bytes = self.num_lines = 0
        self.held = bytearray()

    def add(self, data: memoryview) -> None:
        self.num_bytes += len(data)
        self.num_lines += bytes(data).count(b"\n")
        self.held += data
        del self.held[: max(0, len(self.held) - HELD_BYTES)]

    @property
    def lost(self) -> tuple[int, int]:
        """Numbers of lost lines and bytes."""
        num_lines = self.num_lines - self.held.count(b"\n")
        return self.lost_before[0] + num_lines, self.lost_before[1] + self.num_bytes - len(self.held)

    def text(self, ended_at: float | None = None) -> str:
        """Return the losses in words; empty: none."""
        num_lines, num_bytes = self.lost
        if not num_bytes:
            return ""
        span = f"since {_clock(self.began_at)}"
        if ended_at is not None:
            span = f"from {_clock(self.began_at)} to {_clock(ended_at)}"
        return f"{num_lines} lines ({num_bytes} bytes) dropped {span}: {self.why}"


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def _room(place: int | Path) -> int:
    """Return how many bytes a disk has left for logs."""
    found = os.statvfs(place)
    if not found.f_blocks:  # a file system that does not tell its size
        return sys.maxsize
    return (found.f_bavail - min(RESERVE // found.f_frsize, found.f_blocks // 16)) * found.f_frsize


class LogFile:
    """A log file that rotates. Output that the disk refuses is dropped, with one log entry; the worker goes on.

    Once the disk has space again, the file goes on after a line that says what is missing.

    Args:
        is_private: only this user may read the file and enter its folder; otherwise the umask decides.
        is_timed: keep a time index, for readers that ask for a time range.
    """

    def __init__(
        self, path: Path, max_bytes: int, max_files: int, *, is_private: bool = True, is_timed: bool = False
    ) -> None:
        self.path = path
        self._is_private = is_private
        self.max_bytes = max_bytes
        self._max_files = max_files
        self._base = 0
        self._size = 0
        self._older: deque[int] = deque(maxlen=max_files - 1)
        """Sizes of the rotated files, oldest first."""
        self._hole: _Hole | None = None
        self._last_hole: _Hole | None = None
        self.lost = ""
        """Losses in words; empty: none."""
        self._descriptor = -1
        self._look_at = 0
        try:
            others = [_base_path(path), path.with_name(f"{path.name}.archived")]
            for old in [*(rotated(path, number) for number in range(1, max_files)), *others]:
                old.unlink(missing_ok=True)  # left by a job with this id in an earlier start of the cluster
        except OSError as error:
            self._refuse(error)
        self._open()
        self._times = TimeIndex(path) if is_timed else None

    @property
    def end(self) -> int:
        """Bytes ever written, or dropped."""
        return self._base + self._size + (self._hole.num_bytes if self._hole is not None else 0)

    @property
    def bytes_left(self) -> int:
        """Bytes until the next rotation; 0 if the next write begins with it."""
        return max(0, self.max_bytes - self._size)

    @property
    def start_after_rotation(self) -> int:
        """Offset of the first byte that the next rotation keeps."""
        kept = [*self._older, self._size]
        num_kept = min(len(kept), self._max_files - 1)
        return self._base + self._size - sum(kept[len(kept) - num_kept :])

    def write(self, data: bytes, *, may_rotate: bool = True) -> None:
        """Append data. Without `may_rotate` the file may grow past its limit, and no older bytes are lost."""
        if self._times is not None:
            self._times.note(self._base + self._size)
        view = memoryview(data)
        if self._hole is not None and not self._is_mended(self._hole):
            self._drop(view)
            return
        while view:
            if may_rotate and self._size >= self.max_bytes:
                self._rotate()
            if self._descriptor < 0:
                self._drop(view)
                return
            try:
                if self.end >= self._look_at:
                    self._look_at = self.end + HELD_BYTES
                    if _room(self._descriptor) < HELD_BYTES:
                        raise OSError(errno.ENOSPC, "No space left on device, except for state")
                count = os.write(self._descriptor, view[: self.bytes_left] if may_rotate else view)
            except OSError as error:
                self._refuse(error)
                self._drop(view)
                return
            self._size += count
            view = view[count:]

    def close(self) -> None:
        """Close the file. Write held output first, if the disk has space again."""
        if self._hole is not None:
            self._hole.try_at = 0.0
            self._is_mended(self._hole, is_last=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        try:
            if self._is_private:
                make_folder(self.path.parent)
            else:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o600 if self._is_private else 0o666)
            if self._is_private:
                os.fchmod(self._descriptor, 0o600)  # the umask may remove even the owner's rights
        except OSError as error:
            self._refuse(error)

    def _rotate(self) -> None:
        self.close()
        self._base += self._size
        self._older.append(self._size)
        self._size = 0
        try:
            for number in range(self._max_files - 1, 0, -1):
                newer = rotated(self.path, number - 1)
                with contextlib.suppress(FileNotFoundError):
                    newer.replace(rotated(self.path, number))
            _base_path(self.path).write_text(str(self._base))
            if self._times is not None:
                self._times.forget(self._base - sum(self._older))
        except OSError as error:
            self._refuse(error)
        self._open()

    def _refuse(self, error: OSError) -> None:
        if self._hole is None:
            disk = next(each for each in self.path.absolute().parents if os.path.ismount(each))
            self._hole = _Hole(f"{error.strerror or error} (disk {disk})", self._last_hole)
            log.error("event=log-dropped file=%s: %s; output is dropped", self.path, self._hole.why)

    def _drop(self, data: memoryview) -> None:
        if self._hole is not None:
            self._hole.add(data)
            self.lost = self._hole.text()

    def _is_mended(self, hole: _Hole, *, is_last: bool = False) -> bool:
        """Look for free space, once in `RETRY_S`; if there is some, write a line on the loss, and the held output. The
        end of a stream may use the reserve."""
        if time.monotonic() < hole.try_at:
            return False
        hole.try_at = time.monotonic() + RETRY_S
        try:
            if not is_last and _room(self.path.parent) < LEAST_FREE:
                return False
            if self._descriptor < 0:
                self._open()
            num_lost = hole.num_bytes - len(hole.held)
            self.lost = hole.text(time.time())
            line = f"\n[unified: {self.lost}]\n".encode() if num_lost else b""
            os.write(self._descriptor, line)
        except OSError:
            return False
        held = bytes(hole.held)
        self._hole = None
        if self.lost:
            self._last_hole = hole
        log.info("event=log-goes-on file=%s: %s", self.path, self.lost or "nothing is lost")
        self._size += len(line)
        if num_lost and self._max_files > 1:  # readers' offsets count the lost bytes, too
            self._base += num_lost - len(line)
            self._rotate()
        self._look_at = self.end + len(held) + 1
        self.write(held)
        return True

    def with_held(self, found: LogSlice, offset: int, max_bytes: int) -> LogSlice:
        """Return what a reader found on disk, or, if the disk has no more, output that is held in memory."""
        hole, end = self._hole, self.end
        if hole is None or found.data or not hole.held:
            return found if hole is None else found._replace(size=end)
        first = end - len(hole.held)
        start = min(max(first, offset if offset >= 0 else end + offset), end)
        return LogSlice(bytes(hole.held[start - first :][:max_bytes]), start, end, str(self.path))


class LogSlice(NamedTuple):
    """Part of a stream."""

    data: bytes = b""
    offset: int = 0
    size: int = 0
    """Bytes ever written."""
    path: str = ""
    error: str = ""
    next_offset: int | None = None
    """Offset at which the reader goes on; None: the end of `data`."""
    is_missing: bool = False
    """True if the file does not exist (any more, or yet)."""
    is_busy: bool = False
    """True if nothing was searched, because too many other searches run."""


class LogPart(NamedTuple):
    """One of the files of a stream."""

    start: int
    size: int
    file: Path


def read_slice(
    path: Path, offset: int, max_bytes: int, max_files: int, limits: tuple[int, int] = (0, sys.maxsize)
) -> LogSlice:
    """Read up to `max_bytes` (and at most 1 MiB) from an absolute offset; a negative one counts from the end.

    Bytes that were rotated away or lie outside the limits are skipped: the slice's offset is then larger than asked.
    """
    try:
        segments = segments_of(path, max_files)
        newest_start, newest_size, _ = segments[-1]
        size = newest_start + newest_size
        if offset < 0:
            offset += size
        offset = min(max(offset, segments[0][0], limits[0]), size)
        if offset >= limits[1]:
            return LogSlice(offset=size, size=size, path=str(path))
        for start, length, file in segments:
            if start <= offset < start + length:
                with file.open("rb") as opened:
                    opened.seek(offset - start)
                    data = opened.read(max(0, min(max_bytes, MAX_SLICE_BYTES, limits[1] - offset)))
                return LogSlice(data=data, offset=offset, size=size, path=str(path))
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        return LogSlice(path=str(path), error=f"{path} cannot be read: {error.strerror}", is_missing=is_missing)
    return LogSlice(offset=offset, size=size, path=str(path))


def read_through(path: Path, offset: int, nbytes: int, max_files: int) -> LogSlice:
    """Read like `read_slice`, but without its size limit, and across several files."""
    found = read_slice(path, offset, nbytes, max_files)
    while len(found.data) < nbytes:
        more = read_slice(path, found.offset + len(found.data), nbytes - len(found.data), max_files)
        if not more.data:
            break
        found = found._replace(data=found.data + more.data)
    return found


def last_lines(path: Path) -> str:
    """Return the end of a file, for a report of a crash."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
            return "\n".join([line for line in lines if not line.startswith(_NOISE)][-_TAIL_LINES:])
    except OSError:
        return ""


def segments_of(path: Path, max_files: int) -> list[LogPart]:
    """Return the files of a stream, the oldest first. OSError: there are none."""
    try:
        start = int(_base_path(path).read_text())
    except (FileNotFoundError, ValueError):
        start = 0
    segments = [LogPart(start, path.stat().st_size, path)]
    for number in range(1, max_files):
        file = rotated(path, number)
        if not file.exists():
            break
        size = file.stat().st_size
        start -= size
        segments.append(LogPart(start, size, file))
    return segments[::-1]


def rotated(path: Path, number: int) -> Path:
    """Return the path of an older file by its number; 0: the newest."""
    return path.with_name(f"{path.name}.{number}") if number else path


def _base_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.base")
