"""The master's state: plain records, written by this package alone and saved in part (see `restore`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Literal

import msgspec

from unified.config.settings import Intervals
from unified.core.lease import LeaseTable
from unified.core.timers import TimerTable
from unified.job.spec import JobSpec, RoleSpec, has_range
from unified.protocol import records
from unified.protocol.agent_master import RegisterAgent, RoundNotice, RunOrder
from unified.protocol.client_master import EndReport, ReadLog
from unified.protocol.stacks import StackReport
from unified.values import Value
from unified_master.core.accounting import Account
from unified_master.core.changes import ChangedPart, ChangeLog
from unified_master.core.log_tails import KeptTails
from unified_master.core.node_capacity import Allocation, NodeCapacity, PlacementAttempt

STORE = "store"
"""Name of a job's store host among its workers."""
MAX_EVENTS = 2000
"""Events remembered for each job."""

TimerKey = tuple[str, ...]


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
    """Name of the node that it is on, or was on last."""
    allocation: Allocation | None = msgspec.field(default=None, name="claim")  # its name in older state directories
    """The part of `node` that it holds; None: it has no place."""
    is_desired: bool = False
    """True if this incarnation is to run."""
    is_held: bool = False
    """True if its next incarnation waits for a back-off."""
    is_seen: bool = False
    """True if the agent has reported this incarnation."""
    state: records.WorkerState = records.WorkerState.PENDING
    pid: int = 0
    round: int = 0
    inbox: records.Inbox | None = None
    store_port: int = 0
    progress: records.Progress | None = None
    failure: records.Failure | None = None
    log_file: str = ""
    node_rank: int = -1
    """Rank of its group in the newest round; -1: its group was in none, or has lost its place since."""
    run: RunOrder | None = None
    notice: RoundNotice | None = None
    """Notice that its round ends; None once it is ordered into the next one."""
    node_check: records.NodeCheckReport | None = None
    can_rejoin: bool = False
    left_round: int = 0
    running_at: float | None = None
    began_at: float = 0.0
    has_stepped: bool = False
    """True if this incarnation has reported a step."""
    entry: records.DirectoryEntry | None = None
    """The directory entry as last published."""
    claims: records.NameClaims = records.NameClaims()
    """Names that this incarnation claims, as last heard."""
    names: dict[str, int] = {}
    """Names that were granted, each with the number of its claim."""
    refused: dict[str, records.NameRefusal] = {}
    revision: int = 0
    """Number of changes of `names` and `refused` in this incarnation."""
    num_failures: int = 0
    """Failures charged to it; compared with `max_restart`."""
    output_lost: str = ""
    """Text about dropped output of its newest incarnation; empty: none."""
    num_unread_before: int = 0
    """Number of call errors in its earlier incarnations that nobody read."""
    past: list[PastIncarnation] = []
    reason: str = ""

    @property
    def incarnation_id(self) -> records.JobWorkerIncarnation:
        return records.JobWorkerIncarnation(self.job_id, self.name, self.incarnation)

    @property
    def devices(self) -> list[int]:
        """Indices of the node's devices that it holds."""
        return [index for kind, index in (self.allocation.devices if self.allocation else ()) if kind == "device"]

    @property
    def place_key(self) -> tuple[str, str]:
        return (self.job_id, self.name)

    @property
    def waits_for(self) -> str:
        """Debugger that its program waits for; empty: none."""
        is_over = self.state in (records.WorkerState.STOPPING, records.WorkerState.EXITED)
        return "" if self.progress is None or is_over else self.progress.waits_for

    @property
    def rank_in_round(self) -> int:
        """Rank in its round; before its first order to run, its `rank`."""
        return self.rank if self.run is None else self.run.rank

    @property
    def cleans_up(self) -> str:
        """Exception that its program handles within a collective; empty: none."""
        is_over = self.state in (records.WorkerState.STOPPING, records.WorkerState.EXITED)
        return "" if self.progress is None or is_over else self.progress.cleans_up

    @property
    def has_failed(self) -> bool:
        """True if its newest incarnation ended badly, and nothing was done about it yet."""
        return self.state is records.WorkerState.EXITED and self.failure is not None and not self.is_held

    @property
    def has_ended_well(self) -> bool:
        """True if its newest incarnation ended without a failure, and no other is to follow after a back-off."""
        return self.state is records.WorkerState.EXITED and self.failure is None and not self.is_held

    @property
    def rejoins(self) -> bool:
        """True if its process runs and can take part in a further round."""
        return self.is_desired and self.state is records.WorkerState.RUNNING and self.can_rejoin

    @property
    def is_joining(self) -> bool:
        """True if it runs and was ordered into a further round, but has not reported that it joined."""
        is_behind = self.run is not None and self.round < self.run.round
        return self.is_desired and self.state is records.WorkerState.RUNNING and is_behind

    @property
    def is_done(self) -> bool:
        """True if its entry point returned, or its process ended without a failure."""
        return self.state in (records.WorkerState.SERVING, records.WorkerState.FINISHED) or self.has_ended_well


