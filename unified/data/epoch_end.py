"""How a reader whose own shards are done waits for those of the others. No clock here."""

from __future__ import annotations

_SHORTEST_S, _LONGEST_S = 0.05, 2.0
"""From one look to the next."""


class Patience:
    """When to look again whether an epoch is over, and when to give it up.

    Args:
        limit_s: so long it waits without any shard being finished; ``math.inf``: for ever.
        now: seconds, on any clock.
    """

    def __init__(self, limit_s: float, now: float) -> None:
        self._limit_s = limit_s
        self._began_at = self._moved_at = now
        self._num_left: int | None = None

    def next_look_s(self, now: float, num_left: int) -> float | None:
        """Seconds until the next look, if at this one so many shards were left; None: nobody has finished one for too
        long. The longer it waits, the more seldom it looks.
        """
        if num_left != self._num_left:
            self._num_left, self._moved_at = num_left, now
        spare_s = self._moved_at + self._limit_s - now
        if spare_s <= 0:
            return None
        return min(max((now - self._began_at) / 10, _SHORTEST_S), _LONGEST_S, spare_s)
