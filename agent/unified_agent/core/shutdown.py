"""The agent's own end: workers stopped gracefully, the master told, and a deadline for all of it."""

from __future__ import annotations

MARGIN_S = 2.0
"""From the last SIGKILL to the moment at which the agent stops waiting to see it work."""


class Shutdown:
    """Whether the agent is ending, why, and since when."""

    def __init__(self) -> None:
        self.reason = ""
        self.is_at_once = False
        self.deadline: float | None = None

    @property
    def has_begun(self) -> bool:
        return self.deadline is not None

    def begin(self, now: float, reason: str, longest_grace_s: float, *, at_once: bool) -> None:
        """Begin, or hurry up: asked twice means at once."""
        self.is_at_once = at_once or self.has_begun
        self.reason = self.reason or reason
        grace_s = 0.0 if self.is_at_once else longest_grace_s
        self.deadline = now + grace_s + MARGIN_S
