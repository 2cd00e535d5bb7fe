"""Where some rows of a file begin, for formats whose rows must be read through to be found."""

from __future__ import annotations

from array import array


class Marks:
    """Byte offsets of every `every`-th row, noted while rows are passed in order.

    A reader that looks for a row begins at the mark before it and not at the file's first byte: shard after shard of
    one file is read in one pass over the file, and not in as many as there are shards.
    """

    def __init__(self, every: int = 256) -> None:
        self._every = every
        self._offsets = array("Q")

    def note(self, row: int, offset: int) -> None:
        """`row` begins at byte `offset`. What is not the next row to be marked is passed over."""
        if row == len(self._offsets) * self._every:
            self._offsets.append(offset)

    def before(self, row: int, first: int = 0) -> tuple[int, int]:
        """The last marked row that is not after `row`, and its offset; row 0 at offset `first` if none is."""
        index = min(row // self._every, len(self._offsets) - 1)
        return (index * self._every, self._offsets[index]) if index >= 0 else (0, first)
