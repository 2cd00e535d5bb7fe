"""Messages between a client (driver, CLI, or a worker for its user) and the master. A request has one answer."""

from __future__ import annotations

from unified.job.spec import Digest, JobSpec
from unified.protocol.columns import Columns
from unified.protocol.framing import Codec
from unified.protocol.records import (
    DirectoryEntry,
    EventRecord,
    Failure,
    LogStream,
    NodeResources,
    NodeState,
    ProfileKind,
    Progress,
    Stage,
    TimeSpent,
    WorkerState,
)
from unified.protocol.stacks import StackReport
from unified.values import Value


class ClientRequest(Value, tag_field="type", frozen=True, kw_only=True):
    """Base of requests. `job` is a job's id, or its name for the newest job of that name."""


class SubmitJob(ClientRequest, tag="submit-job", frozen=True, kw_only=True):
    spec: JobSpec
    wait: bool = True
    """True: a job that does not fit now waits; False: it is refused."""
    joins: bool = False
    """True to join an unfinished job of this name with the same workers, as with torchrun: one command per host."""
    follows: str | None = None
    """Id of the newest job of this name that the submitter knows, which has ended; empty: it knows none. If another job
    is the newest, the request is refused as name-taken, so it is safe to send it twice. None: any ended job will do."""
    kept_env: list[str] = []
    """Variables that each role takes from the role of its name in the job `follows`: the submitter does not know their
    values."""
    unique_labels: list[str] = []
    """Labels whose values no other unfinished job may have; otherwise the job is refused as name-taken."""


class ListJobs(ClientRequest, tag="list-jobs", frozen=True, kw_only=True):
    labels: dict[str, str] = {}
    """Labels, with values, of the listed jobs."""
    stages: list[Stage] = []
    """Stages of the listed jobs; empty: any."""
    text: str = ""
    """Text in the id or the submitter of the listed jobs."""
    before: str = ""
    """Id of the first job on the previous page: only older jobs are listed; empty: all."""
    limit: int = 0
    """Number of jobs to list, the newest; 0: all."""


class GetJob(ClientRequest, tag="get-job", frozen=True, kw_only=True):
    """Request for a `JobStatus`, at once. `WatchCluster` waits for changes."""

    job: str
    annotations: bool = False
    """True to have the job's annotations too."""


class ListNodes(ClientRequest, tag="list-nodes", frozen=True, kw_only=True):
    pass


class WatchCluster(ClientRequest, tag="watch-cluster", frozen=True, kw_only=True):
    """Request for `Changes` after a version, as soon as there are any, and at the latest when `wait_s` is over."""

    job: str = ""
    """Job that is watched, with its workers; empty: all jobs, nodes and events."""
    has_workers: bool = True
    """False to get jobs without their workers."""
    after_version: int = -1
    """Version that the client has. If the master does not know it, the answer has everything."""
    wait_s: float = 0.0
    settle_s: float = 0.0
    """Time for which the master gathers changes before it sends them. A decision about `job` is sent at once."""


class ReadLog(ClientRequest, tag="read-log", frozen=True, kw_only=True):
    """Request for a `LogChunk`, at once."""

    job: str
    worker: str
    incarnation: int | None = None
    """Incarnation; None: the newest."""
    stream: LogStream = "both"
    offset: int = 0
    """Offset of the first byte; negative: that many bytes before the end."""
    max_bytes: int = 65536
    keep: bool = False
    """True to read on later and miss no byte. Until the next request, for at most 30 s, no byte from `offset` on is
    rotated away; a worker that prints faster waits when its log is full."""
    grep: str = ""
    """Regular expression of Python: only matching lines are sent. The log's host searches one part of the stream at a
    time; `LogChunk.next_offset` is the end of that part. Empty: every line."""
    since: float = 0.0
    """Leave out output from before this time (seconds since 1970, by its host's clock); 0: nothing."""
    until: float = 0.0
    """Leave out output from after this time; 0: nothing."""
    take: ProfileKind | None = None
    """Kind of profile to take first, if the stream is `profile` and the worker runs."""
    wait_s: float = 0.0
    """Time to sample the worker, or time limit for the step to record; 10 minutes at most."""