class Charge(Value, frozen=True, kw_only=True, omit_defaults=True):
    """One charge to a job's budgets: a failure (worker, role and node), the end of its torch store (worker alone), a
    lost node (node alone), or a restart of the whole job (none of them).
    """

    at: float
    worker: str = ""
    role: str = ""
    node: str = ""
    round: int = 0
    """Round whose break it is for, if no root cause was known; 0: its cause is known."""


class RoleRecord(msgspec.Struct, kw_only=True):
    """The counts of a role, and its failures that wait for a decision."""

    name: str
    round: int = 0
    num_restarts: int = 0
    suspect: str = ""
    """The worker whose failure looks like collateral and waits for its root cause."""
    suspect_at: float = 0.0
    """Time of the suspect's failure."""
    grown_at: float | None = None
    """Time at which it last tried to grow."""
    waits_until: float | None = None
    """Time until which its next round waits for groups without a place."""
    change_due_at: float | None = None
    """Time until which a planned change waits for workers to leave their round."""
    pending: str = ""
    """The worker whose failure is decided when the others of the role are done."""
    presumed: list[Charge] = []
    """Charges for broken rounds of unknown cause: a root cause that is reported late takes them over."""
    node_failures: dict[str, int] = {}
    """Charged failures by node; compared with `per_node_max_failure`."""
    num_failures: int = 0
    """Charged failures of all its workers; compared with `role_max_restart`."""
    num_quick: int = 0
    """Charged failures in a row after less than a second of running."""
    early_failure: str = ""
    """Digest of the traceback of the last charged failure, if it came before any step and may recur."""
    early_failure_at: float = 0.0
    """Time of the first failure with this digest."""
    num_fruitless: int = 0
    """Charged failures in a row since the last new step of the job."""
    fruitless_peak: int = -1
    """Highest step of the job at these failures."""
    fruitless_at: float = 0.0
    """Time of the last failure in `num_fruitless`."""
    checked_nodes: list[str] = []
    """Nodes that passed a node check since a worker of the role last failed there."""
    failed_groups: dict[str, str] = {}
    """Nodes that were lost or excluded since the role last ran, each with its value of the role's `failover_label`."""
    group_due_at: float | None = None
    """Time at which the groups of `failed_groups` are given up."""
    has_served: bool = False
    """True once a worker of it was SERVING, so that it is a service."""
    ran_on: dict[str, tuple[str, int, int]] = {}
    """Nodes where its workers have run, the last one last: the agent's incarnation, the last round, and the last round
    under an earlier agent (0: none)."""


_NO_SPEC = JobSpec(name="", roles=[])
_UNREACHABLE = (records.WorkerState.PENDING, records.WorkerState.STARTING, records.WorkerState.EXITED)


class JobRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A job. The fields from `spec` on are not part of its saved bytes."""

    job_id: str
    sequence: int
    stage: records.Stage = records.Stage.INIT
    is_placed: bool = False
    outcome: int | None = None
    """Exit code that a STOPPING job will have."""
    exit_code: int | None = None
    reason: str = ""
    is_forced: bool = False
    is_interrupted: bool = False
    """True if the job is stopped by SIGINT."""
    suspended: str | None = None
    """Reason for which it has no place until it is resumed; None: it is not suspended."""
    was_suspended: bool = False
    """True from a suspension until the next placement: its workers have the grace of a stop meanwhile."""
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
    """Nodes that failed too often for this job, or were given up together with one."""
    given_up: dict[str, float] = {}
    """Nodes of `excluded` that were given up with their group, and when."""
    charges: list[Charge] = []
    """Charges that count, oldest first; kept only for a job with a `restart_window_s`."""
    charged_causes: dict[str, str] = {}
    """Last faults of which each ended several workers, with the worker that was charged."""
    restart_at: float | None = None
    """Time at which the held workers begin their next incarnations."""
    end: EndReport | None = None
    roles: dict[str, RoleRecord] = {}
    copy_node: str = ""
    """Node that holds copies of the job's snapshots, beside those of its workers."""
    journals: dict[str, records.JournalPlace] = {}
    """Places of the files that belong to names, by name; the files outlive the names' holders."""
    account: Account = msgspec.field(default_factory=Account)
    queue_cycle: str = ""
    """The cycle in which its queues wait for one another, in words; empty: none."""
    spec: JobSpec = _NO_SPEC
    workers: dict[str, WorkerRecord] = {}
    holders: dict[str, str] = {}
    """Workers by the names that they hold: the `names` of all workers, the other way round."""
    attempt: PlacementAttempt | None = None
    """The last attempt to place it, while it waits."""
    by_role: dict[str, list[WorkerRecord]] = {}
    """Workers of each role: the cache of `ranks`."""
    num_by_role: int = 0
    revision: int = 0
    """Number of changes of its directory in this term."""
    notified_revision: int = 0
    """The `revision` at which agents were last notified of changes."""
    waited_at: float = 0.0
    """Time at which a worker last began or ended a wait that `waits_for` names: all may have waited for that one."""
    away: set[str] = set()
    """Workers because of which the job is not whole; `presence` updates it."""

    def saved(self) -> bytes:
        empty = {"spec": _NO_SPEC, "workers": {}, "holders": {}, "attempt": None, "by_role": {}}
        empty |= {"num_by_role": 0, "revision": 0, "notified_revision": 0, "away": set(), "waited_at": 0.0}
        return msgspec.msgpack.encode(msgspec.structs.replace(self, **empty))

    @property
    def is_waiting(self) -> bool:
        """True if the job has no place yet, or lost it."""
        return self.stage is records.Stage.INIT and not self.is_placed

    @property
    def is_ending(self) -> bool:
        return self.stage in (records.Stage.STOPPING, records.Stage.STOPPED)

    @property
    def store(self) -> WorkerRecord | None:
        return self.workers.get(STORE)

    def can_call(self, worker: WorkerRecord) -> bool:
        """Return True if the worker's newest incarnation counts as alive: others may call it, and it may hold names."""
        is_up = worker.inbox is not None and worker.state not in _UNREACHABLE
        return is_up and (worker.is_desired or self.is_ending)

    def ranks(self, role: str) -> list[WorkerRecord]:
        if self.num_by_role != len(self.workers):
            self.num_by_role, self.by_role = len(self.workers), {}
            for worker in self.workers.values():
                self.by_role.setdefault(worker.role if worker.kind == "worker" else STORE, []).append(worker)
        return self.by_role.get(role, [])

    def members(self, role: RoleSpec) -> list[WorkerRecord]:
        """Return the workers that take part in a role: all, or with a range of nodes, those whose group has a place."""
        ranks = self.ranks(role.name)
        return [worker for worker in ranks if worker.allocation is not None] if has_range(role) else ranks

    def absent(self, role: RoleSpec) -> list[WorkerRecord]:
        """Return the workers of a role with a range of nodes whose group has no place."""
        return [worker for worker in self.ranks(role.name) if worker.allocation is None] if has_range(role) else []

    def is_absent(self, worker: WorkerRecord) -> bool:
        """Return True if the worker has no place, and its role goes on without it."""
        is_without = worker.kind == "worker" and worker.allocation is None and self.is_placed
        return is_without and has_range(self.spec.role(worker.role))

    def elastic_roles(self) -> list[RoleSpec]:
        """Return the roles that train together and need the store."""
        return [role for role in self.spec.roles if role.kind == "elastic" and role.total > 0]

    def is_service(self, role: RoleSpec) -> bool:
        """Return True if the role answers calls until the others are done: the user said so, or a worker served."""
        return role.is_service or self.roles[role.name].has_served

    def driver_roles(self) -> list[RoleSpec]:
        """Return the roles that the job waits for: those marked as drivers, or all if none is marked; no services."""
        others = [role for role in self.spec.roles if not self.is_service(role)]
        return [role for role in others if role.is_driver] or others


class Leaving(msgspec.Struct, kw_only=True):
    """An incarnation that is no longer desired, whose end its agent has not confirmed."""

    incarnation: records.JobWorkerIncarnation
    node: str
    generation: int
    """First generation whose report confirms the end by not listing the incarnation."""
    allocation: Allocation | None = None
    is_unknown: bool = False
    """True if what it holds of the node is not known, because it was not expected here any more."""


