"""Rates of requests, limited by token buckets."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

MAX_CLIENTS = 4096


class TokenBucket:
    """A rate limit with bursts: at most `burst` tokens; `rate` tokens come back each second.

    Args:
        rate: tokens a second; 0 for no limit.
    """

    def __init__(self, rate: float, burst: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate = rate
        self.burst = max(1.0, burst)
        self._clock = clock
        self._left = self.burst
        self._at = clock()

    def take(self) -> bool:
        """Take one token; False if there is none."""
        if not self.rate:
            return True
        now = self._clock()
        self._left = min(self.burst, self._left + (now - self._at) * self.rate)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def wait_s(self) -> float:
        return max(0.0, (1.0 - self._left) / self.rate) if self.rate else 0.0


class RateLimits:
    """A bucket for each client and kind of request, limited to the `MAX_CLIENTS` that were used last.

    Args:
        writes: rate and burst of requests that change something.
        reads: rate and burst of all other requests.
    """

    def __init__(
        self,
        writes: tuple[float, float] = (50.0, 500.0),
        reads: tuple[float, float] = (0.0, 1.0),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rates = {True: writes, False: reads}
        self._clock = clock
        self._buckets: OrderedDict[tuple[str, bool], TokenBucket] = OrderedDict()

    def admit(self, client: str, *, is_write: bool) -> float | None:
        """Count a request; return None if it may pass, else the seconds after which the client should try again."""
        rate, burst = self._rates[is_write]
        if not rate:
            return None
        bucket = self._buckets.pop((client, is_write), None) or TokenBucket(rate, burst, clock=self._clock)
        self._buckets[client, is_write] = bucket
        if len(self._buckets) > MAX_CLIENTS:
            self._buckets.popitem(last=False)
        return None if bucket.take() else bucket.wait_s()
