"""A stand-in for an agent: it converges to the desired set with delays, and does to its workers what a test asks."""

from collections.abc import Iterable
from typing import Any

import msgspec

from unified.core.timers import TimerTable
from unified.job.spec import JobSpec
from unified.protocol.agent_master import (
    AgentHeartbeat,
    AgentLeaving,
    AgentRegistered,
    DesiredWorker,
    DesiredWorkers,
    MasterToAgent,
    ObservedWorker,
    ObservedWorkers,
    ReadAgentLog,
    ReadStacks,
    RegisterAgain,
    RegisterAgent,
    StacksRead,
)
from unified.protocol.records import (
    Failure,
    Inbox,
    NameClaims,
    NodeCheckReport,
    NodeResources,
    Progress,
    WorkerState,
)
from unified.protocol.snapshots import EarlierNode, ServerAddress, SnapshotHost
from unified.protocol.stacks import GroupCollectives, StackReport, StackSource, WorkerStacks
from unified_agent.core.lease import NodeLease
from unified_simulator.agent import REJOINS, Delays, log_of, next_claims, resources
from unified_simulator.node import Said

__all__ = ["REJOINS", "Delays", "Said", "resources"]
Incarnation = tuple[str, str, int]


class SimIncarnation(msgspec.Struct):
    wanted: DesiredWorker
    state: WorkerState = WorkerState.STARTING
    failure: Failure | None = None
    round: int = 0
    progress: Progress | None = None
    claims: NameClaims = NameClaims()
    is_begun: bool = False
    can_rejoin: bool = False
    left_round: int = 0
    node_check: NodeCheckReport | None = None