class NodeRecord(msgspec.Struct, kw_only=True):
    """A node, and one incarnation of its agent."""

    info: RegisterAgent
    state: records.NodeState = records.NodeState.ALIVE
    reason: str = ""
    drained: str | None = None
    """Reason for which it was taken out of service; None: it was not."""
    stops: str = ""
    """Reason for which its agent is about to stop; empty: it is not."""
    peer: bytes = b""
    is_registered: bool = False
    """True if its agent has registered in this term of the master."""
    replaced: list[str] = []
    """Incarnations of its agent that were replaced, newest last; they may not register again."""
    has_reported: bool = False
    """True if its agent has reported its workers; before that, what is free is not known."""
    generation: int = 0
    sent_at: float = 0.0
    seen_at: float = 0.0
    check: str = ""
    """Outcome of the last node check."""
    grace_at: float = -1.0
    """The `seen_at` of the last silence in which the lease was extended, because the master itself was late."""
    incarnations: dict[records.JobWorkerIncarnation, WorkerRecord] = {}
    """Workers desired here, by incarnation."""
    allocations: dict[tuple[str, str], Allocation] = {}
    leaving: dict[records.JobWorkerIncarnation, Leaving] = {}
    notified: dict[str, int] = {}
    """Revision of the directory that its agent has, by job; it has these descriptions, too. Empty: it has nothing."""
    capacities: dict[tuple[str, int, bool], NodeCapacity] = {}
    """Cache of `capacity`, cleared at each change."""

    @property
    def name(self) -> str:
        return self.info.node

    @property
    def is_in_service(self) -> bool:
        return self.drained is None and not self.stops

    @property
    def is_connected(self) -> bool:
        """True if its agent can be sent messages."""
        return self.state is records.NodeState.ALIVE and self.is_registered

    @property
    def is_open(self) -> bool:
        """True if workers may be placed here: what is free is known."""
        is_clear = not self.leaving or not any(leaving.is_unknown for leaving in self.leaving.values())
        return self.is_connected and self.has_reported and is_clear

    def held(self) -> Iterator[Allocation]:
        """Yield every allocation, including those of leaving incarnations."""
        yield from self.allocations.values()
        for leaving in self.leaving.values():
            if leaving.allocation is not None and leaving.incarnation[:2] not in self.allocations:
                yield leaving.allocation

    def hold(self, worker: WorkerRecord, allocation: Allocation | None) -> None:
        """Note what a worker holds here; None: nothing any more."""
        self.allocations.pop(worker.place_key, None)
        if allocation is not None:
            self.allocations[worker.place_key] = allocation
        self.capacities.clear()

    def capacity(self, accelerator_type: str, device_cap: int, *, is_empty: bool = False) -> NodeCapacity:
        """Return the free capacity for a job that has nothing here; with `is_empty`, all capacity. Callers share it."""
        key = (accelerator_type, device_cap, is_empty)
        if (found := self.capacities.get(key)) is None:
            found = NodeCapacity(self.name, self.info.resources, accelerator_type, device_cap, self.info.labels)
            for allocation in () if is_empty else self.held():
                found.subtract(allocation)
            self.capacities[key] = found.shared()
        return found


class ParkedWatch(Value, frozen=True, kw_only=True):
    """A `WatchCluster` that waits for changes."""

    peer: bytes
    request_id: int
    job_id: str
    """Job that is watched; empty: the cluster."""
    after_version: int
    has_workers: bool
    settled_at: float
    """Time from which any change is answered; before it, only a decision about the job."""
    ends_at: float


class ParkedRead(Value, frozen=True, kw_only=True):
    """A `ReadLog` that waits for the agent."""

    peer: bytes
    request_id: int
    incarnation: records.JobWorkerIncarnation
    node: str
    request: ReadLog


class HangWatch(msgspec.Struct, kw_only=True):
    """Progress of a role, or of one worker, that has a `hang_timeout`."""

    progressed_at: float = 0.0
    suspected_at: float = 0.0
    """Time at which its diagnosis began."""


