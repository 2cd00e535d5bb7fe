"""Choice of the newest output to send to the master, which keeps it in case this node is lost.

The rate is low however much workers print: `RATE` bytes a second per agent, after a burst. Of a stream that prints
faster than its share, only the newest bytes are sent each time.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

EVERY_S = 5.0
RATE = 2048
BURST = 128 * 1024
LAST_BYTES = 32 * 1024
"""Most bytes of a stream whose worker has failed."""
LAST_OF_GOOD = 4096
"""Most bytes of a stream whose worker has ended well."""
LEAST = 512


class Tail(NamedTuple):
    """Part of a stream to send."""

    path: Path
    offset: int
    nbytes: int


class TailFeed:
    """Decides what to send, from the size of each stream."""

    def __init__(self) -> None:
        self._sizes: dict[Path, int] = {}
        self._sent: dict[Path, int] = {}
        self._left = float(BURST)
        self._refilled_at: float | None = None
        self.due_at: float | None = None
        """Time at which `take` is due; None: nothing was written since the last call."""

    def wrote(self, path: Path, size: int, now: float) -> None:
        """Note the size of a stream."""
        self._sizes[path] = size
        if self.due_at is None:
            self.due_at = now + EVERY_S

    def take(self, now: float) -> list[Tail]:
        """Return the parts of all streams to send now; streams that were sent longest ago come first."""
        self.due_at = None
        self._refill(now)
        behind = [path for path in self._sent if self._sizes.get(path, 0) > self._sent[path]]
        behind = [path for path in self._sizes if path not in self._sent] + behind
        share = max(LEAST, int(self._left) // max(1, len(behind)))
        tails = [self._tail(path, min(share, LAST_BYTES)) for path in behind if self._left >= LEAST]
        if len(tails) < len(behind):
            self.due_at = now + EVERY_S
        return tails

    def end(self, path: Path, now: float, *, has_failed: bool) -> Tail | None:
        """Return the last part to send of an ended stream, and forget the stream."""
        self._refill(now)
        size, sent = self._sizes.get(path, 0), self._sent.get(path, 0)
        tail = self._tail(path, LAST_BYTES if has_failed else LAST_OF_GOOD) if size > sent and self._left >= 1 else None
        self._sizes.pop(path, None)
        self._sent.pop(path, None)
        return tail

    def _tail(self, path: Path, most: int) -> Tail:
        size = self._sizes[path]
        nbytes = min(most, size - self._sent.pop(path, 0), int(self._left))
        self._sent[path] = size  # now the last entry: sent most recently
        self._left -= nbytes
        return Tail(path, size - nbytes, nbytes)

    def _refill(self, now: float) -> None:
        passed_s = now - (now if self._refilled_at is None else self._refilled_at)
        self._left, self._refilled_at = min(BURST, self._left + RATE * passed_s), now