class SimAgent:
    """One incarnation of an agent. A new one is made when it is started again."""

    def __init__(
        self,
        node: str,
        resources: NodeResources,
        *,
        incarnation: str = "a",
        host_id: str = "",
        delays: Delays | None = None,
        labels: dict[str, str] | None = None,
        snapshots: SnapshotHost | None = None,
    ) -> None:
        self.node = node
        self.snapshots = snapshots
        self.labels = labels or {}
        self.resources = resources
        self.incarnation = incarnation
        self.host_id = host_id or f"host-{node}"
        self.delays = delays or Delays()
        self.incarnations: dict[Incarnation, SimIncarnation] = {}
        self.generation = 0
        self.heartbeat_s = 1.0
        self.is_stuck = False
        """Its processes ignore SIGTERM; they end at the end of their grace."""
        self.never_starts = False
        self.collectives: dict[str, list[GroupCollectives] | None] = {}
        """Process groups of workers, for those who ask for stacks; None: that one does not answer."""
        self.is_mute = False
        """Nobody is told any stacks or lines of a log."""
        self.log_error = ""
        """Error with which a read of the log is answered; empty: none."""
        self.is_hung = False
        """Its elastic loops do not get out of a collective."""
        self._timers: TimerTable[tuple[str, Incarnation | None]] = TimerTable()
        self._graces: dict[str, float] = {}
        self._jobs: dict[str, JobSpec] = {}
        self.copy_nodes: dict[str, ServerAddress | None] = {}
        """Nodes that hold copies of the jobs that are here, as the master said last."""
        self.earlier_nodes: dict[str, list[EarlierNode]] = {}

    @property
    def next_deadline(self) -> float | None:
        return self._timers.next_deadline

    @property
    def is_quiet(self) -> bool:
        return False

    def rouse(self, now: float) -> None:
        pass

    def begin(self, now: float) -> list[Said]:
        self._timers.arm(("heartbeat", None), now + self.heartbeat_s)
        return [(1, self._registration())]

    def reached(self, now: float) -> list[Said]:
        return [(1, self._registration())]

    def receive(self, now: float, request_id: int, message: MasterToAgent) -> list[Said]:
        match message:
            case AgentRegistered():
                return [self._observed()]
            case RegisterAgain():
                return [(1, self._registration())]
            case DesiredWorkers():
                return self._converge(now, message)
            case ReadAgentLog():
                read = log_of(message, self.node, self.incarnation)
                read = msgspec.structs.replace(read, error=self.log_error or read.error)
                return [] if self.is_mute else [(request_id, read)]
            case ReadStacks():
                return [] if self.is_mute else [(request_id, self._stacks(message))]
            case _:
                return []

    def lease(self, turned_at: float) -> NodeLease:
        return NodeLease()  # it has no lease keeper

    def lose_lease(self, reason: str) -> list[Said]:
        return []

    def cannot_read(self, reason: str) -> list[Said]:
        return []

    def kill_processes(self) -> None:
        pass

    def die(self) -> None:
        pass

    def tick(self, now: float) -> list[Said]:
        said: list[Said] = []
        has_news = False
        for what, incarnation in self._timers.due(now):
            if incarnation is None:
                self._timers.arm(("heartbeat", None), now + self.heartbeat_s)
                beat = AgentHeartbeat(node=self.node, incarnation=self.incarnation, generation=self.generation)
                said.append((2, beat))
            elif incarnation in self.incarnations:
                has_news |= self._step_incarnation(now, what, incarnation)
        return [*said, self._observed()] if has_news else said

    def end(self, job_id: str, worker: str, failure: Failure | None) -> list[Said]:
        for incarnation, sim in self.incarnations.items():
            if incarnation[:2] == (job_id, worker) and sim.state is not WorkerState.EXITED and sim.is_begun:
                sim.state = WorkerState.EXITED
                sim.failure = failure
        return [self._observed()]

    def finish(self, job_id: str, worker: str, state: WorkerState = WorkerState.FINISHED) -> list[Said]:
        for sim in self._running(job_id, worker):
            sim.state = state
        return [self._observed()]

    def report_progress(self, job_id: str, worker: str, step: int, waits_for: str = "", **more: Any) -> list[Said]:
        for sim in self._running(job_id, worker):
            sim.progress = Progress(step=step, waits_for=waits_for, **more)
        return [self._observed()]

    def claim(self, job_id: str, worker: str, names: Iterable[str]) -> list[Said]:
        for sim in self._running(job_id, worker):
            sim.claims = next_claims(sim.claims, names)
        return [self._observed()]

    def _stacks(self, order: ReadStacks) -> StacksRead:
        living = [incarnation for incarnation, sim in self.incarnations.items() if sim.state is not WorkerState.EXITED]
        workers = []
        for job_id, name, number in living:
            if job_id == order.job_id and name in order.workers:
                groups = self.collectives.get(name, [])
                sim = self.incarnations[job_id, name, number]
                note = "its process was stopped" if groups is None else ""
                source: StackSource = "none" if groups is None else "interpreter"
                stacks = WorkerStacks(
                    worker=name,
                    incarnation=number,
                    rank=sim.wanted.place.rank,
                    source=source,
                    note=note,
                    groups=groups,
                    handles=sim.progress.cleans_up if sim.progress else "",
                    has_ended=sim.state is WorkerState.FINISHED,
                )
                workers.append(stacks)
        return StacksRead(node=self.node, incarnation=self.incarnation, report=StackReport(workers=workers))

    def leave_round(self, job_id: str, worker: str) -> list[Said]:
        """A collective of an elastic loop fails."""
        for sim in self._running(job_id, worker):
            if sim.can_rejoin:
                sim.left_round = sim.round
        return [self._observed()]

    def check_node(self, job_id: str, worker: str, report: NodeCheckReport) -> list[Said]:
        """A rank has checked its node together with the others of its round."""
        for sim in self._running(job_id, worker):
            sim.node_check = report
        return [self._observed()]

    def leave(self) -> list[Said]:
        return [(3, AgentLeaving(node=self.node, incarnation=self.incarnation, reason="SIGTERM"))]

    def _running(self, *worker: str) -> list[SimIncarnation]:
        return [
            sim
            for incarnation, sim in self.incarnations.items()
            if incarnation[:2] == worker and sim.state is WorkerState.RUNNING
        ]

    def _registration(self) -> RegisterAgent:
        return RegisterAgent(
            node=self.node,
            incarnation=self.incarnation,
            hostname=f"{self.node}.local",
            host_id=self.host_id,
            address=f"10.0.0.{self.node[1:] or 0}",
            pid=1,
            resources=self.resources,
            labels=self.labels,
            snapshots=self.snapshots,
        )

    def _converge(self, now: float, message: DesiredWorkers) -> list[Said]:
        if message.generation < self.generation:
            return []
        known = self._jobs | {job.job_id: job.spec for job in message.jobs if job.spec is not None}
        if any(job.job_id not in known for job in message.jobs):
            return []  # an earlier message was lost
        self.generation = message.generation
        self._jobs = {job.job_id: known[job.job_id] for job in message.jobs}
        self._graces = {
            job.job_id: self._jobs[job.job_id].stop_grace_s if job.stop_grace_s is None else job.stop_grace_s
            for job in message.jobs
        }
        self.copy_nodes = {job.job_id: job.copy_node for job in message.jobs}
        self.earlier_nodes = {job.job_id: job.earlier_nodes for job in message.jobs}
        wanted = {(one.job_id, one.name, one.worker_incarnation): one for one in message.workers}
        for incarnation, sim in list(self.incarnations.items()):
            if incarnation in wanted:
                sim.wanted = wanted[incarnation]
                run, notice = sim.wanted.run, sim.wanted.notice
                if notice is not None and sim.can_rejoin and sim.left_round < notice.round and not self.is_hung:
                    self._timers.arm(("leave", incarnation), now + self.delays.leave)
                elif run is not None and (sim.state is WorkerState.READY or (sim.can_rejoin and run.round > sim.round)):
                    self._timers.arm(("run", incarnation), now + self.delays.run)
            elif sim.state is WorkerState.EXITED or not sim.is_begun:
                del self.incarnations[incarnation]
            else:
                grace = self._graces.get(incarnation[0], 0.0)
                delay = grace if self.is_stuck else min(self.delays.stop, grace)
                if sim.state is not WorkerState.STOPPING or grace == 0:
                    sim.state = WorkerState.STOPPING
                    self._timers.arm(("gone", incarnation), now + delay)
        for incarnation, one in wanted.items():
            if incarnation not in self.incarnations:
                self.incarnations[incarnation] = SimIncarnation(wanted=one)
        self._begin_free(now)
        return [self._observed()]

    def _begin_free(self, now: float) -> None:
        for incarnation, sim in self.incarnations.items():
            rivals = [
                other
                for key, other in self.incarnations.items()
                if key[:2] == incarnation[:2]
                and key != incarnation
                and other.is_begun
                and other.state is not WorkerState.EXITED
            ]
            if not sim.is_begun and not rivals:
                sim.is_begun = True
                if not self.never_starts:
                    self._timers.arm(("ready", incarnation), now + self.delays.start)

    def _step_incarnation(self, now: float, what: str, incarnation: Incarnation) -> bool:
        sim = self.incarnations[incarnation]
        match what, sim.state:
            case "ready", WorkerState.STARTING:
                sim.state = WorkerState.READY
                if sim.wanted.run is not None:
                    self._timers.arm(("run", incarnation), now + self.delays.run)
            case "run", WorkerState.READY | WorkerState.RUNNING:
                if self.is_hung and sim.state is WorkerState.RUNNING:
                    return False
                sim.state = WorkerState.RUNNING
                sim.round = sim.wanted.run.round if sim.wanted.run is not None else 0
                role = sim.wanted.role
                sim.can_rejoin = bool(role) and self._jobs[incarnation[0]].role(role).entry_point.target == REJOINS
            case "leave", WorkerState.RUNNING if sim.wanted.notice is not None:
                sim.left_round = sim.wanted.notice.round
            case "gone", WorkerState.STOPPING:
                del self.incarnations[incarnation]
                self._begin_free(now)
            case _:
                return False
        return True

    def _observed(self) -> Said:
        workers = [self._observed_incarnation(incarnation, sim) for incarnation, sim in self.incarnations.items()]
        return (
            0,
            ObservedWorkers(node=self.node, incarnation=self.incarnation, generation=self.generation, workers=workers),
        )

    def _observed_incarnation(self, incarnation: Incarnation, sim: SimIncarnation) -> ObservedWorker:
        is_up = sim.state not in (WorkerState.STARTING, WorkerState.EXITED)
        is_store = sim.wanted.kind == "store"
        return ObservedWorker(
            job_id=incarnation[0],
            name=incarnation[1],
            worker_incarnation=incarnation[2],
            kind=sim.wanted.kind,
            state=sim.state,
            pid=100,
            round=sim.round,
            inbox=Inbox(inbox_id="/".join(map(str, (*incarnation, self.incarnation))))
            if is_up and not is_store
            else None,
            store_port=29500 if is_up and is_store else None,
            progress=sim.progress,
            failure=sim.failure,
            log_file=f"/logs/{incarnation[0]}/{incarnation[1]}/{incarnation[2]}.err",
            claims=sim.claims,
            can_rejoin=sim.can_rejoin,
            left_round=sim.left_round,
            node_check=sim.node_check,
        )
