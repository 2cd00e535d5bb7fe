"""Copy nodes: who holds copies for a job while all ranks of a role are on one node."""

from collections.abc import Callable

import pytest

from tests.support.master import CRASH, elastic, simple
from tests.support.sim.sim_agent import SimAgent, resources
from tests.support.sim.world import World
from unified.job.spec import JobSpec, Resources, RoleSpec
from unified.protocol.client_master import DrainNode, RestartWorkers, ResumeJob, SubmitJob, SuspendJob
from unified.protocol.records import Stage
from unified.protocol.snapshots import SnapshotHost, token_of


def host(node: str, incarnation: str = "a") -> SnapshotHost:
    return SnapshotHost(f"tcp://{node}:1", f"{node}{incarnation}".encode())


def agent(node: str, incarnation: str = "a", *, host_id: str = "", devices: int = 2) -> SimAgent:
    return SimAgent(
        node,
        resources(devices=devices),
        incarnation=f"{incarnation} of {node}",
        host_id=host_id,
        snapshots=host(node, incarnation),
    )


Start = Callable[..., World]


@pytest.fixture
def start() -> Start:
    """A cluster of these agents, and a job of these roles on it."""

    def make(*agents: SimAgent, roles: tuple[RoleSpec, ...] = (), node_num: int = 1) -> World:
        world = World()
        for each in agents:
            world.add(each)
        world.run(0.1)
        wanted = list(roles) or [elastic(total=2, accelerator=1, per_group=2)]
        world.ask(SubmitJob(spec=JobSpec(name="job", roles=wanted, node_num=node_num)))
        world.until_stage("job", Stage.RUNNING)
        world.run(1.0)
        return world

    return make


def where(world: World) -> str:
    nodes = {worker.node for worker in world.job("job").ranks("e")}
    assert len(nodes) == 1
    return nodes.pop()


def told(world: World, node: str) -> str:
    """The node for copies that a node was told, whose token is that of the agent which runs there."""
    copy_node = world.sim_agent(node).copy_nodes["job-1"]
    if copy_node is None:
        return ""
    known = world.sim_agent(copy_node.node).snapshots
    assert known is not None
    assert (copy_node.url, copy_node.token) == (known.url, token_of(known.secret, "job-1"))
    assert not [each for each in world.core.cluster.events["job-1"] if "copies" in each.reason], "it may take none"
    return copy_node.node


def test_a_role_on_one_node_has_a_copy_node_elsewhere_and_keeps_it_in_its_next_incarnation(start: Start) -> None:
    world = start(*(agent(f"n{number}") for number in range(1, 5)))
    first, copy_node = where(world), world.job("job").copy_node
    assert copy_node not in ("", first)
    assert told(world, first) == copy_node
    world.kill_agent(first)
    world.run(60.0)
    assert world.job("job").stage is Stage.RUNNING
    second = where(world)
    assert second != first
    if second == copy_node:  # what it holds for others is its own now
        assert world.job("job").copy_node not in ("", first, second)
    else:
        assert world.job("job").copy_node == copy_node
    assert told(world, second) == world.job("job").copy_node


def test_a_copy_node_that_is_lost_or_drained_is_replaced_and_one_that_came_back_is_told_anew(start: Start) -> None:
    world = start(*(agent(f"n{number}") for number in range(1, 4)))
    here, first = where(world), world.job("job").copy_node
    world.kill_agent(first)
    world.run(60.0)
    second = world.job("job").copy_node
    assert len({here, first, second}) == 3
    assert told(world, here) == second
    world.request(DrainNode(node=second, reason="a test"))
    world.run(1.0)
    assert world.job("job").copy_node == ""
    assert told(world, here) == ""
    world.add(agent(first, "b"))
    world.run(1.0)
    assert told(world, here) == first


def test_ranks_on_several_nodes_need_none_and_get_one_when_they_are_packed(start: Start) -> None:
    world = start(agent("n1"), agent("n2"), roles=(elastic(total=2, accelerator=1),), node_num=2)
    assert {worker.node for worker in world.job("job").ranks("e")} == {"n1", "n2"}
    assert world.job("job").copy_node == ""
    world.kill_agent("n2")
    world.run(60.0)
    assert where(world) == "n1"
    assert world.job("job").copy_node == ""
    world.add(agent("n2", "b"))
    world.run(1.0)
    assert told(world, "n1") == "n2"


