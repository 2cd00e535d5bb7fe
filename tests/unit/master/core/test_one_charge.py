"""One death counts once: a fault that ends several workers, a late report of a root cause, and true second failures."""

import msgspec
import pytest

from tests.support.master import COLLATERAL, CRASH, USER, Bench, elastic, ranged, rejoining, simple
from tests.support.sim.sim_agent import Delays, SimAgent, resources
from unified.protocol.records import Evidence, Failure, WorkerState
from unified_master.core.budgets import in_use
from unified_master.core.state import WorkerRecord


def of_zygote(number: int = 1, failure: Failure = CRASH) -> Failure:
    """Return how a worker ends that is killed with its zygote."""
    killed_for = "the zygote that it was forked from was killed by SIGKILL"
    return msgspec.structs.replace(failure, evidence=Evidence(killed_for=killed_for, cause=f"zygote {number}"))


def charges(bench: Bench) -> dict[str, int]:
    """Return the failures that are charged, by worker."""
    return {worker.name: worker.num_failures for worker in bench.job.workers.values() if worker.num_failures}


def uses(bench: Bench) -> list[str]:
    return [f"{use.limit} {use.used} {use.subject}".rstrip() for use in in_use(bench.job)]


def end_together(bench: Bench, workers: list[WorkerRecord], failure: Failure) -> None:
    """End workers of one node, so that one report has all the ends."""
    agent = bench.agent(workers[0].node)
    reports = [agent.end("job-1", worker.name, failure) for worker in workers]
    bench.world.say(agent.node, reports[-1])
    bench.world.run(0.002)


@pytest.mark.parametrize("is_one_report", [True, False])
def test_workers_that_end_with_their_zygote_are_charged_once_and_all_restart(is_one_report: bool) -> None:
    bench = Bench(simple(total=4, restart_alone=True, per_node_max_failure=3))
    if is_one_report:
        end_together(bench, bench.job.ranks("s"), of_zygote())
    else:
        for rank in range(4):
            bench.end("s", rank, of_zygote())
    bench.running()
    assert bench.incarnations() == {"s-0": 1, "s-1": 1, "s-2": 1, "s-3": 1}
    first = bench.worker("s").name
    assert uses(bench) == [f"max_restart 1 {first}", "per_node_max_failure 1 s on n1"]
    whys = [each.reason for each in bench.world.log if each.event == "worker-restarts"]
    assert whys[0].endswith("(failure 1, max_restart=10)")
    assert all(why.endswith(f"(charged once, to {first})") for why in whys[1:])
    assert len(whys) == 4


def test_a_master_that_restarts_between_two_reports_knows_what_it_has_charged() -> None:
    bench = Bench(simple(total=2, restart_alone=True))
    bench.end("s", 0, of_zygote())
    bench.world.restart_master()
    bench.world.run(2)
    bench.end("s", 1, of_zygote())
    bench.running()
    assert (sum(charges(bench).values()), bench.incarnations()) == (1, {"s-0": 1, "s-1": 1})


@pytest.mark.parametrize("failures", [(CRASH, CRASH), (of_zygote(1), of_zygote(2)), (of_zygote(), CRASH)])
def test_workers_that_crash_by_themselves_in_one_second_are_charged_each(failures: tuple[Failure, Failure]) -> None:
    bench = Bench(simple(total=2, restart_alone=True))
    for rank, failure in enumerate(failures):
        bench.end("s", rank, failure)
    bench.running()
    assert list(charges(bench).values()) == [1, 1]
    assert bench.job.roles["s"].node_failures == {"n1": 2}


def test_a_worker_whose_program_failed_before_its_zygote_ended_is_charged_for_itself() -> None:
    bench = Bench(simple(total=2, restart_alone=True))
    bench.end("s", 0, of_zygote())
    bench.end("s", 1, of_zygote(failure=USER))
    bench.running()
    assert list(charges(bench).values()) == [1, 1]


def test_two_roles_whose_workers_end_with_one_zygote_are_charged_once() -> None:
    bench = Bench(simple(name="a", restart_alone=True), simple(name="b", restart_alone=True))
    bench.end("a", 0, of_zygote())
    bench.end("b", 0, of_zygote())
    bench.running()
    assert uses(bench) == ["max_restart 1 a_1-0_1-0", "per_node_max_failure 1 a on n1"]


@pytest.mark.parametrize("order", ["together", "rank first", "store first"])
@pytest.mark.parametrize("failover_exec", [1, 2])
def test_a_rank_and_the_store_of_one_zygote_are_one_charge_and_one_restart(failover_exec: int, order: str) -> None:
    bench = Bench(elastic(), failover_exec=failover_exec)
    rank, store = bench.worker("e"), bench.store
    if order == "together":
        end_together(bench, [store, rank], of_zygote())
    else:
        for worker in (rank, store) if order == "rank first" else (store, rank):
            bench.end_worker(worker, of_zygote())
    bench.running()
    assert (bench.incarnations(), bench.store.incarnation) == ({"e-0": 1, "e-1": 1}, 1)
    assert charges(bench) == {"store" if order == "store first" else rank.name: 1}
    assert bench.job.num_charged_restarts == bench.job.num_restarts == (1 if failover_exec == 1 else 0)


