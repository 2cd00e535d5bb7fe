"""Planned changes of rounds because a node is to go: drained, or left by its agent. In virtual time."""

from typing import Any

import msgspec
import pytest

from tests.support.master import CRASH, Bench, all_run, elastic, ranged, rejoining, simple
from tests.support.sim.sim_agent import SimAgent, resources
from unified.job.spec import RoleSpec
from unified.protocol.agent_master import AgentHeartbeat
from unified.protocol.client_master import Done, DrainNode
from unified.protocol.records import NodeState, Stage, WorkerState
from unified_master.core.budgets import in_use


def bench_of(*roles: RoleSpec, nodes: int = 3, **options: Any) -> Bench:
    """One device a node, so that each rank that wants one has a node of its own."""
    return Bench(*roles, nodes=nodes, devices=1, node_num=9, **options)


def drain(bench: Bench, node: str) -> None:
    bench.world.get(Done, DrainNode(node=node, reason="a new disk"))


def stop(bench: Bench, node: str, in_s: float = 10.0) -> None:
    """The node's agent is asked to stop, and says so."""
    agent = bench.agent(node)
    beat = AgentHeartbeat(node=node, incarnation=agent.incarnation, generation=agent.generation)
    bench.world.say(node, [(2, msgspec.structs.replace(beat, stops="SIGTERM", stops_in_s=in_s))])
    bench.world.run(0.002)


def in_round(bench: Bench, number: int) -> None:
    members = bench.job.members(bench.job.spec.role("e"))
    bench.world.until(
        lambda: all(one.round == number and one.state is WorkerState.RUNNING for one in members), f"round {number}"
    )


def nodes(bench: Bench, role: str = "e") -> set[str]:
    return {worker.node for worker in bench.job.members(bench.job.spec.role(role))}


@pytest.mark.parametrize("leave", [drain, stop])
def test_loops_leave_their_round_first_and_stay_but_for_those_on_the_node(leave: Any) -> None:
    bench = bench_of(rejoining(total=2, accelerator=1))
    away = bench.worker("e", 1).node
    bench.agent(away).is_hung = True  # its loop is not at a boundary yet
    leave(bench, away)
    bench.world.run(1)
    notices = [worker.notice for worker in bench.job.ranks("e")]
    assert {(each.round, each.kind) for each in notices if each is not None} == {(1, "planned")}
    assert bench.incarnations() == {"e-0": 0, "e-1": 0}, "nobody is stopped before all have left"
    assert bench.job.roles["e"].round == 1
    bench.agent(away).is_hung = False
    bench.agent(away).incarnations[bench.worker("e", 1).incarnation_id].left_round = 1
    bench.world.say(away, bench.agent(away).report_progress("job-1", bench.worker("e", 1).name, 1))
    in_round(bench, 2)
    assert bench.incarnations() == {"e-0": 0, "e-1": 1}
    assert away not in nodes(bench)
    assert (in_use(bench.job), bench.job.stage, bench.job.num_restarts) == ([], Stage.RUNNING, 0)
    bench.world.kill_agent(away)
    bench.world.run(60)
    assert in_use(bench.job) == []


def test_a_loop_that_does_not_leave_in_time_is_called_out_of_its_step() -> None:
    bench = bench_of(rejoining(total=2, accelerator=1))
    stays, away = bench.worker("e", 0).node, bench.worker("e", 1).node
    bench.agent(stays).is_hung = True
    stop(bench, away, in_s=5.0)
    bench.world.run(4.5)
    assert bench.incarnations() == {"e-0": 0, "e-1": 0}
    bench.agent(stays).is_hung = False  # from now on it leaves if it is called, but it is not at a boundary
    in_round(bench, 2)
    assert bench.incarnations() == {"e-0": 0, "e-1": 1}
    assert in_use(bench.job) == []


