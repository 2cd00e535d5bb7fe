"""Values that several conversations carry: states, exits, progress, routes."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import msgspec

from unified.errors import InvariantError
from unified.job.enums import MasterStage
from unified.values import Value

S = TypeVar("S", bound=StrEnum)


class TransitionTable(Generic[S]):
    """Legal moves of one kind of thing: ``{state: (states it may become, …)}``.

    The state diagrams of the documentation are drawn from these tables.
    """

    def __init__(self, what: str, moves: Mapping[S, tuple[S, ...]]) -> None:
        self.what = what
        self.moves = moves

    def check(self, who: str, old: S, new: S) -> S:
        """Return `new`; raise `InvariantError`, which names `who` and the move, if the table has no such move."""
        if new not in self.moves[old]:
            legal = ", ".join(self.moves[old]) or "nothing: it is final"
            raise InvariantError(f"{self.what} {who} cannot go from {old} to {new}; from {old} it may become {legal}.")
        return new

    def mermaid(self) -> str:
        """Return the table as a mermaid state diagram."""
        lines = ["stateDiagram-v2"]
        for old, news in self.moves.items():
            lines += [f"    {old} --> {new}" for new in news] or [f"    {old} --> [*]"]
        return "\n".join(lines)


Stage = MasterStage
JOB_MOVES = TransitionTable(
    "job",
    {
        Stage.INIT: (Stage.READY, Stage.STOPPING),
        Stage.READY: (Stage.RUNNING, Stage.INIT, Stage.STOPPING),
        Stage.RUNNING: (Stage.INIT, Stage.STOPPING),
        Stage.STOPPING: (Stage.STOPPED,),
        Stage.STOPPED: (),
    },
)


class WorkerState(StrEnum):
    """State of one incarnation of a worker, as its agent sees it."""

    PENDING = "PENDING"
    """Not begun: the worker waits for a place, or for the end of a back-off. Only the master has this state."""
    STARTING = "STARTING"
    """Starting: the process is being started, or has not said hello yet."""
    READY = "READY"
    """Ready: the worker said hello, has an inbox and waits for its order to run."""
    RUNNING = "RUNNING"
    SERVING = "SERVING"
    """Serving: a worker of a service, which has nothing more to run and answers calls until it is stopped."""
    FINISHED = "FINISHED"
    """Finished: the entry point returned, and the program has ended; the process answers calls until it is stopped."""
    STOPPING = "STOPPING"
    EXITED = "EXITED"


WORKER_MOVES = TransitionTable(
    "worker",
    {
        WorkerState.PENDING: (WorkerState.STARTING,),
        WorkerState.STARTING: (WorkerState.READY, WorkerState.STOPPING, WorkerState.EXITED),
        WorkerState.READY: (WorkerState.RUNNING, WorkerState.STOPPING, WorkerState.EXITED),
        WorkerState.RUNNING: (
            WorkerState.SERVING,
            WorkerState.FINISHED,
            WorkerState.STOPPING,
            WorkerState.EXITED,
        ),
        WorkerState.SERVING: (WorkerState.STOPPING, WorkerState.EXITED),
        WorkerState.FINISHED: (WorkerState.STOPPING, WorkerState.EXITED),
        WorkerState.STOPPING: (WorkerState.EXITED,),
        WorkerState.EXITED: (),
    },
)


class WorkerIncarnation(NamedTuple):
    """One incarnation of one worker, among the workers of its job."""

    worker: str
    """Full name."""
    number: int


class JobWorkerIncarnation(NamedTuple):
    """One incarnation of one worker, among the workers of all jobs."""

    job_id: str
    worker: str
    """Full name."""
    number: int

    def __str__(self) -> str:
        return f"{self.job_id}/{self.worker}#{self.number}"


class NodeState(StrEnum):
    """State of a node, as the master believes it."""

    ALIVE = "ALIVE"
    LOST = "LOST"
    """Lost: its lease ran out, or its agent ended."""


NODE_MOVES = TransitionTable("node", {NodeState.ALIVE: (NodeState.LOST,), NodeState.LOST: (NodeState.ALIVE,)})


class MemorySample(NamedTuple):
    """Resident memory of a process at one time."""

    age_s: float
    """Seconds before its end."""
    mb: float


class Evidence(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Facts about the end of a process, as its agent found them."""

    killed_for: str = ""
    """Reason why its agent killed it, or why it was killed with its zygote; empty: neither."""
    cause: str = ""
    """Id of the fault, such as the end of one zygote, if the fault can end several workers; empty: this one alone."""
    out_of_memory: str = ""
    """The kernel's record of its out-of-memory kill, or else the risen count of its control group."""
    out_of_memory_here: str = ""
    """Risen count of the host's out-of-memory kills, maybe by this one. Empty if the kernel's record can be read."""
    is_memory_counted: bool = False
    """True if the kernel's count of out-of-memory kills can be read on this node."""
    memory: list[MemorySample] = []
    """Resident memory over the last minute, oldest first."""
    peak_mb: float = 0.0
    """Peak of its resident memory; 0: not known."""