def test_a_rank_and_the_store_of_one_zygote_are_one_charge_in_place() -> None:
    bench = Bench(rejoining(total=3, accelerator=1), nodes=3, devices=1)
    with_store = next(worker for worker in bench.job.ranks("e") if worker.node == bench.store.node)
    end_together(bench, [bench.store, with_store], of_zygote())
    bench.running()
    assert charges(bench) == {with_store.name: 1}
    assert sorted(bench.incarnations().values()) == [0, 0, 1]
    assert (bench.store.incarnation, bench.job.num_restarts) == (1, 0)


@pytest.mark.parametrize("failover_exec", [1, 2])
def test_a_rank_and_a_store_that_start_too_slowly_are_one_restart(failover_exec: int) -> None:
    bench = Bench(elastic(), failover_exec=failover_exec)
    bench.agent().never_starts = True
    bench.world.kill_agent("n1")
    late = SimAgent("n1", resources(devices=8), incarnation="b")
    late.never_starts = True
    bench.world.add(late)
    bench.world.until(lambda: bench.worker("e").state is WorkerState.STARTING, "another start")
    restarts, job_restarts = bench.job.roles["e"].num_restarts, bench.job.num_restarts
    bench.world.until(lambda: bool(charges(bench)), "the deadline of the start")
    bench.world.run(0.001)
    late.never_starts = False
    assert charges(bench) == {bench.worker("e").name: 1}
    assert bench.job.roles["e"].num_restarts == restarts + 1
    assert bench.job.num_restarts - job_restarts == (1 if failover_exec == 1 else 0)


def test_a_store_that_ends_before_it_serves_a_round_restarts_alone_and_is_charged() -> None:
    bench = Bench(elastic())
    bench.agent().delays = msgspec.structs.replace(bench.agent().delays, start=5.0)
    bench.end("e", 0, CRASH)
    bench.end_worker(bench.store, CRASH)
    bench.running()
    assert bench.incarnations() == {"e-0": 1, "e-1": 1}
    assert charges(bench) == {bench.worker("e").name: 1, "store": 1}
    assert bench.job.num_restarts == 1


def in_place(**options: object) -> Bench:
    """Three ranks on three nodes, which take part in round after round."""
    return Bench(rejoining(total=3, accelerator=1), nodes=4, devices=1, **options)


def leave(bench: Bench, rank: int) -> None:
    worker = bench.worker("e", rank)
    bench.world.say(worker.node, bench.agent(worker.node).leave_round("job-1", worker.name))


def broken_unseen(bench: Bench) -> None:
    """Rank 0 died and its agent does not know yet; rank 1 saw its collective fail and was charged."""
    bench.agent(bench.worker("e", 0).node).is_hung = True  # a dead rank joins nothing
    leave(bench, 1)
    bench.world.until(lambda: bool(charges(bench)), "a charge for the broken round")
    bench.world.run(0.3)
    assert charges(bench) == {bench.worker("e", 1).name: 1}


@pytest.mark.parametrize("is_master_restarted", [False, True])
@pytest.mark.parametrize("window_s", [0.0, 100.0])
def test_a_root_cause_that_is_reported_late_takes_the_charge_over(window_s: float, is_master_restarted: bool) -> None:
    bench = in_place(restart_window_s=window_s)
    broken_unseen(bench)
    if is_master_restarted:
        bench.world.restart_master()
        bench.world.run(2)
    bench.end("e", 0, CRASH)
    bench.running()
    victim = bench.worker("e", 0)
    assert charges(bench) == {victim.name: 1}
    assert bench.job.roles["e"].node_failures == {victim.past[-1].node: 1}
    assert len(bench.job.charges) == (1 if window_s else 0)
    assert sorted(bench.incarnations().values()) == [0, 0, 1]


def test_a_rank_that_left_its_round_shortly_before_a_planned_next_one_breaks_nothing() -> None:
    bench = Bench(ranged(1, 2, accelerator=1), nodes=1, devices=1, node_num=2)
    bench.world.add(SimAgent("n2", resources(devices=1), delays=Delays(start=0.05)))
    bench.world.until(lambda: any(each.event == "role-grows" for each in bench.world.log), "the role to grow")
    leave(bench, 0)
    bench.world.until(lambda: bench.job.roles["e"].round == 2, "the next round")
    assert bench.job.roles["e"].suspect, "it is not yet judged"
    bench.world.run(5.0)
    assert (charges(bench), bench.job.roles["e"].round) == ({}, 2)


