"""Desired sets as a node's agent is told of them, devices included."""

from typing import Any

import msgspec

from tests.support.master import CRASH, Bench, elastic, simple
from tests.support.sim.sim_agent import Said, SimAgent, resources
from tests.support.sim.world import World
from unified.job.spec import JobSpec, Resources
from unified.protocol.agent_master import DesiredWorker, DesiredWorkers, MasterToAgent
from unified.protocol.client_master import SubmitJob


def desired(bench: Bench, role: str) -> dict[tuple[int, int], DesiredWorker]:
    """The workers of a role that agents keep, by rank and incarnation."""
    agents = [agent for agent in bench.world.agents.values() if isinstance(agent, SimAgent)]
    kept = [incarnation.wanted for agent in agents for incarnation in agent.incarnations.values()]
    return {(one.place.rank, one.worker_incarnation): one for one in kept if one.role == role}


def test_an_elastic_worker_is_told_the_devices_of_its_group_in_the_order_of_local_ranks() -> None:
    told = desired(Bench(elastic(total=4, accelerator=2, per_group=2)), "e")
    for rank in range(4):
        first, second = told[rank - rank % 2, 0].devices, told[rank - rank % 2 + 1, 0].devices
        assert told[rank, 0].group_devices == [first[0], second[0], first[1], second[1]]
        assert told[rank, 0].group_devices[told[rank, 0].place.local_rank] == told[rank, 0].devices[0]


def test_a_device_that_ranks_share_is_named_once() -> None:
    told = desired(Bench(elastic(total=4, accelerator=0.5, per_group=4)), "e")
    assert [one.group_devices for one in told.values()] == [[0, 1]] * 4


def test_a_simple_worker_is_told_its_own_unless_it_chooses_by_rank() -> None:
    plain = simple("s", 2, per_group=2, resources=Resources(accelerator=1))
    bench = Bench(plain, msgspec.structs.replace(plain, name="c", rank_based_gpu_selection=True))
    assert all(one.group_devices == [] for one in desired(bench, "s").values())
    assert [one.group_devices for one in desired(bench, "c").values()] == [[2, 3]] * 2


def test_a_worker_that_restarts_alone_is_told_the_same_devices_while_its_mate_waits() -> None:
    role = simple("c", 2, per_group=2, resources=Resources(accelerator=1), rank_based_gpu_selection=True)
    bench = Bench(role, failover_exec=2)
    for rank in (0, 1):
        bench.restart("c", rank, CRASH)
    assert [one.group_devices for (_, incarnation), one in desired(bench, "c").items() if incarnation] == [[0, 1]] * 2


class Listener(SimAgent):
    """An agent that remembers what it was told last of the other agents of its host."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.num_elsewhere = -1

    def receive(self, now: float, request_id: int, message: MasterToAgent) -> list[Said]:
        if isinstance(message, DesiredWorkers):
            self.num_elsewhere = message.num_elsewhere
        return super().receive(now, request_id, message)


def test_an_agent_is_told_how_many_workers_other_agents_of_its_host_have() -> None:
    world = World()
    agents = [
        Listener(node, resources(devices=2), host_id=host) for node, host in (("a", "h1"), ("b", "h1"), ("c", "h2"))
    ]
    for agent in agents:
        world.add(agent)
    world.run(0.1)
    role = elastic(total=6, accelerator=1, per_group=2)
    world.ask(SubmitJob(spec=JobSpec(name="job", roles=[role], node_num=3, device_per_node=2)))
    world.run(0.5)
    assert [agent.num_elsewhere for agent in agents] == [2, 2, 0]  # the store of the job is no worker


class SpecReader(SimAgent):
    """An agent that remembers for each desired set whether it came with the description of a job."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.told: list[bool] = []

    def receive(self, now: float, request_id: int, message: MasterToAgent) -> list[Said]:
        if isinstance(message, DesiredWorkers) and message.jobs:
            self.told.append(any(job.spec is not None for job in message.jobs))
        return super().receive(now, request_id, message)


def test_a_description_is_sent_once_on_each_connection() -> None:
    world = World()
    agent = SpecReader("n1", resources(cpu=8))
    world.add(agent)
    world.run(1)
    world.ask(SubmitJob(spec=JobSpec(name="job", roles=[simple("s", 2)])))
    world.run(2)
    assert len(agent.told) > 1, "one set to start workers, one to run them"
    assert agent.told[0]
    assert not any(agent.told[1:])
    agent.told.clear()
    world.break_connection("n1")
    world.run(10)
    assert agent.told.count(True) == 1
