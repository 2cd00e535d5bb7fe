"""Rounds of elastic loops in place: who stays, who is told what, and what is charged, in virtual time."""

from typing import Any

import pytest

from tests.support.master import COLLATERAL, CRASH, USER, Bench, elastic, rejoining, simple
from tests.support.sim.sim_agent import SimAgent, resources
from unified.job.spec import Communication
from unified.protocol.agent_master import RoundNotice
from unified.protocol.client_master import RestartWorkers
from unified.protocol.records import Stage, WorkerState


def in_round(bench: Bench, number: int, role: str = "e") -> None:
    """Run until all workers of a role have joined a round."""
    ranks = bench.job.ranks(role)
    bench.world.until(
        lambda: all(one.state is WorkerState.RUNNING and one.round == number for one in ranks), f"round {number}"
    )


def charges(bench: Bench, role: str = "e") -> list[int]:
    return [worker.num_failures for worker in bench.job.ranks(role)]


@pytest.mark.parametrize("exec_strategy", [1, 2])
@pytest.mark.parametrize("failure", [USER, CRASH], ids=["exception", "killed"])
def test_those_that_can_rejoin_stay_and_all_are_ordered_into_the_next_round(failure: Any, exec_strategy: Any) -> None:
    bench = Bench(rejoining(), simple(), nodes=2, failover_exec=exec_strategy)
    bench.end("e", 1, failure)
    notices = [worker.notice for worker in bench.job.ranks("e")]
    assert notices[1] is None
    assert notices[0] is not None
    assert notices[0] == notices[2]
    assert (notices[0].round, notices[0].kind) == (1, "broken")
    assert failure.summary in notices[0].reason
    in_round(bench, 2)
    assert bench.incarnations() == {"e-0": 0, "e-1": 1, "e-2": 0, "s-0": 0}
    orders = [worker.run for worker in bench.job.ranks("e") if worker.run is not None]
    assert [(run.round, run.rank, run.world_size) for run in orders] == [(2, 0, 3), (2, 1, 3), (2, 2, 3)]
    assert {run.store_prefix for run in orders} == {"job-1/e/2"}
    assert [worker.notice for worker in bench.job.ranks("e")] == [None, None, None]
    assert charges(bench) == [0, 1, 0]
    assert (bench.job.stage, bench.job.num_restarts, bench.job.num_charged_restarts) == (Stage.RUNNING, 0, 0)


def test_a_role_whose_code_cannot_rejoin_restarts_whole() -> None:
    bench = Bench(elastic(), rejoining("loop"), failover_exec=2)
    bench.restart("e", 1, CRASH)
    assert bench.incarnations() == {"e-0": 1, "e-1": 1, "loop-0": 0, "loop-1": 0, "loop-2": 0}


def test_the_job_restarts_whole_if_another_role_fails() -> None:
    bench = Bench(rejoining(), simple())
    bench.restart("s", 0, CRASH)
    assert set(bench.incarnations().values()) == {1}


def test_several_that_die_are_each_replaced_in_one_round() -> None:
    bench = Bench(rejoining(total=4))
    bench.end("e", 1, CRASH)
    bench.end("e", 2, CRASH)
    in_round(bench, 2)
    assert bench.incarnations() == {"e-0": 0, "e-1": 1, "e-2": 1, "e-3": 0}
    assert charges(bench) == [0, 1, 1, 0]


def test_the_last_that_stays_may_die_too() -> None:
    bench = Bench(rejoining(total=2))
    bench.end("e", 1, CRASH)
    bench.end("e", 0, CRASH)
    in_round(bench, 2)
    assert charges(bench) == [1, 1]


def test_one_that_breaks_down_with_its_round_restarts_along_and_is_not_charged() -> None:
    bench = Bench(rejoining())
    bench.end("e", 1, CRASH)
    bench.end("e", 0, COLLATERAL)
    in_round(bench, 2)
    assert bench.incarnations() == {"e-0": 1, "e-1": 1, "e-2": 0}
    assert charges(bench) == [0, 1, 0]


def test_collateral_heard_first_restarts_with_its_root_cause() -> None:
    bench = Bench(rejoining())
    bench.end("e", 0, COLLATERAL)
    bench.end("e", 1, CRASH)
    in_round(bench, 2)
    assert bench.incarnations() == {"e-0": 1, "e-1": 1, "e-2": 0}
    assert charges(bench) == [0, 1, 0]


