"""A job that waits costs others nothing, is told what it lacks, and begins as soon as that is there."""

from unittest.mock import Mock

import msgspec
import pytest

from tests.support.master import all_run, simple
from tests.support.sim.sim_agent import SimAgent, resources
from tests.support.sim.world import World
from unified.job.spec import FEW_ROLES, JobSpec, Resources
from unified.protocol.client_master import Changes, GetJob, JobStatus, SubmitJob, WatchCluster
from unified.protocol.records import Stage
from unified_master.core.changes import ChangedPart
from unified_master.core.scheduling import placement, waiting
from unified_master.core.scheduling.waiting import MANY_WORKERS

ONE_DEVICE = Resources(accelerator=1)


def submit(world: World, name: str, total: int) -> None:
    role = simple(total=total, resources=ONE_DEVICE)
    spec = JobSpec(name=name, roles=[role], node_num=MANY_WORKERS, device_per_node=MANY_WORKERS)
    world.ask(SubmitJob(spec=spec))


def run_and_end(world: World, name: str) -> None:
    submit(world, name, 1)
    world.until(lambda: all_run(world.job(name)), f"job {name} to run")
    worker = world.job(name).ranks("s")[0]
    world.say(worker.node, world.sim_agent(worker.node).finish(worker.job_id, worker.name))
    world.until_stage(name, Stage.STOPPED)


@pytest.fixture
def world() -> World:
    world = World()
    world.add(SimAgent("n1", resources(devices=8)))
    world.run(0.1)
    return world


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Jobs for which a plan is made."""
    made = Mock(side_effect=placement.place_within_ranges)
    monkeypatch.setattr(waiting, "place_within_ranges", made)
    return made


def planned(plans: Mock) -> list[str]:
    return [call.args[1].spec.name for call in plans.call_args_list]


def test_beside_a_large_job_that_waits_only_others_are_planned(world: World, plans: Mock) -> None:
    submit(world, "large", MANY_WORKERS)
    large = world.job("large")
    assert large.reason == "waits: its 256 workers need 256 devices at once, and the nodes have 8"
    version = world.core.cluster.changes.version_of(ChangedPart("job", large.job_id))
    for name in ("a", "b"):
        run_and_end(world, name)
    assert planned(plans) == ["a", "b"]
    assert world.core.cluster.changes.version_of(ChangedPart("job", large.job_id)) == version, (
        "nobody who waits for news of it is told anything"
    )


def test_what_has_changed_for_nobody_is_not_tried_again(world: World, plans: Mock) -> None:
    submit(world, "first", 8)
    submit(world, "second", 8)
    plans.reset_mock()
    submit(world, "third", 1)
    assert planned(plans) == [], "no room has become free, and the third is behind the second"
    assert world.job("third").reason == "waits: job second-2 came first and waits for room"


def test_a_large_job_begins_when_there_are_nodes_enough(world: World) -> None:
    submit(world, "large", MANY_WORKERS)
    run_and_end(world, "small")
    world.add(SimAgent("n2", resources(devices=MANY_WORKERS - 1)))
    world.until(lambda: all_run(world.job("large")), "the large job to run")


def test_a_large_job_is_told_that_others_have_what_it_needs_and_later_ones_wait_behind_it(world: World) -> None:
    world.add(SimAgent("n2", resources(devices=MANY_WORKERS - 8)))
    world.run(0.1)
    submit(world, "small", 1)
    world.until(lambda: all_run(world.job("small")), "the small job to run")
    submit(world, "large", MANY_WORKERS)
    submit(world, "later", 1)
    assert world.job("large").reason == "waits: its 256 workers need 256 devices at once, and less is free"
    assert world.job("later").reason == "waits: job large-2 came first and waits for room"
    worker = world.job("small").ranks("s")[0]
    world.say(worker.node, world.sim_agent(worker.node).finish(worker.job_id, worker.name))
    world.until(lambda: all_run(world.job("large")), "the large job to run")


def test_a_job_of_many_roles_is_as_any_other(world: World) -> None:
    names = [f"s{number}" for number in range(3 * FEW_ROLES)]
    spec = JobSpec(name="roles", roles=[simple(name, total=1 + number % 2) for number, name in enumerate(names)])
    world.ask(SubmitJob(spec=spec))
    world.until(lambda: all_run(world.job("roles")), "all roles to run")
    job = world.job("roles")
    assert [spec.role(name).name for name in names] == names
    assert [worker.name for name in names for worker in job.ranks(name)] == [*job.workers]
    assert job.ranks("none") == []
    with pytest.raises(KeyError, match="none"):
        spec.role("none")


def test_whoever_waits_for_news_in_vain_is_not_sent_all_workers_again(world: World) -> None:
    submit(world, "large", MANY_WORKERS)
    status = world.get(JobStatus, GetJob(job="large"))
    assert len(status.workers) == MANY_WORKERS
    known = world.get(Changes, WatchCluster(job="large"))
    assert len(known.workers[status.job_id]["name"]) == MANY_WORKERS
    same = world.get(Changes, WatchCluster(job="large", after_version=known.version, wait_s=0.5))
    assert (same.jobs, same.workers) == ([], {})


def test_a_large_job_that_waits_is_saved_by_its_spec_alone_and_is_whole_after_a_restart(world: World) -> None:
    submit(world, "large", MANY_WORKERS)
    assert not [key for kind, key in world.stored if kind == "worker"]
    before = world.get(JobStatus, GetJob(job="large")).workers
    world.restart_master()
    after = world.get(JobStatus, GetJob(job="large")).workers
    assert len(after) == MANY_WORKERS
    assert after == before


def test_a_node_takes_as_many_workers_as_its_agent_says() -> None:
    offer = msgspec.structs.replace(resources(devices=0, cpu=1000), max_workers=4)
    few = World()
    few.add(SimAgent("n1", offer))
    few.run(0.1)
    few.ask(SubmitJob(spec=JobSpec(name="large", roles=[simple(total=MANY_WORKERS)])))
    assert few.job("large").reason == "waits: its 256 workers need 256 processes at once, and the nodes have 4"
    few.ask(SubmitJob(spec=JobSpec(name="fits", roles=[simple(total=4)])))
    few.until(lambda: all_run(few.job("fits")), "four workers to run")
    few.ask(SubmitJob(spec=JobSpec(name="one", roles=[simple()])))
    assert few.job("one").reason == (
        "waits: role s needs 1 group of 1 process; a node has at most 4 (--max-workers of its agent)"
    )
