"""The step context of the agent's core: the time, the timers, the actions so far; and the state of its shutdown."""

from __future__ import annotations

from typing import Literal, NamedTuple

from unified.core.timers import TimerTable
from unified.protocol.agent_master import AgentToMaster
from unified.protocol.records import JobWorkerIncarnation
from unified_agent.core.messages import AgentAction, SendMaster, WriteLog

MARGIN_S = 2.0
"""Time from the last SIGKILL to the moment at which the agent stops waiting to see it work."""


class AgentTimer(NamedTuple):
    """Key of a deadline."""

    kind: Literal["register", "heartbeat", "observe", "complain", "reconnect", "drain", "start", "kill"]
    life: JobWorkerIncarnation | None = None


class AgentStep:
    """The answer to one event, while it grows."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: TimerTable[AgentTimer] = TimerTable()
        self.actions: list[AgentAction] = []

    def act(self, action: AgentAction) -> None:
        self.actions.append(action)

    def send(self, message: AgentToMaster) -> None:
        self.actions.append(SendMaster(message=message))

    def report(
        self,
        event: str,
        reason: str,
        life: JobWorkerIncarnation | None = None,
        *,
        level: Literal["debug", "info", "warning", "error"] = "info",
    ) -> None:
        self.actions.append(WriteLog(event=event, reason=reason, life=life, level=level))

    def arm(self, timer: AgentTimer, in_s: float) -> None:
        self.timers.arm(timer, self.now + in_s)


class Shutdown:
    """The agent's shutdown: its reason, and its haste."""

    def __init__(self) -> None:
        self.reason = ""
        self.has_begun = False
        self.is_at_once = False

    def begin(self, reason: str, *, at_once: bool) -> None:
        """Begin, or hurry up: asked twice means at once."""
        self.is_at_once = at_once or self.has_begun
        self.reason = self.reason or reason
        self.has_begun = True
