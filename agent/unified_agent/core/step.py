"""The step context of the agent's core: the time, the timers, and the actions so far."""

from __future__ import annotations

from typing import Literal, NamedTuple

from unified.core.timers import TimerTable
from unified.protocol.agent_master import AgentToMaster
from unified.protocol.records import JobWorkerIncarnation
from unified_agent.core.messages import AgentAction, SendMaster, WriteLog

OBSERVE_EACH_S = 2e-5
"""Least delay of a report, per worker in it."""


class AgentTimer(NamedTuple):
    """Key of a deadline."""

    kind: Literal[
        "register", "heartbeat", "observe", "end", "complain", "reconnect", "vacate", "drain", "start", "kill", "stacks"
    ]
    incarnation: JobWorkerIncarnation | None = None


class AgentStep:
    """Time of the current step, its actions so far, and the timers."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: TimerTable[AgentTimer] = TimerTable()
        self.actions: list[AgentAction] = []

    def act(self, action: AgentAction) -> None:
        self.actions.append(action)

    def send(self, message: AgentToMaster, request_id: int = 0) -> None:
        self.actions.append(SendMaster(message=message, request_id=request_id))

    def report(
        self,
        event: str,
        reason: str,
        incarnation: JobWorkerIncarnation | None = None,
        *,
        level: Literal["debug", "info", "warning", "error"] = "info",
    ) -> None:
        self.actions.append(WriteLog(event=event, reason=reason, incarnation=incarnation, level=level))

    def arm(self, timer: AgentTimer, in_s: float) -> None:
        self.timers.arm(timer, self.now + in_s)
