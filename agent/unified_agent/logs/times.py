"""The time index of a log, `0.err.times`: offsets in the log, with the times at which they were written.

Lines carry no time of their own. At most ten times a second, and only when something is written, the offset and the
time are recorded. At `MAX_RECORDS` records every other one is dropped, and recording goes on half as often.
"""

from __future__ import annotations

import contextlib
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from unified.protocol.records import LOG_TIME

EACH_S = 0.1
MAX_RECORDS = 65536


class TimeIndex:
    """Time index of one log. A record that the disk refuses is dropped; the log itself goes on.

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
                file.write(LOG_TIME.pack(offset, now))
                self._num += 1

    def forget(self, before: int) -> None:
        """Drop the times of bytes that were removed."""
        records = _read(self._path)[1:]
        num_gone = sum(offset <= before for offset, _ in records)
        self._rewrite(records[max(0, num_gone - 1) :])

    def _rewrite(self, records: list[tuple[int, float]]) -> None:
        self._num = len(records)
        with contextlib.suppress(OSError):
            self._path.write_bytes(b"".join(LOG_TIME.pack(*each) for each in [(0, self._each_s), *records]))
            self._path.chmod(0o600)


def times_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.times")


def range_of(path: Path, since: float, until: float) -> tuple[int, int]:
    """Return start and end offset of all that was written to a log between two times; a time of 0 sets no limit.

    Bytes written up to `EACH_S` before or after may be included, in a log of many hours up to a multiple of that.
    Without an index the range is the whole log.
    """
    if not (since or until) or not (records := _read(times_path(path))):
        return 0, sys.maxsize
    (_, each_s), *records = records
    start = next((offset for offset, at in records if at + each_s > since), sys.maxsize)
    if not until:
        return start, sys.maxsize
    later = [offset for (_, at), (offset, _) in pairwise([*records, (sys.maxsize, 0.0)]) if at <= until]
    return start if since else 0, max(later, default=0)


def times_of(path: Path, start: int, end: int) -> bytes:
    """Return the `LOG_TIME` records of what a log holds between two offsets, with the last one before; maybe none."""
    try:
        data = times_path(path).read_bytes()
    except OSError:
        return b""
    numbers = range(1, len(data) // LOG_TIME.size)  # record 0 is no place in the log

    def offset_of(number: int) -> int:
        return int(LOG_TIME.unpack_from(data, number * LOG_TIME.size)[0])

    first = max(1, bisect_right(numbers, start, key=offset_of))
    return data[first * LOG_TIME.size : (bisect_left(numbers, end, key=offset_of) + 1) * LOG_TIME.size]


def _read(path: Path) -> list[tuple[int, float]]:
    """Return 0 and the seconds between records, then offsets and times; empty if the index cannot be read."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    return list(LOG_TIME.iter_unpack(data[: len(data) // LOG_TIME.size * LOG_TIME.size]))
