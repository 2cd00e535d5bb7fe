"""What an agent's core can ask for: everything its shell knows how to do."""

from __future__ import annotations

from typing import Literal

from unified.protocol.agent_master import AgentToMaster, ReadAgentLog
from unified.protocol.worker_agent import AgentToWorker, Launch
from unified.values import Value
from unified_agent.core.events import Life


class SendMaster(Value, frozen=True):
    """Dropped without a word where no connection stands: whatever matters is said again."""

    message: AgentToMaster


class Reconnect(Value, frozen=True):
    """Make a new socket to the master: the old one may be half open."""


class StartWorker(Value, frozen=True):
    """Make a process and give it `launch` as its first word."""

    life: Life
    launch: Launch
    python: str | None = None
    is_fresh: bool = False
    """A new interpreter instead of a fork."""
    env: dict[str, str] = {}
    """Environment variables of a new interpreter that have to be there before it starts."""


class TellWorker(Value, frozen=True):
    life: Life
    message: AgentToWorker


class SignalWorker(Value, frozen=True):
    """`terminate`: SIGTERM to the process, `interrupt`: SIGINT. `kill`: SIGKILL to its whole group."""

    life: Life
    how: Literal["terminate", "interrupt", "kill"]


class KeepInterpreters(Value, frozen=True):
    """Zygotes of other interpreters than these may go."""

    pythons: list[str]


class SendLog(Value, frozen=True):
    """Read a worker's output and answer the master with it."""

    order: ReadAgentLog
    request_id: int


class Note(Value, frozen=True):
    """A fact or a decision with its reason, for the log."""

    event: str
    reason: str
    life: Life | None = None
    level: Literal["debug", "info", "warning", "error"] = "info"


class Exit(Value, frozen=True):
    """End the daemon; its workers are gone, or go with it."""

    code: int
    reason: str


AgentAction = (
    SendMaster | Reconnect | StartWorker | TellWorker | SignalWorker | KeepInterpreters | SendLog | Note | Exit
)
