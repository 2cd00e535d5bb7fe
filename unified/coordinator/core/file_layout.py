"""The layout of a dataset: its files one after another, and the file rows of a range of samples."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple


class FileRows(NamedTuple):
    """Rows `start` to `end` (not included) of one file, counted from 0 in the file."""

    file: int
    """Number of the file in the dataset, from 0."""
    start: int
    end: int


class FileLayout:
    """The places of a dataset's samples in its files. A file may have 0 samples."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self._ends = list(accumulate(sizes))

    @property
    def total_samples(self) -> int:
        return self._ends[-1] if self._ends else 0

    def locate(self, start: int, end: int) -> list[FileRows]:
        """Return the file rows of samples `start` to `end` (not included), in order; samples past the files have none.

        Files without such rows are left out. The cost is a search over the files, and a step for each returned file.
        """
        found = []
        index = bisect_right(self._ends, start)
        while index < len(self._ends):
            base = self._ends[index - 1] if index else 0
            first, last = max(start, base), min(end, self._ends[index])
            if base >= end:
                break
            if first < last:
                found.append(FileRows(index, first - base, last - base))
            index += 1
        return found
