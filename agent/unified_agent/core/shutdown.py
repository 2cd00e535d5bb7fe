"""The agent's own end: workers stopped gracefully, the master told, and a deadline for all of it."""

from __future__ import annotations

MARGIN_S = 2.0
"""From the last SIGKILL to the moment at which the agent stops waiting to see it work."""


class Shutdown:
    """Whether the agent is ending, why, and how fast."""

    def __init__(self) -> None:
        self.reason = ""
        self.has_begun = False
        self.is_at_once = False

    def begin(self, reason: str, *, at_once: bool) -> None:
        """Begin, or hurry up: asked twice means at once."""
        self.is_at_once = at_once or self.has_begun
        self.reason = self.reason or reason
        self.has_begun = True