class StopJob(ClientRequest, tag="stop-job", frozen=True, kw_only=True):
    job: str
    force: bool = False
    """True for SIGKILL at once."""
    reason: str = "asked by the user"
    interrupt: bool = False
    """True for Ctrl-C: the workers are stopped by SIGINT and not by SIGTERM."""


class SignalWorkers(ClientRequest, tag="signal-workers", frozen=True, kw_only=True):
    """Send a signal to a job's workers that handle it. If the master is slow to answer, the signal may come twice."""

    job: str
    signal: int


class DrainNode(ClientRequest, tag="drain-node", frozen=True, kw_only=True):
    """Take a node out of service, or put it back: workers on it move, and no other begins there. Nothing is charged."""

    node: str
    reason: str = "asked by the user"
    is_over: bool = False
    """True to put it back; `reason` then says who asked."""


class SuspendJob(ClientRequest, tag="suspend-job", frozen=True, kw_only=True):
    """Stop the workers of a job, which waits until it is resumed. Nothing is charged."""

    job: str = ""
    """Job; empty: every job that has not ended."""
    reason: str = "asked by the user"


class ResumeJob(ClientRequest, tag="resume-job", frozen=True, kw_only=True):
    """Put a suspended job back into the queue."""

    job: str = ""
    """Job; empty: every job that has not ended."""
    reason: str = ""
    """Cause, for the event log."""


class RestartWorkers(ClientRequest, tag="restart-workers", frozen=True, kw_only=True):
    job: str
    workers: list[str]
    """Workers by full name; empty: the whole job."""


class Explain(ClientRequest, tag="explain", frozen=True, kw_only=True):
    """Request for a `Story`: events of a job, or of one worker of it, oldest first."""

    job: str
    worker: str = ""
    limit: int = 500
    before: int | None = None
    """Sequence of the first event on the previous page: only older events are listed; None: the newest."""


class GetStacks(ClientRequest, tag="get-stacks", frozen=True, kw_only=True):
    """Request for `JobStacks`: the stacks that the workers of a job, or their agents, report within `wait_s`."""

    job: str
    role: str = ""
    """Only this role; empty: all."""
    rank: int | None = None
    """Only this rank of each role; None: all."""
    wait_s: float = 5.0


class GetDirectory(ClientRequest, tag="get-directory", frozen=True, kw_only=True):
    """Request for a `JobDirectory`, at once, by a client outside the job that calls its workers."""

    job: str
    after_revision: int = -1
    """Revision that the client has: its entries need not be sent again."""


class CodeRequest(ClientRequest, frozen=True, kw_only=True):
    """Base of requests about the code of jobs: archives, by their digests."""

    digest: Digest


class FindCode(CodeRequest, tag="find-code", frozen=True, kw_only=True):
    """Request for a `CodeState`."""


class PutCode(CodeRequest, tag="put-code", frozen=True, kw_only=True):
    """Next bytes of an archive, after those that the master has; answered by the new `CodeState`."""

    size: int
    """Bytes of the whole archive."""
    offset: int
    data: bytes


class ReadCode(CodeRequest, tag="read-code", frozen=True, kw_only=True):
    """Request for a `CodePart` from `offset` on."""

    offset: int


class MasterAnswer(Value, tag_field="type", frozen=True, kw_only=True):
    """Base of answers."""


class Accepted(MasterAnswer, tag="accepted", frozen=True, kw_only=True):
    job_id: str
    submitted_by: str = ""
    """Submitter of a job that was joined; empty for a new one."""


class Done(MasterAnswer, tag="done", frozen=True, kw_only=True):
    """Success: the request was carried out, or will be."""

    note: str = ""
    incarnations: dict[str, int] = {}
    """New incarnation of each restarted worker, by full name; it may begin later."""


class Refused(MasterAnswer, tag="refused", frozen=True, kw_only=True):
    """Refusal. `code`: bad-request, version, not-found, name-taken, does-not-fit, ended,
    unknown-worker (not registered, or lost), replaced (by a newer incarnation of that worker),
    unavailable (the process that knows cannot be reached), defect (of Unified)."""

    code: str
    reason: str


