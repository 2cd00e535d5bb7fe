"""A master that is killed at each of its writes in the course of a job: nothing is lost, and no worker restarts."""

from collections.abc import Callable
from typing import Literal

import pytest

from tests.support.master import CRASH, elastic, simple
from tests.support.sim.sim_agent import SimAgent, resources
from tests.support.sim.world import World
from unified.job.spec import JobSpec
from unified.protocol.client_master import SubmitJob
from unified.protocol.records import Stage, WorkerState
from unified_master.core.messages import MasterAction

Moment = Literal["before-save", "before-send"]


class CrashingWorld(World):
    """A world whose master dies at one of its transactions: before it is on disk, or before it is told."""

    def __init__(self, crash_number: int, moment: Moment) -> None:
        self.crash_number, self.moment = crash_number, moment
        self.num_saves = 0
        super().__init__()

    def _finish(self, actions: list[MasterAction], has_saves: bool) -> None:
        if has_saves:
            self.num_saves += 1
            if self.num_saves == self.crash_number:
                self.crash_at = self.moment
        super()._finish(actions, has_saves)


def live(crash_number: int, moment: Moment) -> tuple[CrashingWorld, dict[str, int]]:
    """A job from start to end, with a crash of one rank; return the world, and the incarnations at the end."""
    world = CrashingWorld(crash_number, moment)
    for number in (1, 2):
        world.add(SimAgent(f"n{number}", resources(devices=2)))
    world.run(1)
    spec = JobSpec(name="job", roles=[elastic(total=2), simple("s")], node_num=2, failover_exec=2)
    world.ask(SubmitJob(spec=spec))
    world.run(1)
    if not world.core.cluster.jobs:
        world.ask(SubmitJob(spec=spec))  # the client heard nothing, and says it again
    all_run: Callable[[], bool] = lambda: all(  # noqa: E731 - read twice
        one.state is WorkerState.RUNNING for one in world.job("job").workers.values() if one.kind == "worker"
    )
    world.until(all_run, "all workers to run")
    world.run(2)
    victim = world.job("job").ranks("e")[1]
    world.say(victim.node, world.sim_agent(victim.node).end(victim.job_id, victim.name, CRASH))
    world.run(2)
    world.until(all_run, "all workers to run again")
    world.run(2)
    for worker in [one for one in world.job("job").workers.values() if one.kind == "worker"]:
        world.say(worker.node, world.sim_agent(worker.node).finish(worker.job_id, worker.name))
    world.until_stage("job", Stage.STOPPED)
    job = world.job("job")
    assert job.exit_code == 0, world.recent()
    return world, {f"{one.role}-{one.rank}": one.incarnation for one in job.workers.values() if one.kind == "worker"}


@pytest.mark.parametrize("moment", ["before-save", "before-send"])
def test_a_job_goes_on_wherever_its_master_is_killed(moment: Moment) -> None:
    undisturbed, expected = live(0, moment)
    assert expected == {"e-0": 1, "e-1": 1, "s-0": 0}
    assert undisturbed.num_saves > 15
    for number in range(1, undisturbed.num_saves + 1):
        world, found = live(number, moment)
        assert found == expected, f"killed at transaction {number}:\n{world.recent()}"
        assert len(world.core.cluster.jobs) == 1, f"killed at transaction {number}: the job is there twice"
