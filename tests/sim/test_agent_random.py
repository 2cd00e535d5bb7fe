"""An agent's core under random news from a host and a master that lose, repeat and reorder."""

import random
from typing import Any

import pytest

from tests.support.agent_core import FACTS
from unified.config.settings import Intervals
from unified.job.spec import EntryPoint, JobSpec, RoleSpec, WorkerPlace
from unified.protocol.agent_master import (
    AgentRegistered,
    DesiredJob,
    DesiredWorker,
    DesiredWorkers,
    HeartbeatSeen,
    RegisterAgain,
    RunOrder,
)
from unified.protocol.records import Failure, JobWorkerIncarnation, NameClaims, WorkerState
from unified.protocol.worker_agent import Claimed, Failed, Finished, Hello, Running, WorkerToAgent
from unified_agent.core.agent import AgentCore
from unified_agent.core.messages import (
    AgentEvent,
    AgentTick,
    Exit,
    MasterReached,
    MasterSaid,
    SignalWorker,
    StartWorker,
    StopAsked,
    TellWorker,
    WorkerExited,
    WorkerSaid,
    WorkerStarted,
)
from unified_simulator.invariants.agents import check_agent

ROLE = RoleSpec(name="w", kind="simple", entry_point=EntryPoint(kind="attribute", target="m"), total=3)
SPEC = JobSpec(name="job", roles=[ROLE], stop_grace_s=2)
STEPS = 400


class World:
    """Processes that do as they like, and a master that changes its mind."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.core = AgentCore(FACTS, Intervals())
        self.now = 0.0
        self.alive: dict[JobWorkerIncarnation, WorkerState] = {}
        self.started: set[JobWorkerIncarnation] = set()
        self.incarnations = [0, 0, 0]
        self.generation = 0
        self.desired: list[DesiredWorker] = []
        self.is_over = False

    def step(self, event: AgentEvent) -> None:
        for action in self.core.step(self.now, event):
            match action:
                case StartWorker(incarnation=incarnation):
                    assert incarnation not in self.started, f"{incarnation} was started twice"
                    assert not [other for other in self.alive if other[:2] == incarnation[:2]], (
                        f"{incarnation} beside its last incarnation"
                    )
                    self.started.add(incarnation)
                    self.alive[incarnation] = WorkerState.STARTING
                case SignalWorker(incarnation=incarnation, how="kill"):
                    if incarnation in self.alive:
                        self.alive[incarnation] = WorkerState.EXITED
                case TellWorker(incarnation=incarnation):
                    assert incarnation in self.started
                case Exit():
                    self.is_over = True
        broken = check_agent(self.core)
        assert not broken, broken

    def wish(self) -> None:
        """The master desires something else, or says the same again, or something old."""
        how = self.random.random()
        if how < 0.6:
            self.generation += 1
            before = {worker.place.rank for worker in self.desired}
            ranks = [rank for rank in range(3) if self.random.random() < 0.8]
            for rank in ranks:  # what was left out once comes back as another incarnation
                self.incarnations[rank] += rank not in before or self.random.random() < 0.3
            self.desired = [self.worker(rank) for rank in ranks]
        generation = self.generation if how < 0.9 else self.random.randint(0, self.generation)
        workers = self.desired if generation == self.generation else []
        self.desire(generation, workers)

    def desire(self, generation: int, workers: list[DesiredWorker]) -> None:
        job = DesiredJob(job_id="job-1", spec=SPEC, stop_grace_s=self.random.choice([None, 0.0, 1.0]))
        self.step(MasterSaid(message=DesiredWorkers(generation=generation, workers=workers, jobs=[job])))

    def worker(self, rank: int) -> DesiredWorker:
        run = RunOrder(round=self.random.randint(1, 3), rank=rank, world_size=3) if self.random.random() < 0.5 else None
        incarnation: dict[str, Any] = {
            "job_id": "job-1",
            "name": f"w-{rank}",
            "worker_incarnation": self.incarnations[rank],
        }
        return DesiredWorker(**incarnation, kind="worker", role="w", place=WorkerPlace(rank=rank), run=run)

    def live(self) -> None:
        """Some process does something."""
        if not self.alive:
            return
        incarnation = self.random.choice(sorted(self.alive))
        number = self.random.randint(0, 9)
        claimed = Claimed(claims=NameClaims(number=number, names={"x": number}))
        failed = Failed(failure=Failure(summary="no"))
        words: list[WorkerToAgent] = [Hello(pid=5), Running(round=1), Finished(), failed, claimed]
        how = self.random.random()
        if self.alive[incarnation] is WorkerState.EXITED or how < 0.2:
            del self.alive[incarnation]
            self.step(WorkerExited(incarnation=incarnation, code=self.random.choice([0, 1, -9])))
        elif how < 0.4:
            self.step(WorkerStarted(incarnation=incarnation, pid=5))
        else:
            self.step(WorkerSaid(incarnation=incarnation, word=self.random.choice(words)))

    def talk(self) -> None:
        terms = AgentRegistered(lease_s=15, heartbeat_s=1)
        news: list[AgentEvent] = [MasterSaid(message=terms), MasterSaid(message=HeartbeatSeen()), MasterReached()]
        self.step(self.random.choice(news))
        if self.random.random() < 0.1:
            self.step(MasterSaid(message=RegisterAgain()))
            self.step(MasterSaid(message=terms))
            self.desire(self.generation, self.desired)

    def pass_time(self) -> None:
        self.now += self.random.choice([0.001, 0.1, 1.0, 10.0])
        self.step(AgentTick())

    def settle(self, within_s: float) -> None:
        """Every process that was killed dies, and time passes."""
        end = self.now + within_s
        while self.now < end and not self.is_over:
            for incarnation in [
                incarnation for incarnation, state in self.alive.items() if state is WorkerState.EXITED
            ]:
                del self.alive[incarnation]
                self.step(WorkerExited(incarnation=incarnation, code=-9))
            self.now += 0.1
            self.step(AgentTick())


@pytest.mark.parametrize("seed", range(40))
def test_what_is_desired_comes_to_be_whatever_happened_before(seed: int) -> None:
    world = World(seed)
    world.step(MasterSaid(message=AgentRegistered(lease_s=15, heartbeat_s=1)))
    for _ in range(STEPS):
        world.random.choice([world.wish, world.live, world.live, world.live, world.talk, world.pass_time])()
    world.step(MasterSaid(message=AgentRegistered(lease_s=15, heartbeat_s=1)))
    world.generation += 1
    world.incarnations = [number + 1 for number in world.incarnations]
    world.desired = [world.worker(rank) for rank in range(3)]
    world.desire(world.generation, world.desired)
    world.settle(within_s=20)
    wanted = {JobWorkerIncarnation("job-1", worker.name, worker.worker_incarnation) for worker in world.desired}
    assert set(world.alive) == wanted
    world.step(StopAsked(reason="the end"))
    world.settle(within_s=40)
    assert world.is_over
    assert not world.alive