class Failure(Value, frozen=True, kw_only=True):
    """Reason why an incarnation ended badly: an exception, an exit code, a signal, or a node that was lost."""

    summary: str
    """One line: ``ValueError: no such file``, ``killed by SIGKILL``, ``exited with code 3``, ``node n2 was lost``."""
    category: str = "user"
    """`user`: the entry point raised or exited. `crash`: a signal, or an exit without a message. `oom`: killed
    by the kernel for lack of memory. `node`: the node was lost.
    `node-check`: its node failed the check before a round.
    `hang`: no progress for longer than the role's `hang_timeout`; the traceback has the stacks of its ranks.
    `setup`: the entry point cannot be imported or called; a retry would fail, too, so there is none."""
    exception_type: str = ""
    traceback: str = ""
    exit_code: int | None = None
    signal: int | None = None
    is_collateral: bool = False
    """True if the worker believes that it failed because a peer did (a broken collective): it is not the root cause."""
    is_cut: bool = False
    """True if a stop interrupted the end of the program (threads, `atexit`)."""
    evidence: Evidence | None = None
    """Evidence from its agent; None: the process did not end by itself, or there was none."""

    @property
    def cause(self) -> str:
        """Id of a fault that can have ended other workers, too; empty: there was none, or the program failed before."""
        return self.evidence.cause if self.evidence is not None and self.category == "crash" else ""


MAX_METRICS = 256
MAX_METRIC_TEXT = 200
"""Most characters of a metric's name, and of a value that is a text."""
SAVE_STEP, SAVE_WAIT_S = "save_step", "save_wait_s"
"""Metrics of training: the step whose save waits for the store, and seconds since the store took a part; 0: no wait."""

MetricText = Annotated[str, msgspec.Meta(max_length=MAX_METRIC_TEXT)]
Metrics = Annotated[dict[MetricText, float | int | MetricText], msgspec.Meta(max_length=MAX_METRICS)]
_IN_JSON = {math.inf: "Infinity", -math.inf: "-Infinity"}
"""Texts for numbers that JSON lacks, as in the JSON of Protocol Buffers."""
_REPORTED: dict[float | int | str, float] = {text: value for value, text in _IN_JSON.items()}


def json_value(value: Any) -> Any:
    """Return plain data for JSON, which has no number for infinity: a text of `_IN_JSON`. NaN becomes null there."""
    if isinstance(value, dict):
        return {name: json_value(each) for name, each in value.items()}
    if isinstance(value, list):
        return [json_value(each) for each in value]
    return _IN_JSON.get(value, value) if isinstance(value, float) else value


def reported_value(value: float | int | str | None) -> float | int | str:
    """Return the metric that was reported, from its form in JSON."""
    return math.nan if value is None else _REPORTED.get(value, value)


class QueueUse(NamedTuple):
    """Use of a queue by a thread of a worker."""

    thread: MetricText
    """Name of the thread; empty for all that wait at no queue."""
    does: Literal["gets", "puts"]
    queue: MetricText
    waits: bool
    """True if it has waited there for seconds: the owner has said that the queue is empty, or full."""


