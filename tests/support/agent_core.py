"""Drives an agent's core, for the tests of its decisions."""

from collections.abc import Sequence

from unified.config.settings import Intervals
from unified.job.spec import EntryPoint, JobSpec, RoleSpec
from unified.protocol.agent_master import (
    AgentRegistered,
    DesiredJob,
    DesiredWorker,
    DesiredWorkers,
    HeartbeatSeen,
    MasterToAgent,
    ObservedWorker,
    ObservedWorkers,
    RunOrder,
)
from unified.protocol.records import Inbox, JobWorkerIncarnation, NodeResources, WorkerState
from unified.protocol.worker_agent import Hello, WorkerToAgent
from unified_agent.core.agent import AgentCore
from unified_agent.core.messages import (
    AgentAction,
    AgentEvent,
    AgentTick,
    KeepZygotes,
    MasterSaid,
    SendMaster,
    StartWorker,
    WorkerSaid,
    WorkerStarted,
    WriteLog,
)
from unified_agent.environment import NodeFacts
from unified_simulator.invariants.agents import check_agent

FACTS = NodeFacts(
    node="n1",
    incarnation="abc",
    hostname="host",
    host_id="boot",
    address="10.0.0.1",
    master="tcp://m:7077",
    pid=99,
    run_dir="/run/x",
    log_dir="/logs",
    resources=NodeResources(cpu=8, memory_mb=1000, disk_mb=1000),
    python="/usr/bin/python3",
)
W0 = JobWorkerIncarnation("job-1", "w_2-0_2-0", 0)
W1 = JobWorkerIncarnation("job-1", "w_2-1_2-1", 0)
STORE = JobWorkerIncarnation("job-1", "store", 0)


class Driver:
    """Steps a core and checks its invariants after each step; what it asked for since the last look is kept."""

    def __init__(
        self, *, registered: bool = True, give_up_s: float | None = None, leave_after_s: float | None = None
    ) -> None:
        intervals = Intervals(connect_s=10, start_s=60)
        self.core = AgentCore(FACTS, intervals, give_up_s=give_up_s, leave_after_s=leave_after_s)
        self.now = 100.0
        self.actions: list[AgentAction] = []
        self.generation = 0
        if registered:
            self.pass_time(0)
            self.hear(AgentRegistered(lease_s=15, heartbeat_s=1, relay="tcp://r:1"))
            self.pass_time(0.01)
            self.take()

    def step(self, event: AgentEvent) -> None:
        self.actions += self.core.step(self.now, event)
        assert check_agent(self.core) == []

    def hear(self, message: MasterToAgent) -> None:
        self.step(MasterSaid(message=message))

    def pass_time(self, seconds: float, *, answered: bool = False) -> None:
        end = self.now + seconds
        while (deadline := self.core.next_deadline) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            self.step(AgentTick())
            if answered:
                self.hear(HeartbeatSeen())
        self.now = end

    def desire(self, *workers: DesiredWorker, grace_s: float | None = None, jobs: Sequence[DesiredJob] = ()) -> None:
        self.generation += 1
        known = jobs or [DesiredJob(job_id="job-1", spec=SPEC, stop_grace_s=grace_s)]
        self.hear(DesiredWorkers(generation=self.generation, workers=list(workers), jobs=list(known)))

    def say(self, incarnation: JobWorkerIncarnation, *words: WorkerToAgent) -> None:
        for word in words:
            self.step(WorkerSaid(incarnation=incarnation, word=word))

    def start(self, incarnation: JobWorkerIncarnation, pid: int = 7) -> None:
        self.step(WorkerStarted(incarnation=incarnation, pid=pid))
        self.say(incarnation, Hello(pid=pid, inbox=Inbox(inbox_id=str(incarnation))))

    def take(self) -> list[AgentAction]:
        taken, self.actions = self.actions, []
        return taken

    def notable(self) -> list[AgentAction]:
        return [action for action in self.take() if not isinstance(action, SendMaster | WriteLog | KeepZygotes)]

    def observed(self) -> dict[str, ObservedWorker]:
        """The last observed set that was sent, once what was going to be sent has been."""
        self.pass_time(0.3)
        sent = [
            action.message
            for action in self.take()
            if isinstance(action, SendMaster) and isinstance(action.message, ObservedWorkers)
        ]
        return {f"{worker.name}#{worker.worker_incarnation}": worker for worker in sent[-1].workers}

    def state(self, incarnation: JobWorkerIncarnation) -> WorkerState:
        return self.core.workers[incarnation].state


ROLE = RoleSpec(name="w", kind="simple", entry_point=EntryPoint(kind="attribute", target="m"), total=2, per_group=2)
SPEC = JobSpec(name="job", roles=[ROLE], stop_grace_s=10)


def wanted(incarnation: JobWorkerIncarnation, run: int | None = None) -> DesiredWorker:
    if incarnation.worker == "store":
        return DesiredWorker(
            job_id=incarnation.job_id, name="store", worker_incarnation=incarnation.number, kind="store"
        )
    order = None if run is None else RunOrder(round=run, rank=0, world_size=2)
    return DesiredWorker(
        job_id=incarnation.job_id,
        name=incarnation.worker,
        worker_incarnation=incarnation.number,
        kind="worker",
        role="w",
        run=order,
    )


def next_incarnation(incarnation: JobWorkerIncarnation) -> JobWorkerIncarnation:
    return incarnation._replace(number=incarnation.number + 1)


def started(actions: Sequence[AgentAction]) -> list[JobWorkerIncarnation]:
    return [action.incarnation for action in actions if isinstance(action, StartWorker)]


def sent(actions: Sequence[AgentAction]) -> list[str]:
    return [type(action.message).__name__ for action in actions if isinstance(action, SendMaster)]


def launched(*workers: DesiredWorker) -> Driver:
    """Return a driver whose workers have started, and whose actions so far were taken."""
    driver = Driver()
    driver.desire(*workers)
    for worker in workers:
        driver.start(JobWorkerIncarnation(worker.job_id, worker.name, worker.worker_incarnation))
    driver.take()
    return driver
