"""Fail-over of the connection to a peer on another host: directly, or through the relay. Pure: events and time in."""

from __future__ import annotations

from typing import Literal

State = Literal["connecting", "up", "relayed", "broken"]
CONNECT_WITHIN_S = 3.0
"""Time to connect before messages go through the relay. If the first packet to a reachable peer is lost, it is sent
again after one second."""
GIVE_UP_AFTER_S = 15.0
"""Time to connect without a relay, before waiting messages are lost."""
QUIET_S = 2.0
"""Silence on the relay before messages go directly again, so that none overtakes another."""


class DirectOrRelay:
    """State of the connection to one inbox, as long as it lasts.

    ====================  ==========================================================================================
    `connecting`          messages are kept, and surely not delivered
    `up`                  messages are sent, and may be lost with the connection
    `relayed`             kept and new messages go through the relay; a direct connection is still tried
    `broken`              the end: sent messages may be lost. Later messages use a new connection
    ====================  ==========================================================================================

    Args:
        has_relay: there is one.
        is_relayed: begin in `relayed`: the peer itself came through the relay, so do not wait for a direct connection.
    """

    def __init__(self, now: float, *, has_relay: bool, is_relayed: bool = False) -> None:
        self.state: State = "relayed" if is_relayed else "connecting"
        self._has_relay = has_relay
        self._began_at = now
        self._is_connected = False
        self._relayed_at = now

    def connected(self) -> None:
        self._is_connected = True
        if self.state == "connecting":
            self.state = "up"

    def disconnected(self) -> None:
        """Note that the connection, or an attempt at one, has ended."""
        self._is_connected = False
        if self.state == "up":
            self.state = "broken"

    def used_relay(self, now: float) -> None:
        """Note that a message went through the relay, or waits for it."""
        self._relayed_at = now

    def passed(self, now: float) -> None:
        if self.state == "connecting":
            if self._has_relay and now - self._began_at >= CONNECT_WITHIN_S:
                self.state = "relayed"
                self._relayed_at = now
            elif not self._has_relay and now - self._began_at >= GIVE_UP_AFTER_S:
                self.state = "broken"
        elif self.state == "relayed" and self._is_connected and now - self._relayed_at >= QUIET_S:
            self.state = "up"
