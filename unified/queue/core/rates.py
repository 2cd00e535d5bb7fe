"""How often something happens, without keeping each time that it did."""

from __future__ import annotations

import math

WINDOW_S = 10.0
STEP_S = 1.0
"""What happens within so long is counted as having happened together."""


class Rate:
    """Things per second over about the last `WINDOW_S` seconds, the newest counting most."""

    def __init__(self, now: float) -> None:
        self._begun = now
        self._at = now
        self._weight = 0.0
        """Of all that happened before `_at`, as of then."""
        self._since = 0
        self.total = 0

    def add(self, now: float, count: int) -> None:
        if now - self._at > STEP_S:
            self._weight = self._faded(now)
            self._at, self._since = now, 0
        self._since += count
        self.total += count

    def per_second(self, now: float) -> float:
        seen = WINDOW_S * -math.expm1((self._begun - now) / WINDOW_S)
        return self._faded(now) / max(seen, STEP_S)

    def _faded(self, now: float) -> float:
        return (self._weight + self._since) * math.exp((self._at - now) / WINDOW_S)
