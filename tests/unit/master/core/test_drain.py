"""Nodes out of service: what ran there moves, nothing begins there, and nothing is charged. Then spare nodes."""

from typing import Any

import pytest

from tests.support.master import CRASH, Bench, elastic, simple
from tests.support.sim.sim_agent import Delays, SimAgent, resources
from unified.job.spec import JobSpec, RoleSpec
from unified.protocol.agent_master import DesiredWorkers, MasterToAgent
from unified.protocol.client_master import Done, DrainNode, ListNodes, NodeList, NodeStatus, Refused, SubmitJob
from unified.protocol.records import Stage, WorkerState
from unified_master.core.budgets import in_use


def drain(bench: Bench, node: str, **more: Any) -> None:
    bench.world.get(Done, DrainNode(node=node, **more))


def status(bench: Bench, node: str) -> NodeStatus:
    return next(each for each in bench.world.get(NodeList, ListNodes()).nodes if each.node == node)


@pytest.mark.parametrize("failover_exec", [0, 1, 2])
def test_workers_move_without_a_charge_and_others_stay(failover_exec: Any) -> None:
    bench = Bench(elastic(accelerator=1), simple(total=2), nodes=3, devices=1, node_num=9, failover_exec=failover_exec)
    before = {worker.name: worker.node for worker in bench.job.ranks("s")}
    away = bench.worker("e", 1).node
    drain(bench, away, reason="a new disk")
    bench.world.run(1)
    assert [worker.incarnation for worker in bench.job.ranks("s") if worker.node == away] == []
    assert bench.incarnations()["e-0"] == bench.incarnations()["e-1"] == 0, (
        "a round is left when its workers say so, or in 30 s"
    )
    bench.world.run(30)
    bench.running()
    assert away not in {worker.node for worker in bench.job.workers.values()}
    assert bench.incarnations()["e-0"] == bench.incarnations()["e-1"] == 1
    stayed = {worker.name: worker.node for worker in bench.job.ranks("s") if worker.incarnation == 0}
    assert stayed == {name: node for name, node in before.items() if node != away}
    assert (in_use(bench.job), bench.job.stage, bench.job.num_restarts) == ([], Stage.RUNNING, 0)
    assert f"moves away from node {away}, which is drained: a new disk" in bench.world.recent()
    assert (status(bench, away).drained, status(bench, away).num_workers) == ("a new disk", 0)
    bench.world.kill_agent(away)
    bench.world.run(60)
    assert in_use(bench.job) == []


def test_workers_that_leave_a_node_have_the_grace_of_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(simple(), nodes=2, stop_grace_s=20.0)
    away = bench.worker("s", 0).node
    agent, heard = bench.agent(away), list[DesiredWorkers]()
    agent.delays, receive = Delays(stop=15.0), agent.receive

    def hear(now: float, number: int, said: MasterToAgent) -> Any:
        heard.extend([said] if isinstance(said, DesiredWorkers) else [])
        return receive(now, number, said)

    monkeypatch.setattr(agent, "receive", hear)
    drain(bench, away)
    bench.world.run(10)
    (described,) = heard[-1].jobs
    assert described.stop_grace_s is None, "all of the job's own, not the two seconds of a restart"
    assert status(bench, away).num_leaving == 1


def test_a_job_that_fits_nowhere_else_waits_for_room() -> None:
    bench = Bench(elastic(total=1, accelerator=1), nodes=1, devices=1)
    drain(bench, "n1")
    bench.world.run(31)
    assert bench.job.is_waiting
    assert "(out of service: n1)" in bench.job.reason
    bench.world.ask(SubmitJob(spec=JobSpec(name="other", roles=[simple()])))
    bench.world.run(5)
    assert bench.world.job("other").is_waiting
    drain(bench, "n1", is_over=True)
    bench.running()
    bench.world.until_stage("other", Stage.RUNNING)


