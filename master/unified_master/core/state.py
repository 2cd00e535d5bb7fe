"""The master's state: plain records, written by this package alone and saved in part (see `restore`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Literal

import msgspec

from unified.config.settings import Intervals
from unified.core.lease import LeaseTable
from unified.core.timers import TimerTable
from unified.job.spec import JobSpec, RoleSpec
from unified.protocol.agent_master import RegisterAgent, RunOrder
from unified.protocol.client_master import EndReport
from unified.protocol.records import (
    DirectoryEntry,
    EventRecord,
    Failure,
    Inbox,
    JobWorkerIncarnation,
    NameClaims,
    NameRefusal,
    NodeState,
    Progress,
    Stage,
    WorkerState,
)
from unified.values import Value

STORE = "store"
"""Name of a job's store host among its workers."""
MAX_EVENTS = 2000
"""Events remembered for each job."""

DeviceKey = tuple[str, int]
"""(``device``, index among the node's devices) or (``slot``, number of a CPU core that stands in for one)."""
TimerKey = tuple[str, ...]


class Allocation(Value, frozen=True, kw_only=True):
    """The part of a node's resources that one worker holds."""

    cpu: float = 0.0
    memory_mb: float = 0.0
    disk_mb: float = 0.0
    user_defined: dict[str, float] = {}
    devices: tuple[DeviceKey, ...] = ()
    share: float = 0.0
    """The part of each of `devices`."""


class PastIncarnation(Value, frozen=True, kw_only=True):
    """The place of an earlier incarnation, so that its log can still be read."""

    incarnation: int
    node: str
    log_file: str


class WorkerRecord(msgspec.Struct, kw_only=True):
    """A worker (or a job's store host), and its newest incarnation."""

    job_id: str
    name: str
    kind: Literal["worker", "store"] = "worker"
    role: str = ""
    rank: int = 0
    incarnation: int = -1
    """Number of the newest incarnation; -1: there was none."""
    node: str = ""
    """Name of the node that it is on, or was last."""
    allocation: Allocation | None = msgspec.field(default=None, name="claim")  # as older state directories have it
    """The part of `node` that it holds; None: it has no place."""
    is_desired: bool = False
    """True if this incarnation shall be."""
    is_held: bool = False
    """True if its next incarnation waits for a back-off."""
    is_seen: bool = False
    """True if the agent has reported this incarnation."""
    state: WorkerState = WorkerState.PENDING
    pid: int = 0
    round: int = 0
    inbox: Inbox | None = None
    store_port: int = 0
    progress: Progress | None = None
    failure: Failure | None = None
    log_file: str = ""
    run: RunOrder | None = None
    running_at: float | None = None
    entry: DirectoryEntry | None = None
    """The directory entry as last published."""
    claims: NameClaims = NameClaims()
    """Names that this incarnation claims, as last heard."""
    names: dict[str, int] = {}
    """Names that were granted, each with the number of its claim."""
    refused: dict[str, NameRefusal] = {}
    revision: int = 0
    """Number of changes of `names` and `refused` in this incarnation."""
    num_failures: int = 0
    """Failures charged to it; compared with `max_restart`."""
    num_unread_before: int = 0
    """Errors of calls that nobody read, in its earlier incarnations."""
    past: list[PastIncarnation] = []
    reason: str = ""

    @property
    def life(self) -> JobWorkerIncarnation:
        return JobWorkerIncarnation(self.job_id, self.name, self.incarnation)

    @property
    def devices(self) -> list[int]:
        """Indices of the node's devices that it holds."""
        return [index for kind, index in (self.allocation.devices if self.allocation else ()) if kind == "device"]

    @property
    def place_key(self) -> tuple[str, str]:
        return (self.job_id, self.name)

    @property
    def has_failed(self) -> bool:
        """True if its newest incarnation ended badly, and nothing was done about it yet."""
        return self.state is WorkerState.EXITED and self.failure is not None and not self.is_held

    @property
    def has_ended_well(self) -> bool:
        return self.state is WorkerState.EXITED and self.failure is None

    @property
    def is_done(self) -> bool:
        """True if its entry point returned, or its process ended without a failure."""
        return self.state is WorkerState.FINISHED or self.has_ended_well


