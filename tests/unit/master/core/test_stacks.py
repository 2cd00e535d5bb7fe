"""The master's collections of stacks: whom it asks, and what a client is answered."""

from tests.support.master import Bench, simple
from tests.support.sim.world import World
from unified.protocol.client_master import GetStacks, JobStacks, Refused
from unified.protocol.stacks import GroupCollectives
from unified_master.core.health import stacks
from unified_master.core.health.stacks import SLACK_S


def bench() -> Bench:
    return Bench(simple("a", 2), simple("b", 2), nodes=2)


def told(world: World, **request: object) -> dict[str, str]:
    answer = world.get(JobStacks, GetStacks(job="job", **request))  # type: ignore[arg-type]
    assert len({worker.worker for worker in answer.report.workers}) == len(answer.report.workers)
    return {worker.worker.partition("_")[0] + f"-{worker.rank}": worker.note for worker in answer.report.workers}


def test_all_nodes_are_asked_for_their_workers() -> None:
    world = bench().world
    assert told(world) == dict.fromkeys(("a-0", "a-1", "b-0", "b-1"), "")
    assert told(world, role="b") == {"b-0": "", "b-1": ""}
    assert told(world, rank=1) == {"a-1": "", "b-1": ""}
    assert told(world, role="a", rank=0) == {"a-0": ""}
    assert world.core.cluster.collections == {}


def test_what_a_worker_says_of_its_groups_reaches_the_client() -> None:
    this = bench()
    name = this.worker("a").name
    groups = [GroupCollectives(group="0", ranks=[0, 1], entered=3)]
    this.agent(this.worker("a").node).collectives = {name: groups}
    answer = this.world.get(JobStacks, GetStacks(job="job", role="a", rank=0))
    assert [worker.groups for worker in answer.report.workers] == [groups]


def test_a_node_that_says_nothing_and_a_worker_that_has_ended() -> None:
    this = Bench(simple("a", 2, max_restart=0, is_driver=False), simple("b", 1), nodes=2, failover_exec=2)
    this.end("a", 1, None)
    for agent in ("n1", "n2"):
        this.agent(agent).is_mute = True
    before = this.world.now
    notes = told(this.world, wait_s=3.0)
    assert this.world.now - before >= 3.0 + SLACK_S
    assert "did not answer" in notes["a-0"]
    assert "no process" in notes["a-1"]
    assert "did not answer" in notes["b-0"]


def test_a_lost_node_is_not_awaited() -> None:
    this = bench()
    this.world.kill_agent("n2")
    this.world.run(30)
    notes = told(this.world)
    assert set(notes) == {"a-0", "a-1", "b-0", "b-1"}


def test_what_cannot_be_asked_is_refused() -> None:
    world = bench().world
    for request, text in (
        (GetStacks(job="nope"), "no job"),
        (GetStacks(job="job", role="c"), "no role 'c'"),
        (GetStacks(job="job", role="a", rank=7), "no worker of rank 7"),
    ):
        answer = world.request(request)
        assert isinstance(answer, Refused)
        assert text in answer.reason


def test_many_at_once_are_refused_and_those_that_came_first_are_answered() -> None:
    this = bench()
    for agent in ("n1", "n2"):
        this.agent(agent).is_mute = True
    numbers = [this.world.ask(GetStacks(job="job")) for _ in range(stacks.MAX_COLLECTIONS + 1)]
    refused = this.world.answer(numbers[-1])
    assert isinstance(refused, Refused)
    assert refused.code == "unavailable"
    this.world.run(10)
    assert all(isinstance(this.world.answer(number), JobStacks) for number in numbers[:-1])
