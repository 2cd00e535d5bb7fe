"""The keeping of an agent's lease: when to renew it for the agent, and when the node's workers have to end.

A node that cannot renew its lease ends its workers before the master starts them elsewhere.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from unified.values import Value
from unified_agent.core.lease import NodeLease, request_id_at, request_time


class Contact(StrEnum):
    """Result of an attempt to connect to the master's port."""

    ACCEPTED = "accepted"
    """The master's process is there. If it answers nothing on a new connection, it hangs and decides nothing; or it
    cannot be read, and counts the node as lost."""
    REFUSED = "refused"
    """The master's host runs and its process does not: nobody decides anything."""
    NONE = "none"
    """Nothing came back, or no master's answer: the network is cut here, the master's host is gone, or another program
    has its address."""


class Renew(Value, frozen=True):
    """Send a heartbeat for the agent, with this request id."""

    request_id: int
    on_new_connection: bool


class Probe(Value, frozen=True):
    """Try to connect to the master's port, and report the result."""


class TellAgent(Value, frozen=True):
    """Tell the agent to end its workers."""

    reason: str


class Kill(Value, frozen=True):
    """Kill the node's workers and their zygotes; with `who` ``agent`` also the agent, which hangs."""

    who: Literal["workers", "agent"]
    reason: str


KeeperAction = Renew | Probe | TellAgent | Kill


class LeaseKeeping:
    """Decisions of the lease keeper; `step` is to be called at least every `next_look_s` seconds."""

    def __init__(self) -> None:
        self._answered_at = 0.0
        self._no_decision_at = 0.0
        """Last time at which a probe found that the master decides nothing."""
        self._is_locked_out = False
        self._renewed_at = float("-inf")
        self._connected_at = float("-inf")
        self._has_reported = False
        self._killed: Literal["", "workers", "agent"] = ""
        self._stepped_at = float("inf")
        self._resumed_at = 0.0
        """Last time at which the host resumed, and with it this process and the agent."""

    def next_look_s(self, lease: NodeLease) -> float:
        return lease.heartbeat_s / 2 if lease.lease_s else 0.1

    def answered(self, request_id: int) -> None:
        """Note that the master answered a heartbeat of the keeper."""
        self._answered_at = max(self._answered_at, request_time(request_id))

    def contact(self, now: float, found: Contact) -> None:
        """Take in the result of a probe."""
        if found is Contact.REFUSED or (found is Contact.ACCEPTED and not self._is_locked_out):
            self._no_decision_at = now

    def step(self, now: float, lease: NodeLease) -> list[KeeperAction]:
        self._is_locked_out = bool(lease.is_locked_out)
        paused_s, self._stepped_at = now - self._stepped_at, now
        if not lease.lease_s:
            return []
        if paused_s > lease.lease_s / 2:
            self._resumed_at = now
        answered_at = max(lease.answered_at, self._answered_at)
        silent_s = now - answered_at
        hung_s = now - max(lease.turned_at, self._resumed_at)
        if not lease.is_late(silent_s):
            self._has_reported, self._killed = False, ""
            return []
        if hung_s > lease.lease_s:  # a hanging agent's lease is not renewed
            return self._end_hung(now, answered_at, hung_s, lease)
        actions: list[KeeperAction] = []
        if now - self._renewed_at >= lease.heartbeat_s:
            actions += self._renew(now, silent_s, lease)
        alone_s = now - max(answered_at, self._no_decision_at)
        reason = f"this node has been cut off from its master for {alone_s:.1f} s, and its lease ends"
        if lease.is_ending(alone_s) and not self._has_reported:
            self._has_reported = True
            actions.append(TellAgent(reason))
        if lease.is_over(alone_s) and not self._killed:
            self._killed = "workers"
            actions.append(Kill("workers", reason))
        return actions

    def _renew(self, now: float, silent_s: float, lease: NodeLease) -> list[KeeperAction]:
        self._renewed_at = now
        in_doubt = lease.is_in_doubt(silent_s)
        is_new = in_doubt and now - self._connected_at > lease.reconnect_s / 2
        if is_new:
            self._connected_at = now
        renew = Renew(request_id_at(now), is_new)
        return [renew, Probe()] if in_doubt else [renew]

    def _end_hung(self, now: float, answered_at: float, hung_s: float, lease: NodeLease) -> list[KeeperAction]:
        if self._killed == "agent" or not lease.is_over(now - answered_at):
            return []
        self._killed = "agent"
        return [Kill("agent", f"the agent has done nothing for {hung_s:.1f} s")]