class StackCollection(msgspec.Struct, kw_only=True):
    """Stacks that agents are asked for, until all have answered or the time is over."""

    job_id: str
    peer: bytes = b""
    """Client that asked; empty if it is a diagnosis of the master's own."""
    request_id: int = 0
    hang: tuple[str, str] = ("", "")
    """Role and worker whose hang is diagnosed."""
    awaited: dict[str, list[WorkerRecord]] = {}
    """Workers on nodes that have not answered, by node."""
    reports: list[StackReport] = []


class Cluster:
    def __init__(self, intervals: Intervals, relay: str, id_suffix: str) -> None:
        self.intervals = intervals
        self.relay = relay
        self.id_suffix = id_suffix
        """End of the ids of all jobs of this term."""
        self.term = 0
        """Number of terms before this one; keeps generations and versions rising."""
        self.next_sequence = self.next_event = self.next_read = 1
        self.capacity_version = 0
        """Number of changes after which a waiting job may fit."""
        self.num_node_changes = 0
        """Number of times that a node joined, was lost, or was taken out of service or put back."""
        self.nodes: dict[str, NodeRecord] = {}
        self.hosts: dict[str, set[str]] = {}
        """Nodes that have registered from each host, by host id; some may be elsewhere by now."""
        self.snapshot_nodes: dict[str, NodeRecord] = {}
        self.jobs: dict[str, JobRecord] = {}
        self.events: dict[str, deque[records.EventRecord]] = {}
        self.timers: TimerTable[TimerKey] = TimerTable()
        self.leases: LeaseTable[str] = LeaseTable(intervals.lease_s)
        self.changes = ChangeLog()
        """Changes that clients see."""
        self.recent_events: deque[tuple[int, records.EventRecord]] = deque(maxlen=MAX_EVENTS)
        """Events of all jobs and nodes, each with the version of the state that it came with."""
        self.watches: dict[str, dict[TimerKey, ParkedWatch]] = {}
        """Requests that wait for changes, by job; an empty id means the cluster."""
        self.reads: dict[int, ParkedRead] = {}
        self.tails = KeptTails()
        self.collections: dict[int, StackCollection] = {}
        self.hangs: dict[tuple[str, str, str], HangWatch] = {}
        """Watches by job, role and worker; the worker is empty where the ranks of a role are watched together."""
        self.batched_at: dict[TimerKey, float] = {}
        """Time at which work that large clusters do in batches was last done."""
        self.news: dict[str, dict[str, records.DirectoryEntry]] = {}
        """Changed directory entries, by job and worker, that agents still need."""
        self.leaving: dict[str, dict[tuple[str, records.JobWorkerIncarnation], Leaving]] = {}
        """The `leaving` of all nodes, by job."""

    @property
    def first_number(self) -> int:
        """First generation and version of this term."""
        return self.term << 32

    def alive_nodes(self) -> list[NodeRecord]:
        """Return the nodes believed alive, heard from in this term or not."""
        return [node for node in self.nodes.values() if node.state is records.NodeState.ALIVE]

    def nodes_of_host(self, host_id: str) -> list[NodeRecord]:
        names = sorted(self.hosts.get(host_id, ()))
        return [self.nodes[name] for name in names if name in self.nodes and self.nodes[name].info.host_id == host_id]

    def worker(self, job_id: str, name: str) -> WorkerRecord | None:
        job = self.jobs.get(job_id)
        return None if job is None else job.workers.get(name)

    def leaving_of(self, job_id: str) -> list[Leaving]:
        return list(self.leaving.get(job_id, {}).values())

    def add_leaving(self, node: NodeRecord, leaving: Leaving) -> None:
        node.leaving[leaving.incarnation] = leaving
        node.capacities.clear()
        self._leaving_changed(node, leaving.incarnation)
        self.leaving.setdefault(leaving.incarnation.job_id, {})[node.name, leaving.incarnation] = leaving

    def remove_leaving(self, node: NodeRecord, incarnation: records.JobWorkerIncarnation) -> bool:
        """Return False if the incarnation was not expected to leave."""
        if node.leaving.pop(incarnation, None) is None:
            return False
        node.capacities.clear()
        self._leaving_changed(node, incarnation)
        del self.leaving[incarnation.job_id][node.name, incarnation]
        if not self.leaving[incarnation.job_id]:
            del self.leaving[incarnation.job_id]
        return True

    def _leaving_changed(self, node: NodeRecord, incarnation: records.JobWorkerIncarnation) -> None:
        self.changes.touch(ChangedPart("node", "", node.name))
        if incarnation.job_id in self.jobs:
            self.changes.touch(ChangedPart("job", incarnation.job_id))
