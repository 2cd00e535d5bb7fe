"""The times of a log's bytes, `0.err.times`: at which offset the log stood when something was written to it.

Lines have no time of their own. So at most once a second, and only when something is written, the offset and the time
are noted. A log that goes on for days has at most `MAX_RECORDS` of them: then every other one is dropped, and they are
noted half as often from then on.
"""

from __future__ import annotations

import contextlib
import struct
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

EACH_S = 1.0
MAX_RECORDS = 65536
_RECORD = struct.Struct("<Qd")


class TimeIndex:
    """Notes the times of one log. What the disk refuses is not noted, and the log is not disturbed by it.

    Args:
        path: path of the log.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = times_path(path)
        self._clock = clock
        self._each_s = EACH_S
        self._num = 0
        self._noted_at = float("-inf")
        self._rewrite([])

    def note(self, offset: int) -> None:
        """Note that bytes are about to be written at this offset."""
        now = self._clock()
        if not 0 <= now - self._noted_at < self._each_s:
            self._noted_at = now
            if self._num >= MAX_RECORDS:
                self._each_s *= 2
                self._rewrite(_read(self._path)[1::2])
            with contextlib.suppress(OSError), self._path.open("ab", buffering=0) as file:
                file.write(_RECORD.pack(offset, now))
                self._num += 1

    def forget(self, before: int) -> None:
        """Drop the times of bytes that are there no more."""
        records = _read(self._path)[1:]
        num_gone = sum(offset <= before for offset, _ in records)
        self._rewrite(records[max(0, num_gone - 1) :])

    def _rewrite(self, records: list[tuple[int, float]]) -> None:
        self._num = len(records)
        with contextlib.suppress(OSError):
            self._path.write_bytes(b"".join(_RECORD.pack(*each) for each in [(0, self._each_s), *records]))
            self._path.chmod(0o600)


def times_path(path: Path) -> Path:
    """Return the path of the times of a log."""
    return path.with_name(f"{path.name}.times")


def range_of(path: Path, since: float, until: float) -> tuple[int, int]:
    """Return the offsets between which lies all that was written to a log from one time to another; 0: without end.

    What was written less than `EACH_S` before or after may be there too, in a log of many hours a multiple of that.
    Of a log without an index this is everything.
    """
    if not (since or until) or not (records := _read(times_path(path))):
        return 0, sys.maxsize
    (_, each_s), *records = records
    start = next((offset for offset, at in records if at + each_s > since), sys.maxsize)
    later = [offset for (_, at), (offset, _) in pairwise([*records, (sys.maxsize, 0.0)]) if at <= until]
    return start if since else 0, (max(later, default=0) if until else sys.maxsize)


def _read(path: Path) -> list[tuple[int, float]]:
    """Return 0 and the seconds between records, then offsets and times; nothing if they cannot be read."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    return list(_RECORD.iter_unpack(data[: len(data) // _RECORD.size * _RECORD.size]))