class WorkerStatus(Value, frozen=True, kw_only=True):
    """One worker: its newest incarnation, and counts over all its incarnations."""

    name: str
    """Full name: ``trainer_4-1_2-1``."""
    role: str
    rank: int
    """Rank in its role."""
    local_rank: int
    node_rank: int
    incarnation: int
    """0 for the first; -1: none has begun."""
    state: WorkerState
    node: str = ""
    address: str = ""
    """IP address of the node."""
    pid: int = 0
    devices: list[int] = []
    num_failures: int = 0
    """Failures that are charged to it, within the job's `restart_window_s`."""
    progress: Progress | None = None
    log_file: str = ""
    """Path of its stderr on the node."""
    reason: str = ""
    """Reason of the last decision about it."""
    num_unread_errors: int = 0
    """Failed calls of its code, in all incarnations, whose errors nobody read."""
    output_lost: str = ""
    """Output of its newest incarnation that its node's disk refused; empty: none was lost."""


class RoleStatus(Value, frozen=True, kw_only=True):
    """One role."""

    name: str
    kind: str
    """``elastic``, ``simple`` or ``custom``."""
    total: int
    """Workers that were asked for."""
    is_driver: bool
    """True if the job waits for its end."""
    round: int = 0
    """Number of the rendezvous round that its ranks are in; 0: none yet."""
    num_restarts: int = 0
    """Restarts of all its workers at once."""


class BudgetUse(Value, frozen=True, kw_only=True):
    """Part of one limit that is used up."""

    limit: str
    """Name of the limit, as a job sets it: ``max_restart``, ``node_max_restart``, …"""
    subject: str
    """Worker, role and node, or node that it is counted for; empty: the job."""
    used: int
    allowed: int


class EndReport(Value, frozen=True, kw_only=True):
    """Reasons why a job ended badly."""

    worker: str
    """Full name of the worker whose failure ended it."""
    incarnation: int
    node: str
    failure: Failure
    limit: str = ""
    """Restart limit that was reached (``max_restart``, …), or the option that forbade a restart."""
    log_file: str = ""


class JobStatus(MasterAnswer, tag="job-status", frozen=True, kw_only=True):
    """One job, with its roles and workers."""

    job_id: str
    name: str
    """Name that it was submitted with."""
    stage: Stage
    exit_code: int | None = None
    """None: it has not ended."""
    reason: str = ""
    """Reason of the last decision: why it waits, restarts, stops or ended."""
    submitted_at: float = 0.0
    """Seconds since 1970, as all times are."""
    started_at: float | None = None
    ended_at: float | None = None
    submitted_by: str = ""
    """user@host:pid."""
    num_restarts: int = 0
    """Restarts of the whole job."""
    roles: list[RoleStatus] = []
    workers: list[WorkerStatus] = []
    end: EndReport | None = None
    outcome: int | None = None
    """Exit code that the job will have, known from STOPPING on."""
    suspended: str | None = None
    """Reason for which it is suspended; None: it is not."""
    num_leaving: int = 0
    """Incarnations that have to end, and have not ended yet."""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    """Annotations, if they were asked for."""
    budgets: list[BudgetUse] = []
    """Limits that are used up at least in part, in the order in which they are compared."""
    times: TimeSpent | None = None
    """Seconds by phase; None: the master keeps no account, or kept none when the job began."""


class JobLine(Value, frozen=True, kw_only=True):
    """One job of a list; fields mean the same as in `JobStatus`."""

    job_id: str
    name: str
    stage: Stage
    exit_code: int | None
    reason: str
    submitted_at: float
    ended_at: float | None
    num_workers: int
    started_at: float | None = None
    num_restarts: int = 0
    """Restarts of the whole job, or of its role with the most restarts, if these are more."""
    failure: str = ""
    """Summary of the failure that ended it."""
    suspended: str | None = None
    """Reason for which it is suspended; None: it is not."""
    labels: dict[str, str] = {}
    stalled_since: float | None = None
    """Time of the last step of a job that is stalled; None: it is not."""


class JobList(MasterAnswer, tag="job-list", frozen=True, kw_only=True):
    jobs: list[JobLine]


