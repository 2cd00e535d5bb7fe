"""Reader references of a slot of shared memory: entries in its header, each written by one process at a time. No I/O.

A slot's owner grants a row to each reader: one *entry* for that reader, and after it sub-entries. Only this reader
grants the sub-entries, to the readers to which it forwards the data. An entry goes through these values:

    0 → IN_FLIGHT      the granter: the message is on its way (a reader that forwards adds its mark)
    IN_FLIGHT → mark   the reader: I have it (a mark names one process for ever)
    mark → 0           the reader: nobody here uses it any more
    IN_FLIGHT → LOST   the granter: the reader is believed dead

Each arrow is a plain store, without a lock, and any order of two stores is safe: a slot is used again only when all its
entries are 0. A slot with a LOST entry is never used again: the reader may be alive, and the message may still come.
The same holds for a row within one use. A reader grants each of its sub-entries once.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

NUM_WORDS = 1024
HEADER_BYTES = 8 * NUM_WORDS
"""Size of a segment's header; the data follows."""
MAGIC_WORD, OWNER_WORD, NAMESPACE_WORD, CAPACITY_WORD, TAG_WORD, CLOSED_WORD, WIDTH_WORD, PARTS_WORD = range(8)
FIRST_ENTRY = 16
NUM_ENTRIES = NUM_WORDS - FIRST_ENTRY
MAGIC = 0x756E6966_73686D01
"""``unifshm`` and the version of this layout."""
IN_FLIGHT = 1 << 63
LOST = (1 << 64) - 1
MIN_WIDTH, MAX_WIDTH = 8, 400
"""Least and most sub-entries of a row: how often one reader can forward its data."""
_PID_BITS = 22
"""Linux gives no pid above 2**22."""


Words = memoryview | list[int]
"""The header, as numbers of 8 bytes."""


class Use(Enum):
    """State of a slot for its owner."""

    FREE = "free"
    HELD = "held"
    ABANDONED = "abandoned"
    """No known reader, but a message that names the slot may still come: give the slot up."""


def make_mark(pid: int, start_ticks: int) -> int:
    """Make the unique mark of one process: its pid, and when it started."""
    return (start_ticks << _PID_BITS | pid) & (IN_FLIGHT - 1)


def pid_of(mark: int) -> int:
    return mark & ((1 << _PID_BITS) - 1)


class ReaderReferences:
    """The entries of one slot."""

    def __init__(self, words: Words) -> None:
        self._words = words

    @property
    def tag(self) -> int:
        """Number of the present use of the slot."""
        return self._words[TAG_WORD]

    def begin(self, num_parts: int, num_readers: int) -> int:
        """Begin a use, with `num_parts` buffers for `num_readers` readers; return its tag. The slot must be free."""
        wanted = min(max(MIN_WIDTH, 2 * num_parts), MAX_WIDTH)
        self._words[WIDTH_WORD] = max(0, min(wanted, NUM_ENTRIES // max(1, num_readers) - 1))
        self._words[PARTS_WORD] = num_parts
        self._words[TAG_WORD] = tag = self.tag + 1
        return tag

    @property
    def num_rows(self) -> int:
        return -(-NUM_ENTRIES // (1 + self._words[WIDTH_WORD]))

    def is_over(self, row: int) -> bool:
        """Return to the owner whether a row can be granted again: nobody has it or may still get it."""
        width = 1 + self._words[WIDTH_WORD]
        first = FIRST_ENTRY + row * width
        return not any(self._words[first : min(first + width, NUM_WORDS)])

    def grant(self, row: int) -> int | None:
        """Grant, as the owner, a row that was not granted in this use, or is over; return its entry, or None."""
        entry = row * (1 + self._words[WIDTH_WORD])
        if entry >= NUM_ENTRIES:
            return None
        self._words[FIRST_ENTRY + entry] = IN_FLIGHT
        return entry

    def forward(self, entry: int, index: int, mark: int) -> int | None:
        """Grant, as the holder of a row's entry, its sub-entry `index` (from 0) to another reader; None if none."""
        if not self.has_sub_entries(entry, index + 1):
            return None
        self._words[FIRST_ENTRY + entry + 1 + index] = IN_FLIGHT | mark
        return entry + 1 + index

    def has_sub_entries(self, entry: int, count: int) -> bool:
        """Return whether `entry` begins a row, and `count` sub-entries follow it."""
        width = self._words[WIDTH_WORD]
        return entry % (1 + width) == 0 and count <= width and entry + count < NUM_ENTRIES

    def is_in_flight(self, entry: int, tag: int, mark: int | None = None) -> bool:
        """Return whether a grant with this tag, by the process of this mark (None: any), was not taken up yet."""
        value = self._words[FIRST_ENTRY + entry]
        return self.tag == tag and IN_FLIGHT <= value < LOST and mark in (None, value - IN_FLIGHT)

    def borrow(self, entry: int, tag: int, mark: int) -> bool:
        """Take up a grant, as the reader; return False if it is no longer there."""
        if not 0 <= entry < NUM_ENTRIES or not self.is_in_flight(entry, tag):
            return False
        self._words[FIRST_ENTRY + entry] = mark
        return True

    def give_back(self, entry: int) -> None:
        """Clear an entry, as the reader: nobody here uses the data any more."""
        self._words[FIRST_ENTRY + entry] = 0

    def lose(self, entry: int, tag: int, mark: int | None = None) -> None:
        """Mark a grant in flight as lost, as the granter: its reader is believed dead, but may still take it up."""
        if self.is_in_flight(entry, tag, mark):
            self._words[FIRST_ENTRY + entry] = LOST

    def lose_row(self, row: int) -> None:
        """Mark the row of a reader believed dead as lost, as the owner, with its sub-entries."""
        width = self._words[WIDTH_WORD]
        first = row * (1 + width)
        for entry in range(first, min(first + 1 + width, NUM_ENTRIES)):
            self.lose(entry, self.tag)

    def reap(self, num_rows: int, is_alive: Callable[[int], bool]) -> None:
        """Clear the entries of dead processes, as the owner, and mark their own grants in flight as lost."""
        width = self._words[WIDTH_WORD]
        for entry in range(min(num_rows * (1 + width), NUM_ENTRIES)):
            value = self._words[FIRST_ENTRY + entry]
            if value and value < IN_FLIGHT and not is_alive(value):
                self._words[FIRST_ENTRY + entry] = 0
                if entry % (1 + width) == 0:
                    self.lose_row(entry // (1 + width))

    def use(self, num_rows: int) -> Use:
        """Return to the owner the slot's state, from the entries of the first `num_rows` rows."""
        last = FIRST_ENTRY + min(num_rows * (1 + self._words[WIDTH_WORD]), NUM_ENTRIES)
        entries = self._words[FIRST_ENTRY:last]
        if not any(entries):
            return Use.FREE
        return Use.HELD if any(value not in (0, LOST) for value in entries) else Use.ABANDONED

    def is_referenced(self, is_alive: Callable[[int], bool], *, count_in_flight: bool = True) -> bool:
        """Return to anybody whether a living process reads the slot, or may be about to."""
        values = set(self._words[FIRST_ENTRY:NUM_WORDS]) - {0, LOST}
        if count_in_flight and any(value >= IN_FLIGHT for value in values):
            return True
        return any(is_alive(value) for value in values if value < IN_FLIGHT)