@pytest.mark.parametrize("is_finished", [True, False], ids=["finished", "past its loop"])
def test_one_that_cannot_rejoin_any_more_restarts_along(is_finished: bool) -> None:
    bench = Bench(rejoining())
    bench.end("e", 1, CRASH)
    assert bench.worker("e", 0).notice is not None
    if is_finished:
        bench.finish("e", 0)
    else:
        for incarnation, sim in bench.agent().incarnations.items():
            sim.can_rejoin = sim.can_rejoin and incarnation[1] != bench.worker("e", 0).name
        bench.world.say("n1", bench.agent().report_progress("job-1", bench.worker("e", 0).name, 1))
    in_round(bench, 2)
    assert bench.incarnations() == {"e-0": 1, "e-1": 1, "e-2": 0}
    assert charges(bench) == [0, 1, 0]


def test_a_round_that_breaks_while_it_gathers_or_is_joined_is_followed_by_the_next() -> None:
    bench = Bench(rejoining())
    bench.end("e", 1, CRASH)
    bench.world.until(lambda: bench.job.roles["e"].round == 2, "round 2 to be sealed")
    assert bench.worker("e", 0).round == 1
    bench.end("e", 2, CRASH)
    in_round(bench, 3)
    assert bench.incarnations()["e-0"] == 0
    assert charges(bench) == [0, 1, 1]


@pytest.mark.parametrize("timeout_s", [None, 5.0])
def test_one_that_does_not_join_in_time_has_failed(timeout_s: float | None) -> None:
    bench = Bench(rejoining(communication=Communication(timeout_s=timeout_s)), nodes=3)
    bench.agent("n3").is_hung = True
    bench.end("e", 1, CRASH)
    bench.world.until(lambda: bench.job.roles["e"].round == 2, "round 2 to be sealed")
    sealed_at = bench.world.now
    hung = bench.worker("e", 2)
    bench.world.until(lambda: hung.num_failures == 1, "the one that hangs to fail")
    assert bench.world.now - sealed_at == pytest.approx(timeout_s or 60.0)
    told = [event.reason for event in bench.world.log if event.event == "worker-failed"]
    assert "did not leave round 1 and join round 2 in time" in told[-1]
    in_round(bench, 3)
    assert bench.incarnations() == {"e-0": 0, "e-1": 1, "e-2": 1}


def test_one_that_waits_at_a_breakpoint_may_join_late() -> None:
    bench = Bench(rejoining(communication=Communication(timeout_s=5.0)), nodes=3)
    waiting = bench.worker("e", 2)
    bench.world.say("n3", bench.agent("n3").report_progress("job-1", waiting.name, 1, "somebody"))
    bench.agent("n3").is_hung = True
    bench.end("e", 1, CRASH)
    bench.world.until(lambda: bench.job.roles["e"].round == 2, "round 2 to be sealed")
    bench.world.run(1000)
    assert waiting.num_failures == 0


def test_the_deadline_for_joining_outlives_the_master() -> None:
    bench = Bench(rejoining(), nodes=3)
    bench.agent("n3").is_hung = True
    bench.end("e", 1, CRASH)
    bench.world.until(lambda: bench.job.roles["e"].round == 2, "round 2 to be sealed")
    bench.world.restart_master()
    bench.world.until(lambda: bench.worker("e", 2).num_failures == 1, "the one that hangs to fail")
    in_round(bench, 3)


def test_a_lost_node_costs_its_own_ranks_alone() -> None:
    bench = Bench(rejoining(), nodes=3)
    bench.world.add(SimAgent("n4", resources()))
    bench.world.run(0.1)
    bench.world.kill_agent("n3")
    in_round(bench, 2)
    assert bench.incarnations() == {"e-0": 0, "e-1": 0, "e-2": 1}
    assert bench.worker("e", 2).node == "n4"
    assert bench.job.num_charged_restarts == 0


def test_the_store_s_node_may_be_lost_too() -> None:
    bench = Bench(rejoining(), nodes=3)
    assert bench.store.node == "n1"
    bench.world.add(SimAgent("n4", resources()))
    bench.world.run(0.1)
    bench.world.kill_agent("n1")
    in_round(bench, 2)
    assert bench.incarnations() == {"e-0": 1, "e-1": 0, "e-2": 0}
    assert (bench.store.incarnation, bench.store.state) == (1, WorkerState.READY)


@pytest.mark.parametrize("exec_strategy", [1, 2])
def test_a_new_store_costs_those_that_can_rejoin_a_round_and_no_more(exec_strategy: Any) -> None:
    bench = Bench(rejoining(), simple(), failover_exec=exec_strategy)
    bench.end_worker(bench.store, CRASH)
    notice = bench.worker("e").notice
    assert isinstance(notice, RoundNotice)
    assert "the torch store" in notice.reason
    in_round(bench, 2)
    assert set(bench.incarnations().values()) == {0}
    assert bench.store.incarnation == 1
    assert bench.job.num_charged_restarts == 0