def test_a_range_goes_on_with_fewer_nodes_at_once() -> None:
    bench = bench_of(ranged(1, 2, accelerator=1), nodes=2)
    store, away = bench.store.node, bench.worker("e", 1).node
    assert store != away
    at = bench.world.now
    stop(bench, away)
    bench.world.until(lambda: bench.job.roles["e"].round == 2, "the next round")
    assert bench.world.now - at < bench.world.intervals.replace_s / 2, "nobody waits for a node in its place"
    in_round(bench, 2)
    assert nodes(bench) == {store}
    assert bench.incarnations() == {"e-0": 0, "e-1": 0}
    assert in_use(bench.job) == []


def test_the_store_moves_when_the_loops_of_all_roles_have_left() -> None:
    bench = bench_of(rejoining(total=1, accelerator=1), rejoining("f", total=1, accelerator=1))
    away = bench.store.node
    stays = next(role for role in "ef" if bench.worker(role).node != away)
    slow = bench.agent(bench.worker(stays).node)
    slow.is_hung = True
    drain(bench, away)
    bench.world.run(5)
    assert (bench.store.node, bench.store.incarnation) == (away, 0)
    assert set(bench.incarnations().values()) == {0}
    slow.is_hung = False
    slow.incarnations[bench.worker(stays).incarnation_id].left_round = 1
    bench.world.say(slow.node, slow.report_progress("job-1", bench.worker(stays).name, 1))
    bench.world.until(lambda: bench.job.roles["e"].round == bench.job.roles["f"].round == 2, "new rounds")
    bench.running()
    assert bench.store.node != away
    assert sorted(bench.incarnations().values()) == [0, 1]
    assert in_use(bench.job) == []


def test_what_is_not_in_a_round_that_goes_on_moves_at_once() -> None:
    bench = bench_of(rejoining(total=2, accelerator=1), simple(), nodes=4)
    away = bench.worker("e", 1).node
    bench.end("e", 0, CRASH)
    drain(bench, away)
    bench.world.run(1)
    bench.running()
    assert away not in nodes(bench)
    assert bench.worker("e", 0).num_failures == 1
    assert bench.worker("e", 1).num_failures == 0


def test_a_role_that_fits_nowhere_else_is_told_before_it_waits() -> None:
    bench = bench_of(elastic(total=2, accelerator=1), nodes=2)
    away = bench.worker("e", 1).node
    stop(bench, away)
    notice = bench.worker("e", 0).notice
    assert notice is not None
    assert (notice.kind, notice.within_s) == ("planned", 10.0)
    assert notice.reason == f"role e moves away from node {away}, whose agent stops: SIGTERM"
    bench.world.run(11)
    assert bench.job.is_waiting
    bench.world.say(away, bench.agent(away).leave())
    bench.world.until(lambda: bench.world.core.cluster.nodes[away].state is NodeState.LOST, "its loss")
    bench.world.add(SimAgent(away, resources(devices=1), incarnation="b"))
    bench.world.until(lambda: all_run(bench.job), "the job on the agent's next incarnation")
    assert in_use(bench.job) == []


def test_a_failure_while_the_loops_are_to_leave_is_judged_and_the_node_is_left() -> None:
    bench = bench_of(rejoining(total=2, accelerator=1))
    stays, away = bench.worker("e", 0).node, bench.worker("e", 1).node
    bench.agent(stays).is_hung = True
    drain(bench, away)
    bench.world.run(1)
    bench.agent(stays).is_hung = False
    bench.end("e", 0, CRASH)
    in_round(bench, 2)
    assert away not in nodes(bench)
    assert [worker.num_failures for worker in bench.job.ranks("e")] == [1, 0]


def test_a_rank_that_finishes_while_another_moves_does_not_hold_the_role_up() -> None:
    bench = bench_of(rejoining(total=2, accelerator=1))
    away = bench.worker("e", 1).node
    drain(bench, away)
    bench.world.until(lambda: bench.worker("e", 1).incarnation == 1, "its next incarnation")
    bench.finish("e", 0)
    bench.world.run(60)
    assert away not in nodes(bench)
    assert {worker.state for worker in bench.job.ranks("e")} == {WorkerState.RUNNING}
    assert in_use(bench.job) == []
