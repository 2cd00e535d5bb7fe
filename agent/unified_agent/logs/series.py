"""The file of a worker's series, `0.metrics.jsonl`: a log file that thins old points instead of dropping them.

The newest files keep every point. Of older points, every second, fourth, eighth … goes into one file of the same
size, evenly spaced; the first point is always kept.
"""

from __future__ import annotations

import contextlib
import re

from unified_agent.logs.logfile import LogFile, rotated

MAX_SERIES_BYTES = 8 * 1024 * 1024
_LINE = re.compile(rb'.*"number":(\d{1,19})\}\n')
"""A line of a `WorkerReport`, whose last field is its number."""


class SeriesFile(LogFile):
    """Log file of a series. A line is never split."""

    _stride = 1

    def write_lines(self, lines: bytes) -> None:
        """Append whole lines."""
        if self._size and len(lines) > self.bytes_left:
            self._rotate()
        self.write(lines, may_rotate=False)

    def _rotate(self) -> None:
        newer, oldest = (rotated(self.path, self._max_files - number) for number in (2, 1))
        try:
            with contextlib.suppress(FileNotFoundError), oldest.open("rb") as old, newer.open("r+b") as file:
                kept, self._stride = thinned(old.read() + file.read(), self._stride, self.max_bytes)
                file.seek(0)
                file.write(kept)
                file.truncate()
        except OSError as error:
            self._refuse(error)
        super()._rotate()


def thinned(lines: bytes, stride: int, max_bytes: int) -> tuple[bytes, int]:
    """Return the points whose numbers are multiples of the stride, doubled until the points fit, and the new stride."""
    points = [(int(line[1]), line[0]) for line in _LINE.finditer(lines) if int(line[1]) % stride == 0]
    while sum(len(line) for _, line in points) > max_bytes:
        if any(number for number, _ in points):
            stride *= 2
            points = [(number, line) for number, line in points if number % stride == 0]
        else:  # only lines of one point are left
            points = points[(len(points) + 1) // 2 :]
    return b"".join(line for _, line in points), stride
