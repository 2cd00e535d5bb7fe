"""The lease of a node, as both its agent and its lease keeper compute it. All times are of the host's clock.

The master counts a node as alive for `lease_s` after its last message, and then starts its workers elsewhere.
"""

from __future__ import annotations

from typing import NamedTuple

TELL_AT = 0.8
"""Part of the lease after which an agent that is cut off is told to end its workers."""
KILL_AT = 0.9
"""Part of the lease after which the workers are killed, whatever the agent does."""
DOUBT_AT = 1 / 3
"""Part of the lease after which a connection without answers is made anew."""
LATE_HEARTBEATS = 1.5
"""Number of heartbeats without an answer after which the agent counts as busy."""


class NodeLease(NamedTuple):
    """The lease as the agent's loop knows it."""

    lease_s: float = 0.0
    """0: the master has never answered."""
    heartbeat_s: float = 0.0
    answered_at: float = 0.0
    """Sending time of the last heartbeat that was answered: the master counts the lease from then or later."""
    turned_at: float = 0.0
    """Time of the last turn of the agent's loop."""
    is_locked_out: float = 0.0
    """1.0 while the master refuses the key of this node, or cannot be read."""

    @property
    def reconnect_s(self) -> float:
        """Time from one new connection to the next, to a master that does not answer."""
        return DOUBT_AT * self.lease_s

    def is_late(self, silent_s: float) -> bool:
        """Return True if the next answer should have come within this time."""
        return silent_s > LATE_HEARTBEATS * self.heartbeat_s

    def is_in_doubt(self, silent_s: float) -> bool:
        """Return True if the connection may be broken, after this time without an answer."""
        return silent_s > DOUBT_AT * self.lease_s

    def is_ending(self, alone_s: float) -> bool:
        """Return True if a node that was cut off for this time has to end its workers."""
        return alone_s >= TELL_AT * self.lease_s

    def is_over(self, alone_s: float) -> bool:
        """Return True if the workers of a node that was cut off for this time must be dead."""
        return alone_s >= KILL_AT * self.lease_s


def request_id_at(now: float) -> int:
    """Return the request id of a heartbeat: its time in milliseconds, so that the answer tells when it was sent."""
    return int(now * 1000)


def request_time(request_id: int) -> float:
    """Return the sending time of the heartbeat that has this request id."""
    return request_id / 1000