class WorkerLoad(Value, frozen=True, kw_only=True):
    """Resident memory and other load of a worker's process, in two digits: one with a steady load reports nothing."""

    memory_mb: float = 0.0
    cpu: float = 0.0
    """CPU cores in use."""
    device_memory_mb: float | None = None
    """Memory that torch has reserved on CUDA devices; None: torch uses none."""
    queues: Annotated[dict[MetricText, tuple[int, int, int]], msgspec.Meta(max_length=MAX_METRICS)] = {}
    """Queues that it owns: items that wait, the most items, and the time at which the oldest was put, or 0."""
    weights: Annotated[dict[MetricText, int], msgspec.Meta(max_length=MAX_METRICS)] = {}
    """Newest versions of its weights, by the receivers' names."""


class Progress(Value, frozen=True, kw_only=True):
    """Last progress that a worker gave to `current_worker().report(…)`, and what its runtime counted."""

    step: int | None = None
    total: int | None = None
    metrics: Metrics = {}
    """Newest values by name. In JSON infinity is the text `Infinity` or `-Infinity`, and NaN is null."""
    num_unread_errors: int = 0
    """Failed calls of its code, in this incarnation, whose errors nobody read."""
    num_activities: int = 0
    """Number of times that collectives or calls were seen to progress; counted only in roles with a `hang_timeout`."""
    waits_for: MetricText = ""
    """Debugger, or preparation of the node, that the worker waits for; the job is not checked for hangs meanwhile."""
    cleans_up: MetricText = ""
    """Exception that its main thread has handled for some seconds, within one collective; empty: none."""
    num_collectives: int | None = None
    """Collectives of the default process group that it had entered when its program ended; None: it runs."""
    queues: Annotated[list[QueueUse], msgspec.Meta(max_length=MAX_METRICS)] = []
    """Uses of queues by its living threads; they are no sign of progress."""
    load: WorkerLoad | None = None
    """Load of its process, which is no sign of progress either; None: not known yet."""


class NodeCheckReport(Value, frozen=True, kw_only=True):
    """Outcome of the node check of one round, as one rank sees it."""

    round: int
    matmul_s: float = 0.0
    """Time of this rank's device."""
    copy_s: float = 0.0
    collective_s: float = 0.0
    """Time of its node's better collective; 0 if none succeeded, or none was due."""
    slow: dict[str, float] = {}
    """Slow measurements of its node, by name, as multiples of the median of all nodes."""
    faulty: dict[int, str] = {}
    """Ranks whose nodes are at fault, and why."""
    undecided: dict[int, str] = {}
    """Ranks on nodes that could not work together, and their errors; some of these nodes are at fault."""

    @property
    def is_good(self) -> bool:
        """True if the round may begin."""
        return not self.faulty and not self.undecided


MAX_POINTS = 2**15
"""Most points of a series in one message of a worker; our own workers count even values against this limit."""


class WorkerReport(Value, frozen=True, kw_only=True):
    """One point of a worker's series: the values reported with one step. Its agent keeps it as a JSON line of
    ``N.metrics.jsonl``; values that are reported with that step later become a further line."""

    at: Annotated[float, msgspec.Meta(ge=0, le=2**33)]
    """Time (seconds since 1970) on the worker's node."""
    step: int | None
    total: int | None
    metrics: Annotated[dict[MetricText, float | int | MetricText | None], msgspec.Meta(max_length=MAX_METRICS)]
    """Names and values that were given with this step, as JSON has them: see `reported_value`."""
    incarnation: int = 0
    number: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Number in its incarnation, from 0. Lines of one number are one point; missing numbers were thinned out."""


class CallSpan(Value, frozen=True, omit_defaults=True):
    """One side of one call. A worker with ``UNIFIED_TRACE=calls`` keeps it as a line of ``N.trace.jsonl``, in JSON."""

    kind: Literal["caller", "callee"]
    at: float
    """Time (seconds since 1970) on the worker's node at which the call was made, or arrived."""
    seconds: float
    """Time until the call ended; for the caller of a stream, until the stream began."""
    method: str
    peer: str
    """Full name of the other worker."""
    call: str
    """Id of the call, the same for both sides."""
    trace: str
    """Id of the first call in the chain that led to this one; its own if it is the first."""
    token: str = ""
    """Token of the handled call. Callee: this call. Caller: the call whose handler made this call."""
    queued_s: float = 0.0
    """Part of `seconds` before the handler began."""
    error: str = ""


