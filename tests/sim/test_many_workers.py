"""Many workers on one node: the work of both cores grows with their number, and no faster. No clock is read."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.master import CRASH, elastic, rejoining, simple
from tests.support.sim.world import World
from tests.support.work_count import WorkCount
from unified.job.spec import JobSpec, Resources, RoleSpec
from unified.protocol.client_master import DrainNode, Explain, GetJob, ListNodes, RestartWorkers, StopJob, SubmitJob
from unified.protocol.records import NodeState, Stage, WorkerState
from unified_agent.core.agent import AgentCore
from unified_master.core.master import MasterCore
from unified_master.core.state import JobRecord
from unified_simulator import agent as simulated
from unified_simulator.agent import SimulatedAgent, resources

FEW = 80
LINEAR = 2.6
"""Most work with twice as many workers, as a multiple; quadratic work takes 4 times as much."""
LEAST = 100
"""Lines for each worker up to which work may grow as it likes: retries and heartbeats, whose number varies."""
LIMITS: dict[str, Any] = {"restart_backoff_s": 0.0, "node_max_restart": 1000, "job_max_restart": 1000}
MANY: dict[str, Any] = {"max_restart": 1000, "per_node_max_failure": 1_000_000}
ROLES: dict[str, Callable[[int], RoleSpec]] = {
    "one group": lambda number: elastic("w", number, **MANY, per_group=number),
    "in place": lambda number: rejoining("w", number, **MANY, accelerator=1),
    "alone": lambda number: simple("w", number, **MANY, restart_alone=True, resources=Resources(accelerator=1)),
    "watched": lambda number: simple("w", number, **MANY, hang_timeout_s=20.0, resources=Resources(accelerator=0.7)),
}
STEEP = [("alone", "all fail"), ("in place", "all fail")]
"""Known to grow faster (docs/failures.md, Limits): each restart of a worker without its peers looks at its job."""


class Story:
    """The life of a job with one role, all of it on one of two nodes."""

    def __init__(self, role: RoleSpec, number: int) -> None:
        self.world = World(check_all_every=1_000_000)
        for name in ("n1", "n2"):
            self.world.add(SimulatedAgent(name, resources(cpu=number, devices=number), lambda: self.world.now))
        self.world.run(0.1)
        self._looks_from = 0
        self.spec = JobSpec(name="job", roles=[role], node_num=1, device_per_node=number, **LIMITS)

    @property
    def job(self) -> JobRecord:
        return self.world.job("job")

    @property
    def agent(self) -> SimulatedAgent:
        agent = self.world.agents[self.job.workers[self.first].node]
        assert isinstance(agent, SimulatedAgent)
        return agent

    @property
    def first(self) -> str:
        return next(iter(self.job.workers))

    def phases(self) -> Iterator[str]:
        """Yield the name of each phase after it."""
        self.world.ask(SubmitJob(spec=self.spec))
        yield "submit"
        yield self.all_run("start")
        for request in (GetJob(job="job"), ListNodes(), Explain(job="job", worker=self.first)):
            self.world.ask(request)
        yield "status"
        self.report(waits_for="a debugger")
        self.report()
        self.world.run(30.0)
        yield "rest"
        self.world.ask(RestartWorkers(job="job", workers=[]))
        yield self.all_run("restart")
        self.world.act(self.agent, lambda: self.agent.end(self.job.job_id, self.first, CRASH))
        yield self.all_run("one fails")
        self.agent.kill_processes()
        self.world.wake(self.agent.node)
        yield self.all_run("all fail")
        node = self.agent.node
        self.world.ask(DrainNode(node=node))
        yield self.all_run("drain")
        self.world.ask(DrainNode(node=node, is_over=True))
        lost = self.agent.node
        self.world.kill_agent(lost)
        self.world.until(lambda: self.world.core.cluster.nodes[lost].state is NodeState.LOST, "the node to be lost")
        yield self.all_run("node lost")
        self.world.ask(StopJob(job="job"))
        self.world.until_stage("job", Stage.STOPPED)
        yield "stop"

    def report(self, waits_for: str = "") -> None:
        agent, job_id = self.agent, self.job.job_id
        for worker in list(self.job.workers):
            self.world.act(agent, lambda worker=worker: agent.report_progress(job_id, worker, 1, waits_for))  # type: ignore[misc]
        self.world.run(1.0)

    def all_run(self, phase: str) -> str:
        self.world.run(1.0)
        self.world.until(self._all_run, f"all workers to run: {phase}", 1000.0)
        return phase

    def _all_run(self) -> bool:
        if self.job.stage is not Stage.RUNNING or self.world.num_steps < self._looks_from:
            return False
        self._looks_from = self.world.num_steps + 10  # a look at all workers takes long
        return all(one.state is WorkerState.RUNNING for one in self.job.workers.values() if one.kind == "worker")


@pytest.mark.parametrize("name", ROLES)
def test_work_grows_no_faster_than_the_workers_of_a_node(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "check_agent", lambda _core: [])
    counts = {core.__name__: WorkCount(monkeypatch, core, "step") for core in (MasterCore, AgentCore)}
    work: dict[tuple[str, str], list[int]] = {}
    for number in (FEW, 2 * FEW):
        for phase in Story(ROLES[name](number), number).phases():
            for core, count in counts.items():
                work.setdefault((phase, core), []).append(count.take())
    assert len(work) == 20
    steep = {
        key: (few, many)
        for key, (few, many) in work.items()
        if many > max(LINEAR * few, LEAST * 2 * FEW) and (name, key[0]) not in STEEP
    }
    assert not steep, steep
