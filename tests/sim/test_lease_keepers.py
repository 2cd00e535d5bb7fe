"""Lease keepers in a simulated cluster: silence, death and a cut network, each told from the others."""

import pytest

from tests.support.master import simple
from tests.support.sim.world import World
from unified.job.spec import JobSpec
from unified.protocol.client_master import SubmitJob
from unified.protocol.records import NodeState, Stage, WorkerState
from unified_simulator.agent import SimulatedAgent, resources
from unified_simulator.invariants.agents import RunningRanks

LEASE_S = 15.0


class Kept:
    """Two nodes with keepers, and a job of one rank, which runs on the first."""

    def __init__(self) -> None:
        self.world = World()
        self.running = RunningRanks()
        for node in ("n1", "n2"):
            self.world.add(
                SimulatedAgent(
                    node,
                    resources(devices=1),
                    lambda: self.world.now,
                    on_process=lambda agent, incarnation, is_running: self.running.note(
                        agent.node, incarnation, is_running
                    ),
                )
            )
        self.world.run(1.0)
        self.world.ask(SubmitJob(spec=JobSpec(name="job", roles=[simple("s")], node_max_restart=3, job_max_restart=3)))
        self.world.until_stage("job", Stage.RUNNING)
        self.world.run(1.0)
        (worker,) = self.world.job("job").workers.values()
        self.node = worker.node

    @property
    def state(self) -> NodeState:
        return self.world.core.cluster.nodes[self.node].state

    def runs_elsewhere(self) -> bool:
        (worker,) = self.world.job("job").workers.values()
        return worker.node != self.node and worker.state is WorkerState.RUNNING


@pytest.fixture
def kept() -> Kept:
    return Kept()


def test_a_node_that_is_cut_off_ends_its_rank_before_another_incarnation_of_it_runs(kept: Kept) -> None:
    kept.world.cut_off(kept.node)
    kept.world.until(kept.runs_elsewhere, "the rank on the other node")
    agent = kept.world.agents[kept.node]
    assert isinstance(agent, SimulatedAgent)
    assert not any(process.is_running for process in agent.incarnations.values())
    kept.world.heal(kept.node)
    kept.world.until(lambda: kept.state is NodeState.ALIVE, "the node to be back")
    assert kept.runs_elsewhere()


def test_a_node_whose_master_cannot_be_read_ends_its_rank_before_another_incarnation_of_it_runs(kept: Kept) -> None:
    kept.world.make_unreadable(kept.node)
    kept.world.until(kept.runs_elsewhere, "the rank on the other node")
    kept.world.heal(kept.node)
    kept.world.until(lambda: kept.state is NodeState.ALIVE, "the node to be back")
    kept.world.run(2 * LEASE_S)
    assert kept.runs_elsewhere()


def test_without_its_keeper_two_incarnations_would_run_and_the_invariant_breaks(kept: Kept) -> None:
    kept.world.keepers[kept.node].is_over = True
    kept.world.cut_off(kept.node)
    with pytest.raises(AssertionError, match=r"begins to run on n2 while .* runs on n1"):
        kept.world.until(kept.runs_elsewhere, "the rank on the other node")


def test_a_stopped_agent_keeps_its_lease_for_as_long_as_a_lease_lasts(kept: Kept) -> None:
    kept.world.freeze_agent(kept.node)
    kept.world.run(LEASE_S - 1)
    kept.world.thaw_agent(kept.node)
    kept.world.run(2 * LEASE_S)
    assert kept.state is NodeState.ALIVE
    assert not kept.runs_elsewhere()


def test_an_agent_that_is_stopped_for_longer_loses_its_rank_to_another_node(kept: Kept) -> None:
    kept.world.freeze_agent(kept.node)
    kept.world.until(kept.runs_elsewhere, "the rank on the other node")


def test_the_death_of_an_agent_is_known_at_once_and_that_of_a_host_with_its_lease(kept: Kept) -> None:
    kept.world.kill_agent(kept.node, with_host=False)
    kept.world.run(1.0)
    assert kept.state is NodeState.LOST
    kept.world.until(kept.runs_elsewhere, "the rank on the other node")
    (other,) = {"n1", "n2"} - {kept.node}
    kept.world.kill_agent(other)
    kept.world.run(LEASE_S - 2)
    assert kept.world.core.cluster.nodes[other].state is NodeState.ALIVE
    kept.world.run(3.0)
    assert kept.world.core.cluster.nodes[other].state is NodeState.LOST
