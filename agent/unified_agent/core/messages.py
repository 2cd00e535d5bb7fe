"""Events and actions of the agent's core."""

from __future__ import annotations

from typing import Literal

from unified.protocol.agent_master import AgentToMaster, MasterToAgent, ReadAgentLog
from unified.protocol.records import Failure, JobWorkerIncarnation
from unified.protocol.worker_agent import AgentToWorker, Launch, WorkerToAgent
from unified.values import Value


class MasterReached(Value, frozen=True):
    """A connection to the master's address stands."""


class MasterSaid(Value, frozen=True):
    message: MasterToAgent
    request_id: int = 0


class MasterUnreadable(Value, frozen=True):
    """Whoever answers there does not speak our protocol, or not our version of it."""

    reason: str


class KeyRefused(Value, frozen=True):
    """No connection can stand: the master and this agent have not the same cluster key."""

    reason: str


class WorkerStarted(Value, frozen=True):
    """Its process exists."""

    life: JobWorkerIncarnation
    pid: int


class WorkerNotStarted(Value, frozen=True):
    """There will be no process."""

    life: JobWorkerIncarnation
    failure: Failure


class WorkerSaid(Value, frozen=True):
    life: JobWorkerIncarnation
    word: WorkerToAgent


class WorkerExited(Value, frozen=True):
    """Its process is gone, and all it had to say has been heard."""

    life: JobWorkerIncarnation
    code: int
    """Exit code, or minus the signal."""
    last_lines: str = ""
    """The end of its stderr."""
    error: str = ""
    """Error that the process wrote into its error file, in one line."""
    traceback: str = ""
    """From there, too."""


class StopAsked(Value, frozen=True):
    """The operator, or the system, wants the agent to end."""

    reason: str
    at_once: bool = False


class DeadlineReached(Value, frozen=True):
    """Time has passed; `AgentCore.next_deadline` says when this is due."""


AgentEvent = (
    MasterReached
    | MasterSaid
    | MasterUnreadable
    | KeyRefused
    | WorkerStarted
    | WorkerNotStarted
    | WorkerSaid
    | WorkerExited
    | StopAsked
    | DeadlineReached
)


class SendMaster(Value, frozen=True):
    """Dropped without a word where no connection stands: whatever matters is said again."""

    message: AgentToMaster


class Reconnect(Value, frozen=True):
    """Make a new socket to the master: the old one may be half open."""


class StartWorker(Value, frozen=True):
    """Make a process and give it `launch` as its first word."""

    life: JobWorkerIncarnation
    launch: Launch
    python: str | None = None
    is_fresh: bool = False
    """A new interpreter instead of a fork."""
    env: dict[str, str] = {}
    """Environment variables of a new interpreter that have to be there before it starts."""


class TellWorker(Value, frozen=True):
    life: JobWorkerIncarnation
    message: AgentToWorker


class SignalWorker(Value, frozen=True):
    """`terminate`: SIGTERM to the process, `interrupt`: SIGINT. `kill`: SIGKILL to its whole group."""

    life: JobWorkerIncarnation
    how: Literal["terminate", "interrupt", "kill"]


class KeepInterpreters(Value, frozen=True):
    """Zygotes of other interpreters than these may go."""

    pythons: list[str]


class SendLog(Value, frozen=True):
    """Read a worker's output and answer the master with it."""

    order: ReadAgentLog
    request_id: int


class WriteLog(Value, frozen=True):
    """A fact or a decision with its reason, for the log."""

    event: str
    reason: str
    life: JobWorkerIncarnation | None = None
    level: Literal["debug", "info", "warning", "error"] = "info"


class Exit(Value, frozen=True):
    """End the daemon; its workers are gone, or go with it."""

    code: int
    reason: str


AgentAction = (
    SendMaster | Reconnect | StartWorker | TellWorker | SignalWorker | KeepInterpreters | SendLog | WriteLog | Exit
)