LogStream = Literal["out", "err", "both", "out.times", "err.times", "metrics", "trace", "profile"]
"""Files of an incarnation. `metrics`: its reports, one JSON object per line; empty if it reported nothing.
`trace`: likewise its calls, if ``UNIFIED_TRACE`` is set. `profile`: its last profile. `out.times` and `err.times`:
`LOG_TIME` records of a part of its output; `offset` and `max_bytes` of the request are of the output."""
LOG_TIME = struct.Struct("<Qd")
"""Offset in a log, and the time (seconds since 1970) of a write there. First come 0 and the seconds between records."""
ProfileKind = Literal["flamegraph", "speedscope", "memory", "torch"]
"""Kinds of a profile. `flamegraph` (SVG) and `speedscope` (JSON): where its time goes, by py-spy. `memory`: what it
allocates (HTML), by memray. `torch`: one step (Chrome's trace, gzip), by its own ``torch.profiler``."""
MAX_PROFILE_BYTES = 64 * 1024 * 1024
MAX_PROFILE_S = 600.0


class Inbox(Value, frozen=True, kw_only=True):
    """Inbox: where one incarnation of a process receives bus messages. The id is never used twice."""

    inbox_id: str
    routes: list[str] = []
    """Routes, the best first: ``ipc:///run/…``, a Unix socket that speaks `unified.bus.transport.framing` (on the host
    `host_id` only); ``tcp://10.0.0.2:4123``, which speaks ZeroMQ."""
    host_id: str = ""
    shm: str = ""
    """Identity of its shared-memory mount; empty if it has or uses none. Two inboxes with the same `host_id` and
    `shm` can read each other's segments."""
    gpus: list[str] = []
    """UUIDs of the CUDA devices that its process sees: on one host, tensors on them are passed by handle."""
    listener_key: str = ""
    """Public half of its tcp listener's own key pair; empty in a cluster without a key."""


MAX_NAMES = 1000
"""Most names that one worker may claim at a time."""
MAX_NAME_LENGTH = 200

ClaimedName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_LENGTH)]


class NameClaims(Value, frozen=True, kw_only=True):
    """The whole set of names that one incarnation claims, so that a repeated or late message changes nothing."""

    number: int = 0
    """Number of the last claim or withdrawal, from 1 in each incarnation: the set with the higher number is newer."""
    names: Annotated[dict[ClaimedName, int], msgspec.Meta(max_length=MAX_NAMES)] = {}
    """Names, each with the number of its claim. A name that is claimed again gets a new number and a new answer."""
    journals: dict[ClaimedName, str] = {}
    """Paths on this node of files that belong to held names, which the next holder needs."""


class JournalPlace(Value, frozen=True, kw_only=True):
    """Place of the file that belongs to a name, such as the journal of a durable queue."""

    node: str
    path: str


class NameRefusal(Value, frozen=True, kw_only=True):
    """A claim that the master refused. It stays refused until the claim is withdrawn."""

    number: int
    holder: str
    """Worker that held the name then."""


class Reachability(StrEnum):
    """State of an incarnation in the directory."""

    ALIVE = "alive"
    DEAD = "dead"
    """Dead: the incarnation ended; another may follow, so new calls wait for it."""
    ENDED = "ended"
    """Ended: the incarnation ended and no other will follow, so new calls fail at once."""


