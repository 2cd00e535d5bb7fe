"""What can happen to an agent: everything its core is ever told."""

from __future__ import annotations

from typing import NamedTuple

from unified.protocol.agent_master import MasterToAgent
from unified.protocol.records import Failure
from unified.protocol.worker_agent import WorkerToAgent
from unified.values import Value


class Life(NamedTuple):
    """One life of one worker: the key of everything local."""

    job_id: str
    name: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.job_id}/{self.name}#{self.incarnation}"


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

    life: Life
    pid: int


class WorkerNotStarted(Value, frozen=True):
    """There will be no process."""

    life: Life
    failure: Failure


class WorkerSaid(Value, frozen=True):
    life: Life
    word: WorkerToAgent


class WorkerExited(Value, frozen=True):
    """Its process is gone, and all it had to say has been heard."""

    life: Life
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
