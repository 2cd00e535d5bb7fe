"""One incarnation of an agent: the real core, and processes that run in virtual time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from unified.config.settings import Intervals
from unified.core.timers import TimerTable
from unified.protocol.agent_master import DesiredJob, HeartbeatSeen, LogRead, MasterToAgent, ReadAgentLog, RunOrder
from unified.protocol.records import (
    Device,
    DirectoryEntry,
    Evidence,
    Failure,
    Inbox,
    JobWorkerIncarnation,
    NameClaims,
    NodeResources,
    Progress,
)
from unified.protocol.snapshots import SnapshotHost
from unified.protocol.stacks import StackReport, WorkerStacks
from unified.protocol.worker_agent import (
    Claimed,
    DumpStacks,
    Failed,
    Finished,
    Hello,
    Launch,
    Notice,
    RecordStep,
    Rejoins,
    Reported,
    Run,
    Running,
    StacksDumped,
    StepRecorded,
    WorkerToAgent,
)
from unified_agent.core.agent import AgentCore
from unified_agent.core.lease import NodeLease, request_id_at
from unified_agent.core.membership import MembershipState
from unified_agent.core.messages import (
    AgentAction,
    AgentEvent,
    AgentTick,
    Exit,
    LeaseLost,
    MasterReached,
    MasterSaid,
    MasterUnreadable,
    Reconnect,
    SampleWorker,
    SendLog,
    SendMaster,
    SignalWorker,
    StartWorker,
    StopAsked,
    TellWorker,
    WorkerExited,
    WorkerSaid,
    WorkerStarted,
)
from unified_agent.environment import NodeFacts
from unified_simulator.invariants.agents import check_agent
from unified_simulator.measure import Longest
from unified_simulator.node import Said

SIGNAL_S = 0.001
"""Time from SIGKILL, or from the last message of a failing worker, to the end of its process."""


REJOINS = "rejoins"
"""Target of an entry point whose process takes part in round after round, as an elastic loop does."""


class Delays(msgspec.Struct, frozen=True):
    """Durations of actions on a simulated node, in seconds."""

    start: float = 0.05
    run: float = 0.01
    stop: float = 0.10
    leave: float = 0.02
    """Time from a notice to the boundary at which an elastic loop leaves its round."""


class SimulatedProcess(msgspec.Struct):
    """A process of a worker, or of a job's store host."""

    launch: Launch
    is_running: bool = False
    """True if the process is in its entry point."""
    order: RunOrder | None = None
    """Last order to run."""
    code: int = 0
    """Exit code that the process will have."""
    claims: NameClaims = NameClaims()
    left_round: int = 0
    is_gone: bool = False
    """True if the process was killed, and its agent has not seen the end yet."""
    evidence: Evidence | None = None

    @property
    def round(self) -> int:
        return 0 if self.order is None else self.order.round

    @property
    def can_rejoin(self) -> bool:
        """True if the process is in an elastic loop."""
        launch = self.launch
        is_loop = launch.kind == "worker" and launch.spec.role(launch.role).entry_point.target == REJOINS
        return is_loop and self.is_running


ProcessWatch = Callable[["SimulatedAgent", JobWorkerIncarnation, bool], None]
"""Called when a process begins to run its entry point or a further round (True), and when it is gone (False)."""


