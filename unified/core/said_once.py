"""What to log of things that anybody can make happen again and again."""

from __future__ import annotations

FORGET_S = 3600.0
MAX_KNOWN = 1000


class SaidOnce:
    """Says a thing when it is new, and then only counts it.

    A thing that happens again after an hour of silence is new once more. At most a thousand are known: of more, as
    whoever chooses them can make, those not seen for longest are forgotten.

    Attributes:
        total: how often any of them happened.
    """

    def __init__(self, forget_s: float = FORGET_S, max_known: int = MAX_KNOWN) -> None:
        self._forget_s = forget_s
        self._max_known = max_known
        self._seen_at: dict[str, float] = {}
        """Oldest first."""
        self.total = 0

    def is_new(self, now: float, thing: str) -> bool:
        """It happened; whether that is worth a line."""
        self.total += 1
        seen_at = self._seen_at.pop(thing, None)
        self._seen_at[thing] = now
        if len(self._seen_at) > self._max_known:
            del self._seen_at[next(iter(self._seen_at))]
        return seen_at is None or now - seen_at > self._forget_s
