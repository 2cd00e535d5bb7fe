"""Leases: each key counts as alive until its lease runs out. Every message from it renews the lease."""

from __future__ import annotations

from typing import Generic, TypeVar

from unified.core.timers import TimerTable

K = TypeVar("K", bound=object)


class LeaseTable(Generic[K]):
    """Deadlines that are renewed far more often than they pass.

    Renewing costs one dictionary write: a key's timer stays where it is, and is corrected only when it is due. So
    `next_check` may be earlier than any real deadline; a check that finds nothing is no error.
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._deadline: dict[K, float] = {}
        self._checks: TimerTable[K] = TimerTable()
        """A timer for each key, at its deadline or before."""

    def renew(self, key: K, now: float, *, lease_s: float | None = None) -> None:
        """Count `key` as alive for `lease_s` more seconds (default: the table's)."""
        deadline = now + (self.lease_s if lease_s is None else lease_s)
        known = self._deadline.get(key)
        self._deadline[key] = deadline
        if known is None or deadline < known:
            self._checks.arm(key, deadline)

    def drop(self, key: K) -> None:
        """Forget a key; a key without a lease is no error."""
        self._deadline.pop(key, None)
        self._checks.cancel(key)

    def deadline(self, key: K) -> float | None:
        """Return the time at which a lease runs out; None without a lease."""
        return self._deadline.get(key)

    @property
    def next_check(self) -> float | None:
        """Time before which no lease runs out; None when there are no leases."""
        return self._checks.next_deadline

    def expired(self, now: float) -> list[K]:
        """Take out and return the keys whose lease has run out, earliest first."""
        keys: list[K] = []
        for key in self._checks.due(now):
            if self._deadline[key] > now:
                self._checks.arm(key, self._deadline[key])
            else:
                del self._deadline[key]
                keys.append(key)
        return keys