class RoleRecord(msgspec.Struct, kw_only=True):
    """The counts of a role, and its failures that wait for a decision."""

    name: str
    round: int = 0
    num_restarts: int = 0
    suspect: str = ""
    """The worker whose failure looks like collateral and waits for its root cause."""
    suspect_at: float = 0.0
    """Time of the suspect's failure."""
    pending: str = ""
    """The worker whose failure is decided when the others of the role are done."""
    node_failures: dict[str, int] = {}
    """Charged failures by node; compared with `per_node_max_failure`."""
    num_failures: int = 0
    """Charged failures of all its workers; compared with `role_max_restart`."""
    num_quick: int = 0
    """Charged failures in a row that came within a second of running."""


_NO_SPEC = JobSpec(name="", roles=[])
_REACHABLE = (WorkerState.READY, WorkerState.RUNNING, WorkerState.FINISHED, WorkerState.STOPPING)


class JobRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A job. The fields from `spec` on are not part of its saved bytes."""

    job_id: str
    sequence: int
    stage: Stage = Stage.INIT
    is_placed: bool = False
    outcome: int | None = None
    """Exit code to be, once the job is STOPPING."""
    exit_code: int | None = None
    reason: str = ""
    is_forced: bool = False
    is_interrupted: bool = False
    """True if the job is stopped by SIGINT."""
    submitted_at: float = 0.0
    started_at: float | None = None
    ended_at: float | None = None
    num_restarts: int = 0
    """Restarts of the whole job, asked for or not."""
    num_charged_restarts: int = 0
    """Restarts of the whole job because of a failure; compared with `job_max_restart`."""
    node_losses: dict[str, int] = {}
    """Number of times each node was lost with workers of the job; compared with `node_max_restart`."""
    excluded: list[str] = []
    """Nodes that failed too often for this job."""
    restart_at: float | None = None
    """Time at which the held workers begin their next incarnations."""
    end: EndReport | None = None
    roles: dict[str, RoleRecord] = {}
    spec: JobSpec = _NO_SPEC
    workers: dict[str, WorkerRecord] = {}
    holders: dict[str, str] = {}
    """Workers by the names that they hold: the `names` of all workers, the other way round."""
    version: int = 0
    revision: int = 0
    """Number of changes of its directory in this term."""
    notified_revision: int = 0
    """The `revision` at which agents were last notified of changes."""

    def saved(self) -> bytes:
        empty = {"spec": _NO_SPEC, "workers": {}, "holders": {}, "version": 0, "revision": 0, "notified_revision": 0}
        return msgspec.msgpack.encode(msgspec.structs.replace(self, **empty))

    @property
    def is_waiting(self) -> bool:
        """True if the job has no place yet, or lost it."""
        return self.stage is Stage.INIT and not self.is_placed

    @property
    def is_ending(self) -> bool:
        return self.stage in (Stage.STOPPING, Stage.STOPPED)

    @property
    def store(self) -> WorkerRecord | None:
        return self.workers.get(STORE)

    def can_call(self, worker: WorkerRecord) -> bool:
        """Return True if others may take the worker's newest incarnation for alive, so that it may hold names."""
        is_up = worker.inbox is not None and worker.state in _REACHABLE
        return is_up and (worker.is_desired or self.is_ending)

    def ranks(self, role: str) -> list[WorkerRecord]:
        """Return the workers of a role, by rank."""
        return [worker for worker in self.workers.values() if worker.role == role and worker.kind == "worker"]

    def elastic_roles(self) -> list[RoleSpec]:
        """Return the roles that train together and need the store."""
        return [role for role in self.spec.roles if role.kind == "elastic" and role.total > 0]

    def driver_roles(self) -> list[RoleSpec]:
        """Return the roles that the job waits for: those marked so, or all if none is."""
        return [role for role in self.spec.roles if role.is_driver] or self.spec.roles


class Leaving(msgspec.Struct, kw_only=True):
    """An incarnation that is no longer desired, whose end its agent has not confirmed."""

    life: JobWorkerIncarnation
    node: str
    generation: int
    """Generation from which on a report that does not list the incarnation confirms its end."""
    allocation: Allocation | None = None


