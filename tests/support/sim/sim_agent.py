"""A stand-in for an agent: it converges to the desired set with delays, and does to its workers what a test asks."""

from collections.abc import Iterable

import msgspec

from unified.core.timers import TimerTable
from unified.protocol.agent_master import (
    AgentHeartbeat,
    AgentLeaving,
    AgentRegistered,
    AgentToMaster,
    DesiredWorker,
    DesiredWorkers,
    LogRead,
    MasterToAgent,
    ObservedWorker,
    ObservedWorkers,
    ReadAgentLog,
    RegisterAgain,
    RegisterAgent,
)
from unified.protocol.records import Device, Failure, Inbox, NameClaims, NodeResources, Progress, WorkerState

Life = tuple[str, str, int]
Said = tuple[int, AgentToMaster]
"""Request id and message."""


class SimLife(msgspec.Struct):
    wanted: DesiredWorker
    state: WorkerState = WorkerState.STARTING
    failure: Failure | None = None
    round: int = 0
    progress: Progress | None = None
    claims: NameClaims = NameClaims()
    is_begun: bool = False


class Delays(msgspec.Struct, frozen=True):
    """Seconds that things take on a simulated node."""

    start: float = 0.05
    run: float = 0.01
    stop: float = 0.10


class SimAgent:
    """One life of an agent. A new one is made when it is started again."""

    def __init__(
        self,
        node: str,
        resources: NodeResources,
        *,
        incarnation: str = "a",
        host_id: str = "",
        delays: Delays | None = None,
        labels: dict[str, str] | None = None,
    ) -> None:
        self.node = node
        self.labels = labels or {}
        self.resources = resources
        self.incarnation = incarnation
        self.host_id = host_id or f"host-{node}"
        self.delays = delays or Delays()
        self.lives: dict[Life, SimLife] = {}
        self.generation = 0
        self.heartbeat_s = 1.0
        self.is_stuck = False
        """Its processes ignore SIGTERM; they end at the end of their grace."""
        self.never_starts = False
        self._timers: TimerTable[tuple[str, Life | None]] = TimerTable()
        self._graces: dict[str, float] = {}

    @property
    def next_deadline(self) -> float | None:
        return self._timers.next_deadline

    def begin(self, now: float) -> list[Said]:
        self._timers.arm(("heartbeat", None), now + self.heartbeat_s)
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
                return [(request_id, log_of(message, self.node, self.incarnation))]
            case _:
                return []

    def tick(self, now: float) -> list[Said]:
        said: list[Said] = []
        has_news = False
        for what, life in self._timers.due(now):
            if life is None:
                self._timers.arm(("heartbeat", None), now + self.heartbeat_s)
                beat = AgentHeartbeat(node=self.node, incarnation=self.incarnation, generation=self.generation)
                said.append((2, beat))
            elif life in self.lives:
                has_news |= self._step_life(now, what, life)
        return [*said, self._observed()] if has_news else said

    def end(self, job_id: str, worker: str, failure: Failure | None) -> list[Said]:
        for life, sim in self.lives.items():
            if life[:2] == (job_id, worker) and sim.state is not WorkerState.EXITED and sim.is_begun:
                sim.state = WorkerState.EXITED
                sim.failure = failure
        return [self._observed()]

    def finish(self, job_id: str, worker: str) -> list[Said]:
        for sim in self._running(job_id, worker):
            sim.state = WorkerState.FINISHED
        return [self._observed()]

    def report_progress(self, job_id: str, worker: str, step: int) -> list[Said]:
        for sim in self._running(job_id, worker):
            sim.progress = Progress(step=step)
        return [self._observed()]

    def claim(self, job_id: str, worker: str, names: Iterable[str]) -> list[Said]:
        for sim in self._running(job_id, worker):
            sim.claims = next_claims(sim.claims, names)
        return [self._observed()]

    def leave(self) -> list[Said]:
        return [(3, AgentLeaving(node=self.node, incarnation=self.incarnation, reason="SIGTERM"))]

    def _running(self, *worker: str) -> list[SimLife]:
        return [sim for life, sim in self.lives.items() if life[:2] == worker and sim.state is WorkerState.RUNNING]

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
        )

    def _converge(self, now: float, message: DesiredWorkers) -> list[Said]:
        if message.generation < self.generation:
            return []
        self.generation = message.generation
        self._graces = {
            job.job_id: job.spec.stop_grace_s if job.stop_grace_s is None else job.stop_grace_s for job in message.jobs
        }
        wanted = {(one.job_id, one.name, one.worker_incarnation): one for one in message.workers}
        for life, sim in list(self.lives.items()):
            if life in wanted:
                sim.wanted = wanted[life]
                if sim.state is WorkerState.READY and sim.wanted.run is not None:
                    self._timers.arm(("run", life), now + self.delays.run)
            elif sim.state is WorkerState.EXITED or not sim.is_begun:
                del self.lives[life]
            else:
                grace = self._graces.get(life[0], 0.0)
                delay = grace if self.is_stuck else min(self.delays.stop, grace)
                if sim.state is not WorkerState.STOPPING or grace == 0:
                    sim.state = WorkerState.STOPPING
                    self._timers.arm(("gone", life), now + delay)
        for life, one in wanted.items():
            if life not in self.lives:
                self.lives[life] = SimLife(wanted=one)
        self._begin_free(now)
        return [self._observed()]

    def _begin_free(self, now: float) -> None:
        for life, sim in self.lives.items():
            rivals = [
                other
                for key, other in self.lives.items()
                if key[:2] == life[:2] and key != life and other.is_begun and other.state is not WorkerState.EXITED
            ]
            if not sim.is_begun and not rivals:
                sim.is_begun = True
                if not self.never_starts:
                    self._timers.arm(("ready", life), now + self.delays.start)

    def _step_life(self, now: float, what: str, life: Life) -> bool:
        sim = self.lives[life]
        match what, sim.state:
            case "ready", WorkerState.STARTING:
                sim.state = WorkerState.READY
                if sim.wanted.run is not None:
                    self._timers.arm(("run", life), now + self.delays.run)
            case "run", WorkerState.READY:
                sim.state = WorkerState.RUNNING
                sim.round = sim.wanted.run.round if sim.wanted.run is not None else 0
            case "gone", WorkerState.STOPPING:
                del self.lives[life]
                self._begin_free(now)
            case _:
                return False
        return True

    def _observed(self) -> Said:
        workers = [self._observed_life(life, sim) for life, sim in self.lives.items()]
        return (
            0,
            ObservedWorkers(node=self.node, incarnation=self.incarnation, generation=self.generation, workers=workers),
        )

    def _observed_life(self, life: Life, sim: SimLife) -> ObservedWorker:
        is_up = sim.state not in (WorkerState.STARTING, WorkerState.EXITED)
        is_store = sim.wanted.kind == "store"
        return ObservedWorker(
            job_id=life[0],
            name=life[1],
            worker_incarnation=life[2],
            kind=sim.wanted.kind,
            state=sim.state,
            pid=100,
            round=sim.round,
            inbox=Inbox(inbox_id="/".join(map(str, (*life, self.incarnation)))) if is_up and not is_store else None,
            store_port=29500 if is_up and is_store else None,
            progress=sim.progress,
            failure=sim.failure,
            log_file=f"/logs/{life[0]}/{life[1]}/{life[2]}.err",
            claims=sim.claims,
        )


def log_of(order: ReadAgentLog, node: str, incarnation: str) -> LogRead:
    data = f"{order.worker}#{order.worker_incarnation} says hello\n".encode()
    return LogRead(node=node, incarnation=incarnation, data=data, offset=0, next_offset=len(data), size=len(data))


def next_claims(claims: NameClaims, names: Iterable[str]) -> NameClaims:
    """The set after one step: what is new in it is claimed, what is missing is withdrawn."""
    number = claims.number + 1
    return NameClaims(number=number, names={name: claims.names.get(name, number) for name in names})


def resources(cpu: float = 8, devices: int = 0, kind: str = "virtual", **user: float) -> NodeResources:
    return NodeResources(
        cpu=cpu,
        memory_mb=16000,
        disk_mb=100000,
        devices=[Device(index=index, kind=kind) for index in range(devices)],
        user_defined=user,
    )
