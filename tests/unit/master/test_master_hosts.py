"""What an agent is told of its desired set."""

from __future__ import annotations

from typing import Any

from tests.support.master import elastic
from tests.support.sim.sim_agent import Said, SimAgent, resources
from tests.support.sim.world import World
from unified.job.spec import JobSpec
from unified.protocol.agent_master import DesiredWorkers, MasterToAgent
from unified.protocol.client_master import SubmitJob


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