class NodeStatus(Value, frozen=True, kw_only=True):
    """One node."""

    node: str
    """Id of the node."""
    state: NodeState
    hostname: str
    address: str
    """IP address at which the other nodes reach it."""
    resources: NodeResources
    """Resources that it offers."""
    free: NodeResources
    """Resources that no job holds; `devices` are those that are entirely free."""
    labels: dict[str, str] = {}
    num_workers: int = 0
    seen_s_ago: float = 0.0
    """Seconds since the last message of its agent."""
    reason: str = ""
    """Reason of its state."""
    drained: str | None = None
    """Reason for which the node is out of service; None: it is not."""
    num_leaving: int = 0
    """Incarnations that have to end there, and have not ended yet."""
    check: str = ""
    """Outcome of the last node check of any job there; empty if there was none."""
    metrics: str = ""
    """``host:port`` of its agent's metrics for Prometheus; empty: it has none."""


class NodeList(MasterAnswer, tag="node-list", frozen=True, kw_only=True):
    nodes: list[NodeStatus]
    at: float = 0.0
    """Time of the master's clock when it answered, in seconds since 1970; 0: its release does not send it."""
    relay: str = ""
    """``tcp://host:port`` of the bus relay."""


class Changes(MasterAnswer, tag="changes", frozen=True, kw_only=True):
    """State of all parts that changed; `unified.client.mirror.ClusterMirror` puts them together."""

    version: int
    at: float
    """Time of the master's clock (seconds since 1970)."""
    problem: str = ""
    """Reason why the master can decide nothing, such as a full disk: then nothing else is told. Empty: it can."""
    is_whole: bool = False
    """True if the client has to forget all earlier state."""
    is_last: bool = True
    """False if more has changed than one answer holds: ask again for the rest."""
    jobs: list[JobStatus] = []
    """Jobs that have changed, without workers."""
    workers: dict[str, Columns] = {}
    """Columns of `WorkerStatus`, by job."""
    nodes: Columns = {}
    """Columns of `NodeStatus`, as of their changes."""
    gone_jobs: list[str] = []
    gone_nodes: list[str] = []
    events: list[EventRecord] = []


class LogChunk(MasterAnswer, tag="log-chunk", frozen=True, kw_only=True):
    worker: str
    incarnation: int
    data: bytes
    offset: int
    next_offset: int
    size: int
    is_final: bool
    """True if the incarnation has ended and nothing follows `next_offset`."""
    path: str = ""
    note: str = ""
    """Reason why the master sent the output that it keeps, for any request; empty: the log's node answered."""
    is_busy: bool = False
    """True if nothing was searched, because the node has other searches to do. If False, and `next_offset` is the
    requested offset, only an unfinished line is left."""


class JobDirectory(MasterAnswer, tag="job-directory", frozen=True, kw_only=True):
    """The workers of a job, and the inboxes and nodes of those that are alive."""

    job_id: str
    revision: int
    """Number that changes with the entries."""
    relay: str
    """Address of the bus relay; empty if there is none."""
    roles: dict[str, list[str]]
    """Full names of each role's workers, by rank."""
    entries: list[DirectoryEntry] | None = None
    """All entries; None: those of the revision that the client has."""


class CodeState(MasterAnswer, tag="code-state", frozen=True, kw_only=True):
    """Part of an archive that the master has."""

    num_bytes: int
    is_whole: bool = False


class CodePart(MasterAnswer, tag="code-part", frozen=True, kw_only=True):
    """Bytes of an archive; none after its end."""

    data: bytes
    size: int
    """Bytes of the whole archive."""


class Story(MasterAnswer, tag="story", frozen=True, kw_only=True):
    events: list[EventRecord]


class JobStacks(MasterAnswer, tag="job-stacks", frozen=True, kw_only=True):
    """The stacks of a job's workers."""

    job_id: str
    report: StackReport


ClientToMaster = (
    SubmitJob
    | ListJobs
    | GetJob
    | ListNodes
    | WatchCluster
    | DrainNode
    | ReadLog
    | StopJob
    | SignalWorkers
    | SuspendJob
    | ResumeJob
    | RestartWorkers
    | Explain
    | GetStacks
    | GetDirectory
)
ClientToCodeStore = FindCode | PutCode | ReadCode
MasterToClient = (
    Accepted
    | Done
    | Refused
    | JobStatus
    | JobList
    | NodeList
    | Changes
    | LogChunk
    | Story
    | JobStacks
    | JobDirectory
    | CodeState
    | CodePart
)
client_to_master: Codec[ClientToMaster | ClientToCodeStore] = Codec(ClientToMaster | ClientToCodeStore)
master_to_client: Codec[MasterToClient] = Codec(MasterToClient)
