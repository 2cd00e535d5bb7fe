"""Where fetching can happen."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from unified.loader.messages import FetchBatch, OpenStream, Reply


class Places(Protocol):
    """Processes that serve streams. Orders to one place are carried out in the order in which they were given.

    Attributes:
        stays: a place that was lost is there again at once, under its number.
    """

    stays: bool

    def __len__(self) -> int: ...

    def homes(self, num_streams: int) -> list[int]:
        """For each stream the place to begin at."""
        ...

    def open(self, place: int, order: OpenStream) -> None:
        """Make a stream; what goes wrong with it is the answer to its first fetch."""
        ...

    def fetch(self, place: int, order: FetchBatch) -> Future[Reply]:
        """Ask for a batch."""
        ...

    def lost(self, place: int, error: BaseException) -> str:
        """If `error`, which a fetch ended in, means that the place is gone: why, in words; and the place is made ready
        for new streams. Else an empty string."""
        ...

    def close(self) -> None:
        """Let go of the processes, or of what they hold for this loader."""
        ...