class SimulatedAgent:
    """The real core of an agent with simulated processes. Its invariants are checked after every step.

    Args:
        clock: returns the cluster's virtual time; used where a method of this agent is called without a time.
        on_process: called when a process runs and when it is gone.
    """

    def __init__(
        self,
        node: str,
        resources: NodeResources,
        clock: Callable[[], float],
        *,
        incarnation: str = "a",
        host_id: str = "",
        delays: Delays | None = None,
        labels: dict[str, str] | None = None,
        on_process: ProcessWatch | None = None,
    ) -> None:
        self.node = node
        self.faults: Counter[str] = Counter()
        """Faults that hit each job here; all agents of a cluster may share this object."""
        self._num_zygotes = 0
        self.incarnation = incarnation
        self._clock = clock
        self._on_process = on_process or (lambda _agent, _incarnation, _is_running: None)
        self.delays = delays or Delays()
        self.incarnations: dict[JobWorkerIncarnation, SimulatedProcess] = {}
        """Processes that exist."""
        self.is_stuck = False
        """True if its processes ignore SIGTERM."""
        self.is_over = False
        self.times = Longest()
        """Longest step of its core; all agents of a cluster may share this object."""
        self._timers: TimerTable[tuple[str, JobWorkerIncarnation | None]] = TimerTable()
        self._core = AgentCore(
            NodeFacts(
                node=node,
                incarnation=incarnation,
                hostname=f"{node}.local",
                host_id=host_id or f"host-{node}",
                address=f"10.0.0.{node[1:] or 0}",
                master="tcp://10.0.0.100:7077",
                pid=1,
                run_dir="/run",
                log_dir="/logs",
                resources=resources,
                labels=labels or {},
            ),
            Intervals(),
        )

    def serve_snapshots(self, host: SnapshotHost) -> None:
        """Give the node a snapshot server; to be called before the agent begins."""
        self._core.membership.snapshots = host

    @property
    def snapshots(self) -> SnapshotHost | None:
        return self._core.membership.snapshots

    @property
    def jobs(self) -> dict[str, DesiredJob]:
        """Jobs with workers here, by id."""
        return self._core.jobs

    @property
    def next_deadline(self) -> float | None:
        deadlines = [] if self.is_over else [self._core.next_deadline, self._timers.next_deadline]
        return min((due for due in deadlines if due is not None), default=None)

    @property
    def generation(self) -> int:
        """Generation of the last desired set that the agent accepted."""
        return self._core.generation

    @property
    def is_quiet(self) -> bool:
        timers = {timer.kind for timer in self._core.timers}
        is_member = self._core.membership.state is MembershipState.REGISTERED
        return is_member and self._timers.next_deadline is None and timers <= {"heartbeat"}

    def rouse(self, now: float) -> None:
        self._step(now, MasterSaid(message=HeartbeatSeen(), request_id=request_id_at(now)))

    def begin(self, now: float) -> list[Said]:
        return self._step(now, MasterReached())

    def reached(self, now: float) -> list[Said]:
        return self._step(now, MasterReached())

    def receive(self, now: float, request_id: int, message: MasterToAgent) -> list[Said]:
        return self._step(now, MasterSaid(message=message, request_id=request_id))

    def tick(self, now: float) -> list[Said]:
        said: list[Said] = []
        for what, incarnation in self._timers.due(now):
            said += self._do(now, what, incarnation)
        if (deadline := self._core.next_deadline) is not None and deadline <= now:
            said += self._step(now, AgentTick())
        return said

    def lease(self, turned_at: float) -> NodeLease:
        return self._core.membership.lease(turned_at)

    def lose_lease(self, reason: str) -> list[Said]:
        return self._step(self._clock(), LeaseLost(reason=reason))

    def cannot_read(self, reason: str) -> list[Said]:
        return self._step(self._clock(), MasterUnreadable(reason=reason))

    def kill_processes(self) -> None:
        self._kill_all(lambda: SIGNAL_S, None)

    def kill_zygote(self, late_s: Callable[[], float]) -> list[Said]:
        """Kill the zygote, and all processes with it; the agent sees each end `late_s` later."""
        self._num_zygotes += 1
        cause = f"zygote {self._num_zygotes} of {self.node}, {self.incarnation}"
        self._kill_all(late_s, Evidence(killed_for="its zygote was killed", cause=cause))
        return []

    def kill(self, incarnation: JobWorkerIncarnation, late_s: float) -> None:
        """Kill a process whose end the agent sees `late_s` later."""
        self.faults[incarnation.job_id] += 1
        self._kill(incarnation, late_s)

    def _kill_all(self, late_s: Callable[[], float], evidence: Evidence | None) -> None:
        self.faults.update({incarnation.job_id for incarnation in self.incarnations})
        for incarnation, process in self.incarnations.items():
            process.evidence = evidence
            self._kill(incarnation, late_s())

    def _kill(self, incarnation: JobWorkerIncarnation, late_s: float) -> None:
        process = self.incarnations[incarnation]
        process.code, process.is_gone, process.is_running = -9, True, False
        self._on_process(self, incarnation, False)
        self._timers.arm(("exit", incarnation), self._clock() + late_s)

    def die(self) -> None:
        while self.incarnations:
            incarnation, _ = self.incarnations.popitem()
            self._on_process(self, incarnation, False)

    # -- actions on its processes ------------------------------------------------------------------------------------

    def end(self, job_id: str, worker: str, failure: Failure | None) -> list[Said]:
        """End the worker's process now: by a signal, with an exception, or (None) because its work is done."""
        said: list[Said] = []
        self.faults[job_id] += 1
        now = self._clock()
        for incarnation in self._of(job_id, worker):
            word, code = _last_word(failure)
            if word is not None and (failure is not None or self.incarnations[incarnation].is_running):
                said += self._step(now, WorkerSaid(incarnation=incarnation, word=word))
            said += self._exited(now, incarnation, code)
        return said

    def finish(self, job_id: str, worker: str) -> list[Said]:
        return self._say_if_running(job_id, worker, Finished())

    def report_progress(self, job_id: str, worker: str, step: int, waits_for: str = "") -> list[Said]:
        return self._say_if_running(job_id, worker, Reported(progress=Progress(step=step, waits_for=waits_for)))

    def claim(self, job_id: str, worker: str, names: Iterable[str]) -> list[Said]:
        said: list[Said] = []
        for incarnation in self._of(job_id, worker):
            if self.incarnations[incarnation].is_running:
                self.incarnations[incarnation].claims = next_claims(self.incarnations[incarnation].claims, names)
                said += self._step(
                    self._clock(),
                    WorkerSaid(incarnation=incarnation, word=Claimed(claims=self.incarnations[incarnation].claims)),
                )
        return said

    def directory(self, job_id: str) -> list[DirectoryEntry]:
        return self._core.directories[job_id].entries

    def leave_round(self, job_id: str, worker: str) -> list[Said]:
        said: list[Said] = []
        self.faults[job_id] += 1
        for incarnation in self._of(job_id, worker):
            self.incarnations[incarnation].left_round = self.incarnations[incarnation].round
            said += self._say_rejoins(self._clock(), incarnation, self.incarnations[incarnation])
        return said

    def leave(self) -> list[Said]:
        return self._step(self._clock(), StopAsked(reason="SIGTERM"))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _of(self, job_id: str, worker: str) -> list[JobWorkerIncarnation]:
        return [
            JobWorkerIncarnation(*incarnation)
            for incarnation in self.incarnations
            if incarnation[:2] == (job_id, worker)
        ]

    def _say_if_running(self, job_id: str, worker: str, word: WorkerToAgent) -> list[Said]:
        said: list[Said] = []
        for incarnation in self._of(job_id, worker):
            if self.incarnations[incarnation].is_running:
                said += self._step(self._clock(), WorkerSaid(incarnation=incarnation, word=word))
        return said

    def _step(self, now: float, event: AgentEvent) -> list[Said]:
        if self.is_over:
            return []
        begun = time.thread_time()
        actions = self._core.step(now, event)
        self.times.note(now, time.thread_time() - begun, lambda: f"{_named(event)}: {len(actions)} actions")
        broken = check_agent(self._core)
        assert not broken, f"{self.node} at {now:.3f} after {event}: {broken}"
        return self._carry_out(now, actions)

    def _carry_out(self, now: float, actions: Iterable[AgentAction]) -> list[Said]:
        said: list[Said] = []
        for action in actions:
            match action:
                case SendMaster(message=message, request_id=request_id):
                    said.append((request_id or 1, message))
                case Reconnect():
                    self._timers.arm(("reached", None), now + self.delays.run)
                case StartWorker(incarnation=incarnation, launch=launch):
                    rivals = [other for other in self.incarnations if other[:2] == incarnation[:2]]
                    assert not rivals, f"{incarnation} is started beside {rivals}"
                    self.incarnations[incarnation] = SimulatedProcess(launch)
                    self._timers.arm(("started", incarnation), now)
                    self._timers.arm(("hello", incarnation), now + self.delays.start)
                case TellWorker(incarnation=incarnation, message=Run(order=order)) if incarnation in self.incarnations:
                    self.incarnations[incarnation].order = order
                    self._timers.arm(("run", incarnation), now + self.delays.run)
                case TellWorker(incarnation=incarnation, message=DumpStacks(number=number)) if (
                    incarnation in self.incarnations
                ):
                    stacks = WorkerStacks(
                        worker=incarnation.worker, incarnation=incarnation.number, rank=0, node=self.node
                    )
                    dumped = StacksDumped(number=number, report=StackReport(workers=[stacks]))
                    said += self._step(now, WorkerSaid(incarnation=incarnation, word=dumped))
                case TellWorker(incarnation=incarnation, message=Notice(notice=notice)) if (
                    incarnation in self.incarnations
                ):
                    if self.incarnations[incarnation].can_rejoin:
                        self.incarnations[incarnation].left_round = notice.round
                        self._timers.arm(("leave", incarnation), now + self.delays.leave)
                case SignalWorker(incarnation=incarnation, how=str() as how) if incarnation in self.incarnations:
                    self._signal(now, incarnation, how)
                case SendLog(order=order, request_id=request_id) | SampleWorker(order=order, request_id=request_id):
                    said.append((request_id, log_of(order, self.node, self._core.facts.incarnation)))
                case TellWorker(incarnation=incarnation, message=RecordStep()) if incarnation in self.incarnations:
                    said += self._step(now, WorkerSaid(incarnation=incarnation, word=StepRecorded()))
                case Exit():
                    self.is_over = True
        return said

    def _signal(self, now: float, incarnation: JobWorkerIncarnation, how: str) -> None:
        process = self.incarnations[incarnation]
        if how == "kill":
            process.code = -9
            self._timers.arm(("exit", incarnation), now + SIGNAL_S)
        elif not self.is_stuck:
            process.code = 0
            self._timers.arm(("exit", incarnation), now + self.delays.stop)

    def _do(self, now: float, what: str, incarnation: JobWorkerIncarnation | None) -> list[Said]:
        if incarnation is None:
            return self._step(now, MasterReached())
        process = self.incarnations.get(incarnation)
        if process is None or (process.is_gone and what != "exit"):
            return []
        match what:
            case "started":
                return self._step(now, WorkerStarted(incarnation=incarnation, pid=100))
            case "hello":
                return self._step(now, WorkerSaid(incarnation=incarnation, word=_hello(incarnation, process.launch)))
            case "run":
                process.is_running = True
                self._on_process(self, incarnation, True)
                said = self._step(now, WorkerSaid(incarnation=incarnation, word=Running(round=process.round)))
                return [*said, *self._say_rejoins(now, incarnation, process)]
            case "leave":
                return self._say_rejoins(now, incarnation, process)
            case _:
                return self._exited(now, incarnation, process.code)

    def _say_rejoins(self, now: float, incarnation: JobWorkerIncarnation, process: SimulatedProcess) -> list[Said]:
        if not process.can_rejoin:
            return []
        return self._step(
            now, WorkerSaid(incarnation=incarnation, word=Rejoins(is_able=True, left_round=process.left_round))
        )

    def _exited(self, now: float, incarnation: JobWorkerIncarnation, code: int) -> list[Said]:
        evidence = self.incarnations.pop(incarnation).evidence
        self._on_process(self, incarnation, False)
        return self._step(now, WorkerExited(incarnation=incarnation, code=code, evidence=evidence))


def _named(event: AgentEvent) -> str:
    message = getattr(event, "message", None)
    return f"{type(event).__name__} {type(message).__name__}" if message is not None else type(event).__name__


def _hello(incarnation: JobWorkerIncarnation, launch: Launch) -> Hello:
    if launch.kind == "store":
        return Hello(pid=100, store_port=29500)
    return Hello(pid=100, inbox=Inbox(inbox_id=f"{incarnation}@{launch.node}"))


def _last_word(failure: Failure | None) -> tuple[WorkerToAgent | None, int]:
    if failure is None:
        return Finished(), 0
    if failure.category == "crash":
        return None, -9
    return Failed(failure=failure), 1


def log_of(order: ReadAgentLog, node: str, incarnation: str) -> LogRead:
    data = f"{order.worker}#{order.worker_incarnation} says hello\n".encode()
    return LogRead(node=node, incarnation=incarnation, data=data, offset=0, next_offset=len(data), size=len(data))


def next_claims(claims: NameClaims, names: Iterable[str]) -> NameClaims:
    """Return the claims after one step: new names are claimed, missing names are withdrawn."""
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
