"""A master that begins anew, with an empty store or an earlier copy of it: no job gets the id of another."""

import pytest

from tests.support.master import simple
from tests.support.sim.world import World
from unified.job.spec import JobSpec
from unified.protocol.client_master import Accepted, GetJob, JobStatus, StopJob, SubmitJob
from unified.protocol.records import Stage
from unified_simulator.agent import SimulatedAgent, resources

SPEC = JobSpec(name="job", roles=[simple("s", 1)])


@pytest.fixture
def world() -> World:
    world = World()
    world.add(SimulatedAgent("n1", resources(devices=4), lambda: world.now))
    world.run(1.0)
    return world


def ran(world: World) -> str:
    """Run a job of one name until it is stopped; return its id."""
    accepted = world.get(Accepted, SubmitJob(spec=SPEC))
    world.until_stage("job", Stage.RUNNING)
    world.request(StopJob(job=accepted.job_id))
    world.until_stage("job", Stage.STOPPED)
    return accepted.job_id


@pytest.mark.parametrize("is_restored", [False, True])
def test_an_id_is_never_used_twice(world: World, is_restored: bool) -> None:
    used = [ran(world)]
    backup = dict(world.stored)
    used.append(ran(world))
    for _ in range(3):
        world.lose_state(backup if is_restored else None)
        used += [ran(world), ran(world)]
    assert len(set(used)) == len(used)


def test_workers_of_a_job_that_the_master_has_lost_are_ended(world: World) -> None:
    lost = world.get(Accepted, SubmitJob(spec=SPEC)).job_id
    world.until_stage("job", Stage.RUNNING)
    world.lose_state()
    used = ran(world)
    world.until(lambda: not world.agents["n1"].incarnations, f"the ends of all workers, also of those before {used}")
    told = [(event.node, event.reason) for event in world.log if event.event == "unknown-job"]
    assert told == [
        ("n1", f"the workers of job {lost} are stopped: this master has no record of the job, as after the restore of "
         "an older backup")
    ]  # fmt: skip


def test_a_job_is_found_by_its_id_without_the_suffix_also(world: World) -> None:
    first = ran(world)
    world.restart_master()
    second = ran(world)
    assert (first, second) == ("job-1", "job-2-1")
    found = [world.get(JobStatus, GetJob(job=word)).job_id for word in ("job", "job-2", "job-2-1", "job-1")]
    assert found == [second, second, second, first]
