"""How long to wait before trying again."""

from __future__ import annotations

from unified.values import Value


class Backoff(Value, frozen=True, kw_only=True):
    """Some tries at once, then waits that double up to a limit: by default 0, 0.5, 1, 2, 4, 8, 16, 30, 30 … seconds."""

    first_s: float = 0.5
    factor: float = 2.0
    limit_s: float = 30.0
    num_free: int = 1
    """This many tries wait for nothing."""

    def delay_s(self, attempt: int) -> float:
        """Seconds to wait before try number `attempt`, counted from 0."""
        if attempt < self.num_free:
            return 0.0
        # A bounded exponent: 2.0 ** 2000 overflows, and the limit is long reached.
        return float(min(self.limit_s, self.first_s * self.factor ** min(attempt - self.num_free, 64)))