class DirectoryEntry(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One incarnation of one worker, for all who want to call it.

    Entries merge in any order: the higher incarnation wins; of one incarnation, ENDED beats DEAD beats ALIVE, and of
    two that are ALIVE the higher revision wins.
    """

    worker: str
    incarnation: int
    state: Reachability
    inbox: Inbox | None = None
    node: str = ""
    reason: str = ""
    """Reason of its end. While it is ALIVE: reason of the previous incarnation's end, for readers who missed it."""
    names: dict[str, int] = {}
    """Names that it holds, each with the number of the granted claim; empty after its end."""
    refused: dict[str, NameRefusal] = {}
    """Refused claims of this incarnation, for the claimant."""
    journals: dict[str, JournalPlace] = {}
    """Places of the files of names that it holds, as their last holder said."""
    revision: int = 0
    """Number that grows with each change of `names`, `refused` and `journals` of this incarnation."""


class Device(Value, frozen=True, kw_only=True):
    """One accelerator of a node."""

    index: int
    kind: str
    """``cuda``, ``rocm``, ``npu`` (Ascend), or ``virtual`` for a stand-in on a CPU host."""
    name: str = ""
    uuid: str = ""
    memory_mb: float = 0.0


class NodeResources(Value, frozen=True, kw_only=True):
    """Resources that a node offers."""

    cpu: float
    memory_mb: float
    disk_mb: float
    devices: list[Device] = []
    user_defined: dict[str, float] = {}
    max_workers: int = 0
    """Most worker processes of all jobs; 0: no limit."""


class Phase(StrEnum):
    """Phase of a job's time. The workers of elastic roles count; in a job without elastic roles, those of roles that
    the job waits for. Steps are those of the first of these roles that reports any."""

    WAITING = "waiting"
    """Waiting: the job has no place, because it is in the queue or suspended."""
    STARTING = "starting"
    """Starting: the job has a place, but not all workers run, or the first of the reported steps has not begun."""
    PRODUCTIVE = "productive"
    """Productive: all workers run, and do new work."""
    REDONE = "redone"
    """Redone: all workers run, and repeat steps that the job had reached before."""
    RECOVERING = "recovering"
    """Recovering: a worker failed, was lost or moved, and not all run again, or the first step has not begun."""
    STALLED = "stalled"
    """Stalled: all workers run, but no step came for 30 s and 5 times the usual time between two reports; or a role is
    suspected to hang, counted from its last progress."""
    STOPPING = "stopping"
    """Stopping: the outcome is known, and not all workers have ended."""


class TimeSpent(Value, frozen=True, kw_only=True):
    """Time of a job by phase. The sum is the time from its submission to `since`."""

    seconds: dict[str, float] = {}
    """Seconds by phase."""
    phase: str = ""
    """Phase of the job since `since`; empty: it has ended."""
    since: float = 0.0
    """Time of the last step or progress, if the phase is ``stalled`` or `stalls_at` is set."""
    stalls_at: float | None = None
    """Time at which the job becomes stalled, unless it reports something before."""

    def at(self, now: float) -> dict[str, float]:
        """Return the seconds by phase until `now` (seconds since 1970), in the order of `Phase`."""
        open_s = max(0.0, now - self.since) if self.phase else 0.0
        stalled_s = 0.0 if self.stalls_at is None else min(open_s, max(0.0, now - self.stalls_at))
        found = dict(self.seconds)
        for phase, seconds in ((self.phase, open_s - stalled_s), (Phase.STALLED.value, stalled_s)):
            if seconds:
                found[phase] = found.get(phase, 0.0) + seconds
        return {phase.value: found[phase] for phase in Phase if found.get(phase)}

    def stalled_since(self, now: float) -> float | None:
        """Return the time of the last step, or other progress, of a job that is stalled; None: it is not."""
        return self.since if self.phase == Phase.STALLED or now >= (self.stalls_at or math.inf) else None


class EventRecord(Value, frozen=True, kw_only=True):
    """One line of the event log: a fact or a decision, with its reason as a sentence."""

    at: float
    """Wall clock, seconds since 1970, for people."""
    event: str
    """A short word: ``job-submitted``, ``worker-failed``, ``role-restarted`` …"""
    reason: str
    job: str = ""
    role: str = ""
    worker: str = ""
    node: str = ""
    sequence: int = 0
