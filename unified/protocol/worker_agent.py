"""Messages between a worker process and its agent, over the socket pair that the worker inherits."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec.msgpack import Decoder

from unified.job.names import MAX_PORTS
from unified.job.spec import JobSpec, WorkerPlace
from unified.protocol import records
from unified.protocol.agent_master import RoundNotice, RunOrder
from unified.protocol.stacks import StackReport
from unified.security.keys import ClusterKey
from unified.values import Value

AFTER_SAVE_S = 3.0
"""Time for a stopped worker to end after its checkpoint is written, if its grace period is over by then."""


class AgentOrder(Value, tag_field="type", frozen=True, kw_only=True):
    """Base of messages from the agent to one worker."""


class Launch(AgentOrder, tag="launch", frozen=True, kw_only=True):
    """First message: the worker's identity, and everything that it needs to start."""

    job_id: str
    spec: JobSpec
    """The description of its job; a stand-in without roles if `spec_bytes` is given."""
    kind: Literal["worker", "store"]
    name: str
    incarnation: int
    role: str
    place: WorkerPlace
    node: str
    host_id: str
    address: str
    """Address of this node for other hosts (and for GLOO_SOCKET_IFNAME)."""
    master: str
    """Control address of the master, for `PrimeMasterApi`."""
    relay: str
    """Address of the bus relay; empty if there is none."""
    run_dir: str
    """Folder of ipc sockets, with mode 0700."""
    log_file: str
    devices: list[records.Device] = []
    env: dict[str, str] = {}
    """Variables for `os.environ`, set before any user code is imported."""
    directory: list[records.DirectoryEntry] = []
    spec_bytes: int = 0
    """Size of the memory file with the description; its descriptor comes with this message. 0: no file."""
    ports: list[int] = []
    """TCP ports that the agent holds for the worker: those that its role names, and those of earlier incarnations."""
    code_dir: str = ""
    """Folder of the code that travels with the job; empty: it has none."""
    snapshot_token: str = ""
    """Token by which the node's snapshot server knows the job."""
    key: ClusterKey | None = None
    """Key of the cluster. It travels only here: never in an environment or a command line, or through the master."""


class Run(AgentOrder, tag="run", frozen=True, kw_only=True):
    """Order to run the entry point, in this round. A round that has begun is not begun again.

    A running worker that sent `Rejoins` gets a further order for each later round.
    """

    order: RunOrder


class Notice(AgentOrder, tag="notice", frozen=True, kw_only=True):
    """Notice that the round ends; a worker that has left that round ignores it."""

    notice: RoundNotice


class DirectoryNews(AgentOrder, tag="directory-news", frozen=True, kw_only=True):
    """Changed entries of the job's directory."""

    entries: list[records.DirectoryEntry]


class Stop(AgentOrder, tag="stop", frozen=True, kw_only=True):
    """Order to end within `grace_s`; then SIGKILL comes."""

    grace_s: float
    save_grace_s: float = 0.0
    """Further seconds to write a checkpoint."""
    reason: str
    interrupt: bool = False
    """True if somebody pressed Ctrl-C: the signal that comes with it is SIGINT."""


class KeyReplaced(AgentOrder, tag="key", frozen=True, kw_only=True):
    """News that the cluster's key has a successor."""

    key: ClusterKey


class DumpStacks(AgentOrder, tag="dump-stacks", frozen=True, kw_only=True):
    """Request for `StacksDumped` with the same number."""

    number: int


class RecordStep(AgentOrder, tag="record-step", frozen=True, kw_only=True):
    """Request to record the next step with ``torch.profiler`` beside the log; answered by `StepRecorded`."""

    within_s: float


class PortsHeld(AgentOrder, tag="ports-held", frozen=True, kw_only=True):
    """Answer to `PortsWanted` with the same `num`."""

    num: int
    ports: list[int] = []
    """All ports of the worker."""
    error: str = ""
    """Reason why there are no more ports."""


class WorkerWord(Value, tag_field="type", frozen=True, kw_only=True):
    """Base of messages from a worker to its agent."""


class Hello(WorkerWord, tag="hello", frozen=True, kw_only=True):
    """Hello: the process is up, its inbox is bound, and it is READY."""

    pid: int
    inbox: records.Inbox | None = None
    store_port: int | None = None


class Running(WorkerWord, tag="running", frozen=True, kw_only=True):
    """Acknowledgement of the order to run: the worker has left its last round, if it had one, and joins this one."""

    round: int
    is_ending: bool = False
    """True when a stop comes after the entry point has returned, while the program is ending, which takes time."""


class Rejoins(WorkerWord, tag="rejoins", frozen=True, kw_only=True):
    """Ability of the process to take part in a further round without a restart, and the rounds that it has left."""

    is_able: bool = False
    left_round: int = 0
    """Highest round whose process group it has left. A round that it leaves without a notice counts as broken."""


class Reported(WorkerWord, tag="reported", frozen=True, kw_only=True):
    """Progress of a worker, and the points of its series since its last report."""

    progress: records.Progress
    points: Annotated[list[records.WorkerReport], msgspec.Meta(max_length=records.MAX_POINTS)] = []


class Claimed(WorkerWord, tag="claimed", frozen=True, kw_only=True):
    """All names that a worker claims; the answer comes with the directory. An older set is ignored."""

    claims: records.NameClaims


class Finished(WorkerWord, tag="finished", frozen=True, kw_only=True):
    """Good end: the entry point returned and, unless others may call it, its program has ended. The process stays."""

    is_serving: bool = False
    """True for a worker of a service, whose work is to answer calls from now on."""


class Failed(WorkerWord, tag="failed", frozen=True, kw_only=True):
    """Bad end: the entry point raised, or could not be found; the process ends after this."""

    failure: records.Failure


class NodesChecked(WorkerWord, tag="nodes-checked", frozen=True, kw_only=True):
    """Outcome of the node check of a round. A worker that reports a bad outcome waits to be stopped."""

    report: records.NodeCheckReport


class Saving(WorkerWord, tag="saving", frozen=True, kw_only=True):
    """News that a checkpoint, for which a planned stop waits, is being written; with `is_over`: none is any more."""

    is_over: bool = False


class StacksDumped(WorkerWord, tag="stacks-dumped", frozen=True, kw_only=True):
    """Stacks of this worker: the answer to `DumpStacks`."""

    number: int
    report: StackReport


class PortsWanted(WorkerWord, tag="ports-wanted", frozen=True, kw_only=True):
    """Request for so many ports in all; answered by `PortsHeld`."""

    num: Annotated[int, msgspec.Meta(ge=1, le=MAX_PORTS)]


class StepRecorded(WorkerWord, tag="step-recorded", frozen=True, kw_only=True):
    """Answer to `RecordStep`."""

    error: str = ""
    """Reason why there is no record; empty: there is."""


AgentToWorker = Launch | Run | Notice | DirectoryNews | Stop | KeyReplaced | DumpStacks | RecordStep | PortsHeld
WorkerToAgent = (
    Hello
    | Running
    | Rejoins
    | Reported
    | Claimed
    | Finished
    | Failed
    | NodesChecked
    | Saving
    | StacksDumped
    | StepRecorded
    | PortsWanted
)
agent_to_worker: Decoder[AgentToWorker] = Decoder(AgentToWorker)
worker_to_agent: Decoder[WorkerToAgent] = Decoder(WorkerToAgent)
