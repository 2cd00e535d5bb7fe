"""One stream of one worker on disk, `0.err`, and as it grows `0.err.1`, `0.err.2` … with the newest bytes in `0.err`.

Readers speak of absolute offsets, from the first byte ever written, so that following a log is not disturbed by a
rotation. `0.err.base` holds the offset at which `0.err` begins; without it that is 0.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger("unified_agent")
MAX_SLICE_BYTES = 1024 * 1024
_TAIL_BYTES = 16384
_TAIL_LINES = 40
_NOISE = "Extension modules: "
"""Beginning of the last line of `faulthandler`, which is long and says nothing of the fault."""


class LogFile:
    """A log file that rotates. Where the disk refuses, output is dropped, which is logged once; the worker goes on."""

    def __init__(self, path: Path, max_bytes: int, max_files: int) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self._max_files = max_files
        self._base = 0
        self._size = 0
        self._older: deque[int] = deque(maxlen=max_files - 1)
        """Sizes of the rotated files, oldest first."""
        self._is_refused = False
        self._descriptor = -1
        try:
            for old in [*(_rotated(path, number) for number in range(1, max_files)), _base_path(path)]:
                old.unlink(missing_ok=True)  # of a job with this id in an earlier life of the cluster
        except OSError as error:
            self._refuse(error)
        self._open()

    @property
    def room(self) -> int:
        """Bytes until the next rotation; 0 where the next write begins with it."""
        return max(0, self.max_bytes - self._size)

    @property
    def start_after_rotation(self) -> int:
        """Offset of the first byte that the next rotation keeps."""
        kept = [*self._older, self._size]
        num_kept = min(len(kept), self._max_files - 1)
        return self._base + self._size - sum(kept[len(kept) - num_kept :])

    def write(self, data: bytes, *, may_rotate: bool = True) -> None:
        """Append. Without `may_rotate` the file grows past its size, and nothing that was written is lost."""
        view = memoryview(data)
        while view:
            if may_rotate and self._size >= self.max_bytes:
                self._rotate()
            if self._descriptor < 0:
                return
            try:
                count = os.write(self._descriptor, view[: self.room] if may_rotate else view)
            except OSError as error:
                self._refuse(error)
                return
            self._size += count
            view = view[count:]

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o644)
        except OSError as error:
            self._refuse(error)

    def _rotate(self) -> None:
        self.close()
        self._base += self._size
        self._older.append(self._size)
        self._size = 0
        try:
            for number in range(self._max_files - 1, 0, -1):
                newer = self.path if number == 1 else _rotated(self.path, number - 1)
                with contextlib.suppress(FileNotFoundError):
                    newer.replace(_rotated(self.path, number))
            _base_path(self.path).write_text(str(self._base))
        except OSError as error:
            self._refuse(error)
        self._open()

    def _refuse(self, error: OSError) -> None:
        if not self._is_refused:
            self._is_refused = True
            log.error("event=log-dropped file=%s: %s; output is dropped", self.path, error.strerror)


class LogSlice(NamedTuple):
    """Part of a stream."""

    data: bytes = b""
    offset: int = 0
    size: int = 0
    """Bytes ever written."""
    path: str = ""
    error: str = ""


def read_slice(path: Path, offset: int, max_bytes: int, max_files: int) -> LogSlice:
    """Read up to `max_bytes` (and at most 1 MiB) from an absolute offset; a negative one counts from the end.

    Bytes that were rotated away are skipped: the slice's offset is then larger than asked.
    """
    try:
        segments = _segments(path, max_files)
        newest_start, newest_size, _ = segments[-1]
        size = newest_start + newest_size
        if offset < 0:
            offset += size
        offset = min(max(offset, segments[0][0]), size)
        for start, length, file in segments:
            if start <= offset < start + length:
                with file.open("rb") as opened:
                    opened.seek(offset - start)
                    data = opened.read(max(0, min(max_bytes, MAX_SLICE_BYTES)))
                return LogSlice(data=data, offset=offset, size=size, path=str(path))
    except OSError as error:
        return LogSlice(path=str(path), error=f"{path} cannot be read: {error.strerror}")
    return LogSlice(offset=offset, size=size, path=str(path))


def last_lines(path: Path) -> str:
    """Return the end of a file, for a report of a crash."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
            return "\n".join([line for line in lines if not line.startswith(_NOISE)][-_TAIL_LINES:])
    except OSError:
        return ""


def _segments(path: Path, max_files: int) -> list[tuple[int, int, Path]]:
    """Return start offset, size and file of each part, oldest first."""
    try:
        start = int(_base_path(path).read_text())
    except (FileNotFoundError, ValueError):
        start = 0
    segments = [(start, path.stat().st_size, path)]
    for number in range(1, max_files):
        file = _rotated(path, number)
        if not file.exists():
            break
        size = file.stat().st_size
        start -= size
        segments.append((start, size, file))
    return segments[::-1]


def _rotated(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _base_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.base")