def test_a_copy_node_on_another_host_goes_first_and_the_master_s_restart_changes_nothing(start: Start) -> None:
    near = [agent(f"n{number}", host_id="one") for number in range(1, 4)]
    world = start(*near, agent("far", host_id="two", devices=0))
    here = where(world)
    assert told(world, here) == "far"
    world.crash_master(1.0)
    world.run(10.0)
    assert world.job("job").copy_node == "far"
    assert told(world, here) == "far"
    assert not any(b"fara" in data for data in world.stored.values())  # the secret


def test_a_copy_node_that_does_not_come_back_to_a_new_master_is_replaced(start: Start) -> None:
    world = start(*(agent(f"n{number}") for number in range(1, 4)))
    here, first = where(world), world.job("job").copy_node
    world.kill_agent(first)
    world.restart_master()
    world.run(5.0)
    assert world.job("job").copy_node == first  # it may still come
    world.run(60.0)
    assert len({here, first, world.job("job").copy_node}) == 3
    assert told(world, here) == world.job("job").copy_node


@pytest.mark.parametrize("snapshots", [None, SnapshotHost("", b"secret")])
def test_a_copy_node_that_came_back_without_a_server_while_its_job_waited_is_replaced(
    start: Start, snapshots: SnapshotHost | None
) -> None:
    world = start(agent("n1"), agent("n2", devices=0), agent("n3", devices=0))
    first = world.job("job").copy_node
    world.kill_agent("n1")
    world.until(lambda: world.job("job").is_waiting, "the job to wait")
    world.add(SimAgent(first, resources(devices=0), incarnation="b", snapshots=snapshots))
    world.run(1.0)
    world.add(agent("n1", "b"))
    world.until_stage("job", Stage.RUNNING)
    world.run(1.0)
    assert {told(world, "n1"), first} == {"n2", "n3"}


def test_a_job_without_ranks_that_train_together_has_none(start: Start) -> None:
    world = start(agent("n1"), agent("n2"), roles=(simple(),))
    assert world.job("job").copy_node == ""


def test_nodes_that_all_workers_have_left_are_named_where_rank_0_is_now_and_a_new_agent_there_has_nothing(
    start: Start,
) -> None:
    world = start(*(agent(f"n{number}", devices=1) for number in range(1, 5)), roles=(elastic(total=2),), node_num=2)
    left = {worker.node for worker in world.job("job").ranks("e")}
    world.request(SuspendJob(job="job"))
    world.run(5.0)
    for node in left:
        world.request(DrainNode(node=node))
    world.request(ResumeJob(job="job"))
    world.until_stage("job", Stage.RUNNING)
    world.run(1.0)
    first, second = (worker.node for worker in world.job("job").ranks("e"))
    assert left.isdisjoint({first, second})
    named = {each.server.node: each for each in world.sim_agent(first).earlier_nodes["job-1"]}
    assert named.keys() == left
    assert {each.round for each in named.values()} == {1}
    for name, each in named.items():
        known = world.sim_agent(name).snapshots
        assert known is not None
        assert (each.server.url, each.server.token) == (known.url, token_of(known.secret, "job-1"))
    assert world.sim_agent(second).earlier_nodes["job-1"] == []
    again = min(left)
    world.kill_agent(again)
    world.add(agent(again, "b", devices=1))
    world.run(20.0)
    world.request(RestartWorkers(job="job", workers=[]))
    world.until_stage("job", Stage.RUNNING)
    world.run(5.0)
    urls = {each.server.node: each.server.url for each in world.sim_agent(first).earlier_nodes["job-1"]}
    assert (urls[again], urls[max(left)]) == ("", f"tcp://{max(left)}:1")


