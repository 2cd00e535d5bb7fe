"""Segments as files: their names, their makers, and their removal.

``/dev/shm/unified-<inbox id>-<number>``, mode 0600. The header names the process that made the segment. Once that
process is gone and no living process has a reference to the segment, any process of the same user may remove it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from array import array
from collections.abc import Collection, Iterator
from typing import NamedTuple

from unified import process
from unified.bus.shm.layout import (
    CLOSED_WORD,
    HEADER_BYTES,
    MAGIC,
    MAGIC_WORD,
    NAMESPACE_WORD,
    OWNER_WORD,
    ReaderReferences,
    make_mark,
    pid_of,
)
from unified.threads import own_pid

DIRECTORY = "/dev/shm"
_PREFIX = "unified-"
GRACE_S = 10.0
"""Time for which messages of a dead process may be on their way."""
YOUNG_S = 60.0
"""Age up to which a file without a header of this version is left alone."""


def segment_name(inbox_id: str, number: int) -> str:
    return f"{_PREFIX}{inbox_id}-{number}"


def inbox_of(name: str) -> str:
    """Return the inbox id in a segment's name; empty if this is no segment."""
    inbox_id, dash, number = name.removeprefix(_PREFIX).rpartition("-")
    return inbox_id if name.startswith(_PREFIX) and dash and number.isdecimal() else ""


def identity(directory: str = DIRECTORY) -> str:
    """Return an id that is equal for processes that can open each other's segments and see each other as processes;
    empty if there is no such directory.

    Containers of one host may have a mount of their own, or pids of their own.
    """
    try:
        found = os.stat(directory)
        if not stat.S_ISDIR(found.st_mode) or not os.access(directory, os.W_OK | os.X_OK):
            return ""
        return f"{found.st_dev}.{found.st_ino}-{_pid_namespace()}-{os.getuid()}"
    except OSError:
        return ""


def own_mark() -> int:
    own = process.facts(own_pid())
    return make_mark(own_pid(), own.start_ticks if own is not None else 0)


def is_alive(mark: int) -> bool:
    """Return whether the process of a mark runs, in this process's own namespace of pids."""
    pid = pid_of(mark)
    found = process.facts(pid)
    return found is not None and found.is_alive and make_mark(pid, found.start_ticks) == mark


def first_words(mark: int) -> bytes:
    """Return the header of a new segment: its magic number, and the mark and the pid namespace of its maker."""
    words = array("Q", bytes(HEADER_BYTES))
    words[MAGIC_WORD], words[OWNER_WORD], words[NAMESPACE_WORD] = MAGIC, mark, _pid_namespace()
    return words.tobytes()


def remove_if_unreferenced(path: str, references: ReaderReferences, *, but_for: int = 0) -> None:
    """Remove the segment of a dead process or closed pool if nobody reads it or will. The process of the mark `but_for`
    does not count."""
    if not references.is_referenced(lambda mark: mark != but_for and is_alive(mark)):
        with contextlib.suppress(OSError):
            os.unlink(path)


class _Found(NamedTuple):
    words: array[int] | None
    """None: it has no header (yet)."""
    changed_at: float


class Sweeper:
    """Removes segments of dead processes. It remembers spared segments, so keep one sweeper as long as the daemon runs.

    Attributes:
        due_at: time of the next sweep, on the clock of `now`, because something was spared; None: no need.
    """

    def __init__(self, directory: str = DIRECTORY) -> None:
        self._directory = directory
        self._spared: dict[str, float] = {}
        self.due_at: float | None = None

    def sweep(self, now: float, wall: float, *, living: Collection[str] = (), is_last: bool = False) -> list[str]:
        """Remove the segments of this user whose process is gone and which no living process reads; return their names.

        Args:
            now: seconds of a clock that only goes forward.
            wall: seconds since 1970, to tell how old a file is.
            living: inbox ids whose segments are skipped.
            is_last: no other sweep will follow: do not spare segments that may be on their way to a reader.
        """
        spared, self._spared, self.due_at = self._spared, {}, None
        removed: list[str] = []
        for name in self._names(living):
            path = os.path.join(self._directory, name)
            found = _read_header(path)
            if found is None or not _is_left(found, wall):
                continue
            since = self._spared[name] = spared.get(name, now)
            if found.words is not None:
                may_come = not is_last and now - since < GRACE_S
                if ReaderReferences(memoryview(found.words)).is_referenced(is_alive, count_in_flight=may_come):
                    due_at = (since if may_come else now) + GRACE_S
                    self.due_at = due_at if self.due_at is None else min(due_at, self.due_at)
                    continue
            with contextlib.suppress(OSError):
                os.unlink(path)
                removed.append(name)
        return removed

    def _names(self, living: Collection[str]) -> Iterator[str]:
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(self._directory)):
                inbox_id = inbox_of(name)
                if inbox_id and inbox_id not in living:
                    yield name


def open_segment(path: str) -> int:
    """Open a segment to read and write; return its descriptor. OSError: none there, or no plain file of this user."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
        os.close(descriptor)
        raise PermissionError(f"{path} is no segment of this user.")
    return descriptor


def _read_header(path: str) -> _Found | None:
    """None: there is no such file any more, or it is not this user's."""
    try:
        descriptor = open_segment(path)
    except OSError:
        return None
    try:
        changed_at = os.fstat(descriptor).st_mtime
        data = os.pread(descriptor, HEADER_BYTES, 0)
    finally:
        os.close(descriptor)
    words = array("Q", data) if len(data) == HEADER_BYTES else None
    return _Found(words if words is not None and words[MAGIC_WORD] == MAGIC else None, changed_at)


def _is_left(found: _Found, wall: float) -> bool:
    """Return whether the process of a segment is gone, or has closed it."""
    if found.words is None:
        return wall - found.changed_at >= YOUNG_S
    if found.words[NAMESPACE_WORD] != _pid_namespace():
        return False  # of a container whose processes cannot be seen from here
    return bool(found.words[CLOSED_WORD]) or not is_alive(found.words[OWNER_WORD])


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
