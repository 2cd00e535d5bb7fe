"""Messages between an agent and the master, both directions.

The agent opens with `RegisterAgent`. Then the master sends the *desired* set of workers, and the agent reports the
*observed* set. A message has the whole set and a number, so a lost, repeated or late message changes nothing.
"""

from __future__ import annotations

from typing import Literal

from unified.job.spec import JobSpec, WorkerPlace
from unified.protocol.framing import Codec
from unified.protocol.records import (
    DirectoryEntry,
    Failure,
    Inbox,
    LogStream,
    NameClaims,
    NodeCheckReport,
    NodeResources,
    ProfileKind,
    Progress,
    WorkerState,
)
from unified.protocol.snapshots import EarlierNode, ServerAddress, SnapshotHost
from unified.protocol.stacks import StackReport
from unified.values import Value


class AgentMessage(Value, tag_field="type", frozen=True, kw_only=True):
    """Base of messages from the agent that `node` and `incarnation` name."""

    node: str
    incarnation: str


class RegisterAgent(AgentMessage, tag="register-agent", frozen=True, kw_only=True):
    """First message of an agent, sent again when the master does not know the agent."""

    hostname: str
    host_id: str
    """Host id: the same for all processes of one boot of one host."""
    address: str
    """Address at which other hosts reach this one."""
    pid: int
    resources: NodeResources
    labels: dict[str, str] = {}
    log_dir: str = ""
    log_archive: str = ""
    """Folder or ``s3://`` address that also gets the whole logs, in a folder for each job; empty: none."""
    release: str = ""
    cut_off: str = ""
    """Reason why this agent, whose lease ran out, ended all workers since its last registration; empty: it did not."""
    snapshots: SnapshotHost | None = None
    metrics: str = ""
    """``host:port`` of its metrics for Prometheus; empty: it has none."""


class AgentHeartbeat(AgentMessage, tag="heartbeat", frozen=True, kw_only=True):
    """Heartbeat of an agent, which renews its lease."""

    generation: int
    """Generation of the last desired set that the agent took."""
    stops: str = ""
    """Reason why this agent is about to stop; empty: it is not."""
    stops_in_s: float = 0.0
    """Time after which it stops its remaining workers."""


class AgentPulse(AgentMessage, tag="agent-pulse", frozen=True, kw_only=True):
    """Heartbeat for a busy agent, sent by its lease keeper, a process beside it."""


class AgentDied(AgentMessage, tag="agent-died", frozen=True, kw_only=True):
    """Message of the lease keeper: the agent's process ended without notice, and its workers are gone."""

    reason: str


class ObservedWorker(Value, frozen=True, kw_only=True):
    """One incarnation on the agent's node."""

    job_id: str
    name: str
    worker_incarnation: int
    kind: Literal["worker", "store"]
    state: WorkerState
    pid: int = 0
    round: int = 0
    """Last round that it began to run; 0: none yet."""
    inbox: Inbox | None = None
    store_port: int | None = None
    """Port of the TCPStore, of a store host that is READY."""
    progress: Progress | None = None
    failure: Failure | None = None
    """Failure of an incarnation that ended badly; an EXITED incarnation without a failure ended well."""
    log_file: str = ""
    """Path of its stderr on the node."""
    node_check: NodeCheckReport | None = None
    """Outcome of its last node check."""
    claims: NameClaims = NameClaims()
    """Newest claims of the incarnation."""
    can_rejoin: bool = False
    """True if its process can take part in a further round without a restart."""
    left_round: int = 0
    """Highest round whose process group it has left while its process goes on; 0: none."""
    output_lost: str = ""
    """Output that its node's disk refused; empty: none was lost."""


class ObservedWorkers(AgentMessage, tag="observed-workers", frozen=True, kw_only=True):
    """All incarnations that the agent knows. An EXITED one stays until a desired set leaves it out."""

    generation: int
    workers: list[ObservedWorker]


class LogRead(AgentMessage, tag="log-read", frozen=True, kw_only=True):
    """Answer to `ReadAgentLog`."""

    data: bytes
    offset: int
    """Offset of the first byte of `data`; larger than requested if older bytes were rotated away."""
    next_offset: int
    size: int
    """Bytes ever written."""
    path: str = ""
    error: str = ""
    is_missing: bool = False
    """True if there is no such file."""
    is_busy: bool = False
    """Same as `LogChunk.is_busy`."""


class OutputTail(Value, frozen=True, kw_only=True):
    """Newest bytes of one stream of a worker."""

    job_id: str
    worker: str
    worker_incarnation: int
    stream: Literal["out", "err"]
    offset: int
    data: bytes


class OutputTails(AgentMessage, tag="output-tails", frozen=True, kw_only=True):
    """Newest output of workers, for readers who come when this node is gone. Some of it may be left out."""

    tails: list[OutputTail]


class StacksRead(AgentMessage, tag="stacks-read", frozen=True, kw_only=True):
    """Answer to `ReadStacks`."""

    report: StackReport


class AgentLeaving(AgentMessage, tag="agent-leaving", frozen=True, kw_only=True):
    """Last message of an agent that stops in order: its workers are gone."""

    reason: str


class MasterOrder(Value, tag_field="type", frozen=True, kw_only=True):
    """Base of messages from the master to an agent."""


class AgentRegistered(MasterOrder, tag="agent-registered", frozen=True, kw_only=True):
    """Acceptance of an agent, and the terms."""

    lease_s: float
    heartbeat_s: float
    relay: str = ""
    """``tcp://host:port`` of the bus relay."""


class AgentRefused(MasterOrder, tag="agent-refused", frozen=True, kw_only=True):
    """Refusal of an agent. If `retry_after_s` is None, it ends with exit code 78 and this reason."""

    reason: str
    retry_after_s: float | None = None