def named(world: World, node: str) -> dict[str, str]:
    """Addresses of the nodes where workers on this node look for snapshots; none for a node whose agent has ended."""
    return {each.server.node: each.server.url for each in world.sim_agent(node).earlier_nodes["job-1"]}


def test_a_node_is_named_that_a_rank_has_left_without_a_new_place(start: Start) -> None:
    role = elastic(total=3, accelerator=1, min_nodes=2, max_nodes=3)
    world = start(*(agent(f"n{number}", devices=1) for number in range(1, 4)), roles=(role,), node_num=3)
    first = world.job("job").ranks("e")[0].node
    world.request(DrainNode(node=first))
    world.until(lambda: world.job("job").roles["e"].round == 2, "a round of two")
    world.run(1.0)
    ranks = {worker.rank_in_round: worker.node for worker in world.job("job").ranks("e") if worker.is_desired}
    assert named(world, ranks[0]) == {first: f"tcp://{first}:1"}


def test_a_node_is_named_that_all_ranks_have_left_and_the_store_has_not(start: Start) -> None:
    role = elastic(total=2, accelerator=1, per_group=2, per_node_max_failure=0)
    spec = JobSpec(name="job", roles=[role], node_num=2, failover_exec=2, master_cpu=1)
    world = World()
    for number in range(1, 4):
        world.add(agent(f"n{number}"))
    world.run(0.1)
    world.ask(SubmitJob(spec=spec))
    world.until_stage("job", Stage.RUNNING)
    world.run(1.0)
    left = where(world)
    world.say(left, world.sim_agent(left).end("job-1", world.job("job").ranks("e")[0].name, CRASH))
    world.until(lambda: world.job("job").roles["e"].round == 2, "the ranks to run elsewhere")
    world.run(1.0)
    store = world.job("job").store
    assert store is not None
    assert (store.node, where(world) != left) == (left, True)
    assert named(world, where(world)) == {left: f"tcp://{left}:1"}


def test_what_an_earlier_agent_of_a_node_held_is_named_as_lost_although_the_node_is_used_again(start: Start) -> None:
    world = start(agent("n1", devices=1), agent("n2", devices=1), roles=(elastic(total=2),), node_num=2)
    world.kill_agent("n2")
    world.add(agent("n2", "b", devices=1))
    world.until(lambda: world.job("job").roles["e"].round == 2, "the ranks to run again")
    world.run(1.0)
    first = world.job("job").ranks("e")[0].node
    assert named(world, first) == {"n2": ""}


def test_a_node_whose_agent_ended_again_and_again_is_named_once(start: Start) -> None:
    world = start(agent("n1", devices=1), agent("n2", devices=1), roles=(elastic(total=2),), node_num=2)
    for incarnation in "bcd":
        before = world.job("job").roles["e"].round
        world.kill_agent("n2")
        world.add(agent("n2", incarnation, devices=1))
        world.until(lambda before=before: world.job("job").roles["e"].round > before, "the ranks to run again")  # type: ignore[misc]  # a bound default
    world.run(1.0)
    (found,) = world.sim_agent(world.job("job").ranks("e")[0].node).earlier_nodes["job-1"]
    assert (found.server.node, found.server.url, found.round) == ("n2", "", world.job("job").roles["e"].round - 1)


def test_workers_of_a_simple_role_look_only_where_they_were_themselves(start: Start) -> None:
    agents = [agent(f"n{number}", devices=1) for number in range(1, 5)]
    world = start(*agents, roles=(simple(total=3, resources=Resources(accelerator=1), restart_alone=True),), node_num=4)
    world.request(RestartWorkers(job="job", workers=[]))
    world.run(5.0)
    nodes = [worker.node for worker in world.job("job").ranks("s")]
    assert [named(world, node) for node in nodes] == [{}, {}, {}]
    world.request(DrainNode(node=nodes[0]))
    world.until(lambda: world.job("job").ranks("s")[0].node not in nodes, "the worker to move")
    world.run(5.0)
    moved = world.job("job").ranks("s")[0].node
    assert named(world, moved) == {nodes[0]: f"tcp://{nodes[0]}:1"}
    assert [named(world, node) for node in nodes[1:]] == [{}, {}]
