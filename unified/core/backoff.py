"""Waits between tries: none at first, then doubled up to a limit, with random jitter."""

from __future__ import annotations

from random import Random

from unified.values import Value


class Backoff(Value, frozen=True, kw_only=True):
    """No wait for some tries, then waits that double up to a limit: by default 0, 0.5, 1, 2, 4, 8, 16, 30, 30 … s."""

    first_s: float = 0.5
    factor: float = 2.0
    limit_s: float = 30.0
    num_free: int = 1
    """Number of first tries without a wait."""

    def delay_s(self, attempt: int, rng: Random | None = None) -> float:
        """Return the seconds to wait before try number `attempt`, counted from 0.

        Args:
            rng: draws the wait from its upper half (equal jitter), so that callers that failed together do not try
                again together. None: the whole wait, for a single caller.
        """
        if attempt < self.num_free:
            return 0.0
        # A bounded exponent: 2.0 ** 2000 overflows, and the limit is long reached.
        delay_s = float(min(self.limit_s, self.first_s * self.factor ** min(attempt - self.num_free, 64)))
        return delay_s if rng is None else delay_s * rng.uniform(0.5, 1.0)
