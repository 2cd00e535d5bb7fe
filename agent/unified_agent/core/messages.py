"""Events and actions of the agent's core."""

from __future__ import annotations

from typing import Literal

from unified.protocol.agent_master import AgentToMaster, MasterToAgent, ReadAgentLog
from unified.protocol.records import Evidence, Failure, JobWorkerIncarnation, WorkerReport
from unified.protocol.stacks import StackReport, WorkerStacks
from unified.protocol.worker_agent import AgentToWorker, Launch, WorkerToAgent
from unified.values import Value
from unified_agent.environment import ZygoteKey


class MasterReached(Value, frozen=True):
    """A connection to the master's address is up."""


class MasterSaid(Value, frozen=True):
    message: MasterToAgent
    request_id: int = 0


class MasterUnreadable(Value, frozen=True):
    """The peer at the master's address does not speak this protocol, or not this version of it."""

    reason: str
    may_pass: bool = False
    """True: the master met a defect of its own, and may understand the agent the next time."""


class KeyRefused(Value, frozen=True):
    """No connection is possible: the master and this agent have different cluster keys."""

    reason: str


class LeaseLost(Value, frozen=True):
    """The master could not be reached for so long that it is about to start this node's workers elsewhere."""

    reason: str


class WorkerStarted(Value, frozen=True):
    """A worker's process exists."""

    incarnation: JobWorkerIncarnation
    pid: int


class WorkerNotStarted(Value, frozen=True):
    incarnation: JobWorkerIncarnation
    failure: Failure


class WorkerSaid(Value, frozen=True):
    incarnation: JobWorkerIncarnation
    word: WorkerToAgent


class WorkerExited(Value, frozen=True):
    """A worker's process is gone, and all its messages and output have been read."""

    incarnation: JobWorkerIncarnation
    code: int
    """Exit code, or minus the signal."""
    last_lines: str = ""
    """The end of its stderr."""
    error: str = ""
    """Error that the process wrote into its error file, in one line."""
    traceback: str = ""
    """Traceback from the error file."""
    evidence: Evidence | None = None


class OutputDropped(Value, frozen=True):
    incarnation: JobWorkerIncarnation
    stream: str
    text: str


class StopAsked(Value, frozen=True):
    """The operator, or the system, wants the agent to end."""

    reason: str
    at_once: bool = False


class HeldStacksRead(Value, frozen=True):
    """Answer to `ReadHeldStacks`."""

    incarnation: JobWorkerIncarnation
    number: int
    report: StackReport


class SnapshotsReported(Value, frozen=True):
    """The snapshot server has, or no longer has, snapshots to write to storage before the agent ends."""

    is_to_persist: bool


class AgentTick(Value, frozen=True):
    """Time has passed; `AgentCore.next_deadline` says when this is due."""


AgentEvent = (
    MasterReached
    | MasterSaid
    | MasterUnreadable
    | KeyRefused
    | LeaseLost
    | WorkerStarted
    | WorkerNotStarted
    | WorkerSaid
    | WorkerExited
    | OutputDropped
    | StopAsked
    | SnapshotsReported
    | HeldStacksRead
    | AgentTick
)


class SendMaster(Value, frozen=True):
    """Send the master a message. Without a connection it is dropped: everything that matters is sent again."""

    message: AgentToMaster
    request_id: int = 0
    """Id of the request that it answers, or its own id if it is a request; 0: none."""


class Reconnect(Value, frozen=True):
    """Make a new socket to the master: the old one may be half open."""


class StartWorker(Value, frozen=True):
    """Make a process and give it `launch` as its first message."""

    incarnation: JobWorkerIncarnation
    launch: Launch
    zygote: ZygoteKey
    is_fresh: bool = False
    """True: a new interpreter instead of a fork."""
    env: dict[str, str] = {}
    """Environment variables that a new interpreter needs before it starts."""


class TellWorker(Value, frozen=True):
    incarnation: JobWorkerIncarnation
    message: AgentToWorker


class SignalWorker(Value, frozen=True):
    """Send a worker SIGTERM (`terminate`) or SIGINT (`interrupt`), or its whole group SIGKILL (`kill`); or another
    signal if it handles that."""

    incarnation: JobWorkerIncarnation
    how: Literal["terminate", "interrupt", "kill"] | int


class KeepZygotes(Value, frozen=True):
    """Close all other zygotes, except the agent's own."""

    keys: list[ZygoteKey]


class HoldPorts(Value, frozen=True):
    """Hold TCP ports for a worker, `num` in all, and answer the worker with `PortsHeld`."""

    incarnation: JobWorkerIncarnation
    num: int


class SendLog(Value, frozen=True):
    """Read a worker's output and answer the master with it."""

    order: ReadAgentLog
    request_id: int
    error: str = ""
    """Reason why it cannot be read; empty: read it."""


class SampleWorker(Value, frozen=True):
    """Take a profile of a worker from outside, and answer the master with it."""

    incarnation: JobWorkerIncarnation
    pid: int
    order: ReadAgentLog
    request_id: int


class ReadHeldStacks(Value, frozen=True):
    """Read the stacks of a worker whose interpreter does not answer, into `worker`; answered by `HeldStacksRead`."""

    incarnation: JobWorkerIncarnation
    number: int
    worker: WorkerStacks
    within_s: float


class KeepReports(Value, frozen=True):
    """Write a worker's reports to a file beside its log."""

    incarnation: JobWorkerIncarnation
    reports: list[WorkerReport]


class WriteLog(Value, frozen=True):
    """Write a fact or a decision with its reason into the log."""

    event: str
    reason: str
    incarnation: JobWorkerIncarnation | None = None
    level: Literal["debug", "info", "warning", "error"] = "info"


class PersistHeld(Value, frozen=True):
    """Let the snapshot server write to storage the snapshots that are not there yet."""


class Exit(Value, frozen=True):
    """End the daemon; its workers are gone, or go with it."""

    code: int
    reason: str


AgentAction = (
    SendMaster
    | Reconnect
    | StartWorker
    | TellWorker
    | SignalWorker
    | KeepZygotes
    | HoldPorts
    | SendLog
    | SampleWorker
    | ReadHeldStacks
    | KeepReports
    | WriteLog
    | PersistHeld
    | Exit
)