class NodeRecord(msgspec.Struct, kw_only=True):
    """A node, and one incarnation of its agent."""

    info: RegisterAgent
    state: NodeState = NodeState.ALIVE
    reason: str = ""
    peer: bytes = b""
    is_registered: bool = False
    """True if its agent has registered in this term of the master."""
    replaced: list[str] = []
    """Incarnations of agents that another one has replaced, newest last; they are not let in again."""
    has_reported: bool = False
    """True if its agent has reported its workers; before that, what is free is not known."""
    generation: int = 0
    sent_at: float = 0.0
    seen_at: float = 0.0
    grace_at: float = -1.0
    """The `seen_at` of the silence for which its lease was prolonged, because the master itself was late."""
    incarnations: dict[JobWorkerIncarnation, WorkerRecord] = {}
    """Workers desired here, by incarnation."""
    allocations: dict[tuple[str, str], Allocation] = {}
    leaving: dict[JobWorkerIncarnation, Leaving] = {}
    notified: dict[str, int] = {}
    """The `revision` of each job's directory that its agent has been sent, unless something was lost on the way. Empty
    if that cannot be known: then whole directories are sent again."""

    @property
    def name(self) -> str:
        return self.info.node

    @property
    def is_connected(self) -> bool:
        """True if its agent can be sent messages."""
        return self.state is NodeState.ALIVE and self.is_registered

    def held(self) -> Iterator[Allocation]:
        """Yield every allocation, those of incarnations that are still leaving included."""
        yield from self.allocations.values()
        for leaving in self.leaving.values():
            if leaving.allocation is not None and leaving.life[:2] not in self.allocations:
                yield leaving.allocation


class ParkedPoll(Value, frozen=True, kw_only=True):
    """A `GetJob` that waits for news."""

    peer: bytes
    request_id: int
    job_id: str
    after_version: int


class ParkedRead(Value, frozen=True, kw_only=True):
    """A `ReadLog` that waits for the agent."""

    peer: bytes
    request_id: int
    life: JobWorkerIncarnation
    node: str


class Cluster:
    """The whole state of the master."""

    def __init__(self, intervals: Intervals, relay: str) -> None:
        self.intervals = intervals
        self.relay = relay
        """Address of the bus relay; empty if there is none."""
        self.term = 0
        """Number of terms before this one; keeps generations and versions rising."""
        self.next_sequence = 1
        self.next_event = 1
        self.next_read = 1
        self.nodes: dict[str, NodeRecord] = {}
        self.hosts: dict[str, set[str]] = {}
        """Nodes that have registered from each host, by host id; some may be elsewhere by now."""
        self.jobs: dict[str, JobRecord] = {}
        self.events: dict[str, deque[EventRecord]] = {}
        self.timers: TimerTable[TimerKey] = TimerTable()
        self.leases: LeaseTable[str] = LeaseTable(intervals.lease_s)
        self.polls: dict[str, list[ParkedPoll]] = {}
        self.reads: dict[int, ParkedRead] = {}
        self.batched_at: dict[TimerKey, float] = {}
        """Time at which work that large clusters do in batches was last done."""
        self.news: dict[str, dict[str, DirectoryEntry]] = {}
        """Changed directory entries by job and worker, of which agents are to be notified."""

    @property
    def first_number(self) -> int:
        """First generation and version of this term."""
        return self.term << 32

    def alive_nodes(self) -> list[NodeRecord]:
        """Return the nodes believed alive, heard from in this term or not."""
        return [self.nodes[name] for name in sorted(self.nodes) if self.nodes[name].state is NodeState.ALIVE]

    def nodes_of_host(self, host_id: str) -> list[NodeRecord]:
        """Return the nodes whose agent runs on this host."""
        names = sorted(self.hosts.get(host_id, ()))
        return [self.nodes[name] for name in names if name in self.nodes and self.nodes[name].info.host_id == host_id]

    def worker(self, job_id: str, name: str) -> WorkerRecord | None:
        job = self.jobs.get(job_id)
        return None if job is None else job.workers.get(name)

    def leaving_of(self, job_id: str) -> list[Leaving]:
        return [
            leaving
            for node in self.nodes.values()
            for leaving in node.leaving.values()
            if leaving.life.job_id == job_id
        ]