def test_a_round_left_without_a_death_begins_anew_and_is_charged_to_the_first_to_leave() -> None:
    bench = Bench(rejoining(max_restart=1), nodes=2)
    for number in (2, 3):
        left = [bench.worker("e", rank) for rank in (0, 2)]
        for worker in left:
            bench.world.say(worker.node, bench.agent(worker.node).leave_round("job-1", worker.name))
        if number == 3:
            assert bench.limit() == "max_restart"
            return
        in_round(bench, number)
        assert set(bench.incarnations().values()) == {0}
        assert charges(bench) == [1, 0, 0]


def test_a_round_left_because_a_peer_died_is_charged_to_that_peer() -> None:
    bench = Bench(rejoining(), nodes=3)
    bench.world.say("n1", bench.agent("n1").leave_round("job-1", bench.worker("e", 0).name))
    bench.world.run(0.3)
    bench.end("e", 1, CRASH)
    in_round(bench, 2)
    bench.world.run(5)
    assert charges(bench) == [0, 1, 0]
    assert bench.job.roles["e"].round == 2


def test_a_peer_that_failed_as_collateral_while_another_left_the_round_is_replaced() -> None:
    bench = Bench(rejoining(), nodes=3)
    bench.world.say("n1", bench.agent("n1").leave_round("job-1", bench.worker("e", 0).name))
    bench.end("e", 1, COLLATERAL)
    in_round(bench, 2)
    assert bench.incarnations() == {"e-0": 0, "e-1": 1, "e-2": 0}


def test_a_round_left_because_of_a_silent_node_waits_for_its_lease() -> None:
    bench = Bench(rejoining(), nodes=3)
    bench.world.add(SimAgent("n4", resources()))
    bench.world.cut.add("n3")
    bench.world.say("n1", bench.agent("n1").leave_round("job-1", bench.worker("e", 0).name))
    in_round(bench, 2)
    assert charges(bench) == [0, 0, 0]
    assert bench.job.node_losses == {"n3": 1}
    assert bench.incarnations() == {"e-0": 0, "e-1": 0, "e-2": 1}


def test_a_node_that_failed_too_often_keeps_none_of_its_ranks() -> None:
    bench = Bench(rejoining(total=4, per_node_max_failure=0), nodes=2)
    bench.world.add(SimAgent("n3", resources()))
    bench.world.run(0.1)
    on_node = [worker.rank for worker in bench.job.ranks("e") if worker.node == "n2"]
    assert len(on_node) == 2
    bench.end("e", on_node[0], CRASH)
    in_round(bench, 2)
    assert [bench.worker("e", rank).node for rank in on_node] == ["n3", "n3"]
    assert [bench.worker("e", rank).incarnation for rank in on_node] == [1, 1]


@pytest.mark.parametrize("option", ["failover_exec", "failover_trigger"])
def test_strategy_0_forbids_a_further_round_too(option: str) -> None:
    bench = Bench(rejoining(), **{option: 0})
    bench.end("e", 0, CRASH)
    assert bench.limit() == f"{option}_strategy=0"
    bench = Bench(rejoining(), **{option: 0})
    bench.world.say("n1", bench.agent().leave_round("job-1", bench.worker("e", 0).name))
    assert bench.limit() == f"{option}_strategy=0"


def test_trigger_1_does_not_wait_for_peers_that_wait_for_a_round() -> None:
    bench = Bench(rejoining(), failover_trigger=1)
    bench.end("e", 1, CRASH)
    in_round(bench, 2)
    assert bench.incarnations() == {"e-0": 0, "e-1": 1, "e-2": 0}


def test_a_rank_restarted_on_request_leaves_its_peers_alone() -> None:
    bench = Bench(rejoining())
    bench.world.ask(RestartWorkers(job="job", workers=["e-2"]))
    in_round(bench, 2)
    assert bench.incarnations() == {"e-0": 0, "e-1": 0, "e-2": 1}
    assert charges(bench) == [0, 0, 0]


def test_a_rank_that_waits_for_its_back_off_holds_the_round_up() -> None:
    bench = Bench(rejoining())
    for number in range(2, 5):
        bench.end("e", 1, CRASH)
        in_round(bench, number)
    assert bench.incarnations() == {"e-0": 0, "e-1": 3, "e-2": 0}