class HeartbeatSeen(MasterOrder, tag="heartbeat-seen", frozen=True, kw_only=True):
    """Answer to a heartbeat or a pulse, with its request id: the lease was renewed. Also the answer to `AgentDied`."""


class MasterStopping(MasterOrder, tag="master-stopping", frozen=True, kw_only=True):
    """Last message of a master that stops in order. Its next incarnation gives up no agent within `away_s`."""

    away_s: float
    """Time for which the agent may keep its workers, even without a master."""


class RegisterAgain(MasterOrder, tag="register-again", frozen=True, kw_only=True):
    """Demand for a `RegisterAgent`: the master restarted, or counted this agent as lost."""


class RunOrder(Value, frozen=True, kw_only=True):
    """Order to a READY worker to run its entry point."""

    round: int
    rank: int
    world_size: int
    store_host: str = ""
    """Address of the torch TCPStore; empty for a role that is not elastic."""
    store_port: int = 0
    store_prefix: str = ""
    """Prefix of the round's keys; no two rounds share one."""
    node_rank: int = 0
    """Rank of its group among the groups of the round."""
    checks_nodes: bool = False
    """True if the ranks are to check their nodes before they begin."""


class RoundNotice(Value, frozen=True, kw_only=True):
    """Notice to a running worker that its round ends. Then another round begins, or the worker ends."""

    round: int
    """The round that ends."""
    kind: Literal["broken", "planned"]
    """`broken`: a peer is gone, so leave now, even a collective, which will never end. `planned`: the members change,
    so leave at the next point from which the others can go on."""
    reason: str
    within_s: float = 0.0
    """Time that a planned change waits for workers to leave, from this notice on."""


class DesiredWorker(Value, frozen=True, kw_only=True):
    """One incarnation that has to run. The agent stops all that are not desired."""

    job_id: str
    name: str
    """Full name of a worker, or ``store`` for the job's store host."""
    worker_incarnation: int
    kind: Literal["worker", "store"]
    role: str = ""
    place: WorkerPlace = WorkerPlace()
    devices: list[int] = []
    """Indices among the node's devices."""
    group_devices: list[int] = []
    """Devices of its role's workers in its group, in the order in which it sees them; empty: it sees only its own."""
    run: RunOrder | None = None
    notice: RoundNotice | None = None
    """Notice in force; None as soon as the next round is ordered."""


class DesiredJob(Value, frozen=True, kw_only=True):
    """Facts that the workers of one job have in common."""

    job_id: str
    spec: JobSpec | None = None
    """Description of the job; None if it was sent to the agent before. An agent that lacks it ignores the message."""
    directory: list[DirectoryEntry] = []
    """The whole directory as of now; empty if the agent has it already."""
    stop_grace_s: float | None = None
    """Seconds from SIGTERM to SIGKILL for workers that are no longer desired; None: the spec's value. 0 kills at once,
    even workers that are stopping already: so a job that is stopped by force stays listed without workers. An agent
    that itself stops uses the spec's value, unless this is 0."""
    is_interrupted: bool = False
    """True if somebody pressed Ctrl-C: its workers are stopped by SIGINT and not by SIGTERM."""
    copy_node: ServerAddress | None = None
    """Snapshot server of the job's copy node, which holds copies while all ranks of a role are on one node."""
    earlier_nodes: list[EarlierNode] = []
    """Nodes that its workers have left, for an agent whose workers look for snapshots there."""


class DesiredWorkers(MasterOrder, tag="desired-workers", frozen=True, kw_only=True):
    """Desired set: all workers that have to run on this node. The agent ignores a generation below its last one."""

    generation: int
    workers: list[DesiredWorker]
    jobs: list[DesiredJob]
    num_elsewhere: int = 0
    """Number of workers of other agents on this host, which share its CPUs."""


class DirectoryChanged(MasterOrder, tag="directory-changed", frozen=True, kw_only=True):
    """Entries of a job's directory that are new or changed."""

    job_id: str
    entries: list[DirectoryEntry]


class ReadAgentLog(MasterOrder, tag="read-agent-log", frozen=True, kw_only=True):
    """Ask for part of a worker's output; answered by `LogRead` with the same request id."""

    job_id: str
    worker: str
    worker_incarnation: int
    stream: LogStream
    offset: int
    """Offset of the first byte; negative: that many bytes before the end."""
    max_bytes: int
    keep: bool = False
    """Same as `ReadLog.keep`."""
    grep: str = ""
    since: float = 0.0
    until: float = 0.0
    take: ProfileKind | None = None
    wait_s: float = 0.0


class ReadStacks(MasterOrder, tag="read-stacks", frozen=True, kw_only=True):
    """Ask for the stacks of workers; answered by `StacksRead` with the same request id."""

    job_id: str
    workers: list[str]
    """Full names."""
    within_s: float
    """Time limit, at which the agent answers with the stacks that it has."""


class PassSignal(MasterOrder, tag="pass-signal", frozen=True, kw_only=True):
    """Send a signal to workers that handle it."""

    job_id: str
    workers: list[str]
    """Full names."""
    signal: int


AgentToMaster = (
    RegisterAgent
    | AgentHeartbeat
    | AgentPulse
    | AgentDied
    | ObservedWorkers
    | LogRead
    | OutputTails
    | StacksRead
    | AgentLeaving
)
MasterToAgent = (
    AgentRegistered
    | AgentRefused
    | HeartbeatSeen
    | MasterStopping
    | RegisterAgain
    | DesiredWorkers
    | DirectoryChanged
    | ReadAgentLog
    | ReadStacks
    | PassSignal
)
agent_to_master: Codec[AgentToMaster] = Codec(AgentToMaster)
master_to_agent: Codec[MasterToAgent] = Codec(MasterToAgent)