def test_a_node_that_is_lost_while_its_workers_leave_it_holds_their_next_incarnations_up_no_longer() -> None:
    bench = Bench(elastic(total=1, accelerator=1), nodes=2, devices=1)
    bench.agent("n1").delays = Delays(stop=1000)
    drain(bench, "n1")
    bench.world.run(31)
    assert bench.worker("e").state is WorkerState.READY
    bench.world.kill_agent("n1")
    bench.running()
    assert bench.worker("e").node == "n2"


def test_a_store_host_moves_with_its_roles() -> None:
    bench = Bench(elastic(total=1, accelerator=1), nodes=2, devices=1)
    assert (bench.store.node, bench.worker("e").node) == ("n1", "n1")
    drain(bench, "n1")
    bench.world.run(31)
    bench.running()
    assert (bench.store.node, bench.worker("e").node) == ("n2", "n2")
    assert bench.store.incarnation == 1


def test_work_that_is_done_is_not_done_again() -> None:
    bench = Bench(simple(total=2), nodes=2, devices=1, node_num=2)
    bench.finish("s", 0)
    drain(bench, bench.worker("s", 0).node)
    bench.world.run(1)
    assert bench.incarnations() == {"s-0": 0, "s-1": 0}
    bench.finish("s", 1)
    assert bench.stopped().exit_code == 0


def test_a_drained_node_stays_so_whoever_restarts_and_however_long_it_is_away() -> None:
    bench = Bench(simple(), nodes=2, devices=1)
    away = bench.worker("s").node
    drain(bench, away)
    bench.world.restart_master()
    bench.world.run(5)
    assert status(bench, away).drained == "asked by the user"
    bench.world.kill_agent(away)
    bench.world.run(2 * 3600)
    bench.world.add(SimAgent(away, resources(), incarnation="b"))
    bench.world.run(5)
    assert status(bench, away).drained == "asked by the user"
    drain(bench, away, is_over=True)
    drain(bench, away, is_over=True)
    assert status(bench, away).drained is None


def test_a_node_that_nobody_knows_is_refused() -> None:
    bench = Bench(simple())
    refusal = bench.world.get(Refused, DrainNode(node="n2"))
    assert (refusal.code, refusal.reason) == (
        "not-found",
        "there is no node 'n2'. `unified nodes` lists those that are known.",
    )


def with_spare(*roles: RoleSpec, **options: Any) -> Bench:
    """A node n1, and n0, which is kept as a spare."""
    bench = Bench(*roles, nodes=1, devices=1, **options)
    bench.world.add(SimAgent("n0", resources(devices=1), labels={"spare": "yes"}))
    bench.world.run(0.1)
    return bench


def test_a_spare_is_kept_for_a_job_that_lost_a_node() -> None:
    bench = with_spare(elastic(total=1, accelerator=1))
    bench.world.ask(SubmitJob(spec=JobSpec(name="other", roles=[elastic("o", total=1, accelerator=1)])))
    bench.world.run(5)
    other = bench.world.job("other")
    assert other.is_waiting
    assert "(kept as spares: n0)" in other.reason
    bench.world.kill_agent("n1")
    bench.world.until(lambda: bench.job.node_losses == {"n1": 1}, "the loss")
    bench.running()
    assert bench.worker("e").node == "n0"
    assert other.is_waiting


def test_a_spare_takes_what_an_excluded_node_had_and_only_if_no_other_does() -> None:
    bench = with_spare(elastic(total=1, accelerator=1, per_node_max_failure=0))
    bench.world.add(SimAgent("n2", resources(devices=1)))
    bench.world.run(0.1)
    bench.restart("e", 0, CRASH, settle_s=2)
    assert (bench.worker("e").node, bench.job.excluded) == ("n2", ["n1"])
    bench.restart("e", 0, CRASH, settle_s=2)
    assert (bench.worker("e").node, bench.job.excluded) == ("n0", ["n1", "n2"])
    bench.restart("e", 0, CRASH, settle_s=2)
    assert (bench.worker("e").node, bench.job.excluded) == ("n0", ["n1", "n2"]), "the last node is kept"