def test_several_rounds_that_one_dead_rank_broke_are_one_charge() -> None:
    bench = in_place()
    agent = bench.agent(bench.worker("e", 0).node)
    agent.is_hung = True
    for count in (1, 2):
        bench.world.until(lambda: bench.worker("e", 1).round == bench.job.roles["e"].round, "a further round")
        leave(bench, 1)
        bench.world.until(lambda count=count: sum(charges(bench).values()) == count, "a charge")  # type: ignore[misc]
    bench.end("e", 0, CRASH)
    bench.running()
    assert charges(bench) == {bench.worker("e", 0).name: 1}


def test_a_node_that_is_lost_late_takes_the_charge_over() -> None:
    bench = in_place()
    broken_unseen(bench)
    lost = bench.worker("e", 0).node
    bench.world.kill_agent(lost)
    bench.world.until(lambda: bool(bench.job.node_losses), "the loss")
    assert (charges(bench), bench.job.node_losses) == ({}, {lost: 1})


def test_a_node_that_was_excluded_for_another_rank_is_used_again() -> None:
    bench = Bench(rejoining(total=3, accelerator=1, per_node_max_failure=0), nodes=5, devices=1)
    victim = bench.worker("e", 0).node
    bench.agent(victim).is_hung = True
    bench.end("e", 1, COLLATERAL)
    bench.world.until(lambda: bool(bench.job.excluded), "the exclusion")
    assert victim not in bench.job.excluded
    bench.end("e", 0, CRASH)
    assert bench.job.excluded == [victim]


def test_a_failure_in_a_later_round_is_charged_beside_a_break_of_unknown_cause() -> None:
    bench = in_place()
    leave(bench, 1)
    bench.world.until(lambda: bool(charges(bench)), "a charge for the broken round")
    bench.world.run(2)
    assert bench.worker("e", 0).round == 2
    bench.restart("e", 0, CRASH, settle_s=2)
    assert charges(bench) == {bench.worker("e", 0).name: 1, bench.worker("e", 1).name: 1}


def test_ranks_that_are_killed_in_two_rounds_or_in_one_are_charged_each() -> None:
    bench = in_place()
    bench.restart("e", 0, CRASH, settle_s=2)
    bench.restart("e", 1, CRASH, settle_s=2)
    assert [charges(bench)[bench.worker("e", rank).name] for rank in (0, 1)] == [1, 1]
    bench.end("e", 0, CRASH)
    bench.end("e", 1, CRASH)
    bench.running()
    assert [charges(bench)[bench.worker("e", rank).name] for rank in (0, 1)] == [2, 2]


def test_a_break_that_no_longer_counts_is_not_taken_back_again() -> None:
    bench = in_place(restart_window_s=1.0)
    broken_unseen(bench)
    bench.world.run(2.0)
    assert (charges(bench), bench.job.charges) == ({}, [])
    bench.end("e", 0, CRASH)
    assert charges(bench) == {bench.worker("e", 0).name: 1}


def test_a_service_that_crashes_now_and_then_on_the_only_node_does_not_end_the_job() -> None:
    """`per_node_max_failure` chooses nodes: where the job fits on no other, `max_restart` counts alone."""
    reward = simple("reward", is_driver=False, restart_alone=True)
    bench = Bench(elastic(), reward)
    for number in range(1, 11):
        bench.restart("reward", 0, CRASH, settle_s=2)
        why = list(bench.world.core.cluster.events["job-1"])[-2:]
        assert any(f"(failure {number}, max_restart=10)" in each.reason for each in why), why
    assert (bench.job.excluded, bench.incarnations()["e-0"]) == ([], 0)
    events = bench.world.core.cluster.events["job-1"]
    kept = [each.reason for each in events if each.event == "node-kept"]
    assert len(kept) == 7
    assert "4 failures of role reward there, per_node_max_failure=3" in kept[0]
    bench.end("reward", 0, CRASH)
    assert bench.limit() == "max_restart"


def test_a_restart_names_the_limit_that_is_reached_first() -> None:
    bench = Bench(elastic(total=2, max_restart=3), job_max_restart=3)
    for rank in (0, 1, 0):
        bench.restart("e", rank, CRASH, settle_s=2)
    told = [each.reason for each in bench.world.core.cluster.events["job-1"] if each.event == "job-restarts"]
    counted = [
        "failure 1, max_restart=3",
        "restart 2 of the job, job_max_restart=3",
        "restart 3 of the job, job_max_restart=3",
    ]
    assert [reason.rpartition(" (")[2] for reason in told] == [f"{text})" for text in counted]
    bench.end("e", 0, CRASH)
    assert bench.limit() == "job_max_restart"
