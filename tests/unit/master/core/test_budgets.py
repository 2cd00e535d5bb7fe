"""Budgets over time: a window refills them, agents and masters that come and go do not; and groups of nodes."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from msgspec import structs

from tests.support.master import CRASH, USER, Bench, elastic, simple
from tests.support.sim.sim_agent import SimAgent, resources
from unified.job.spec import Resources
from unified.protocol.records import Failure, NodeState
from unified_master.core.budgets import EARLY_S, in_use

RACKS = {"n1": "a", "n2": "a", "n3": "b", "n4": "b"}


def events(bench: Bench, event: str) -> list[str]:
    return [each.reason for each in bench.world.core.cluster.events["job-1"] if each.event == event]


def reborn(bench: Bench, node: str, count: int) -> None:
    """Start the node's agent anew, so quickly that its lease has not run out."""
    if node in bench.world.agents:
        bench.world.kill_agent(node)
    labels = {"rack": RACKS[node]}
    bench.world.add(SimAgent(node, resources(devices=1), incarnation=f"b{count}", labels=labels))


def test_failures_older_than_the_window_no_longer_count() -> None:
    bench = Bench(simple(max_restart=1), restart_window_s=100)
    for attempt in range(1, 4):
        bench.restart("s", 0, CRASH, settle_s=101)
        assert (bench.worker("s").incarnation, bench.worker("s").num_failures, bench.job.charges) == (attempt, 0, [])
    bench.restart("s", 0, CRASH, settle_s=50)
    bench.end("s", 0, CRASH)
    assert bench.limit() == "max_restart"


@pytest.mark.parametrize("window_s", [0, 100])
def test_without_a_window_failures_count_for_ever(window_s: float) -> None:
    bench = Bench(simple(max_restart=1), restart_window_s=window_s)
    bench.restart("s", 0, CRASH, settle_s=200)
    bench.end("s", 0, CRASH)
    if window_s:
        bench.running()
    else:
        assert bench.limit() == "max_restart"


@pytest.mark.parametrize("failover_exec", [1, 2])
def test_every_budget_refills_and_says_so(failover_exec: Any) -> None:
    role = elastic(accelerator=1, role_max_restart=5)
    bench = Bench(role, nodes=3, devices=1, failover_exec=failover_exec, restart_window_s=60)
    bench.restart("e", 0, CRASH, settle_s=2)
    bench.world.kill_agent("n2")
    bench.world.until(lambda: bench.job.node_losses == {"n2": 1}, "the loss")
    bench.running()
    record = bench.job.roles["e"]
    counts = (record.num_failures, record.node_failures, bench.job.num_charged_restarts)
    assert counts == (1, {"n1": 1}, 1 if failover_exec == 1 else 0)
    why = events(bench, "job-restarts" if failover_exec == 1 else "workers-restart")[-1]
    assert why.endswith("(loss 1 of that node in 60 s, node_max_restart=10)")
    bench.world.run(61)
    assert (record.num_failures, record.node_failures, bench.job.node_losses) == (0, {}, {})
    assert (bench.job.num_charged_restarts, bench.job.num_restarts > 0) == (0, failover_exec == 1)


def test_an_excluded_node_is_used_again_when_its_failures_count_no_more() -> None:
    bench = Bench(elastic(total=1, accelerator=1, per_node_max_failure=0), nodes=2, devices=1, restart_window_s=60)
    bench.restart("e", 0, CRASH, settle_s=30)
    assert (bench.worker("e").node, bench.job.excluded) == ("n2", ["n1"])
    bench.world.run(31)
    assert bench.job.excluded == []
    assert events(bench, "node-readmitted") == ["this job may use n1 again: the reason for the exclusion is over"]
    bench.restart("e", 0, CRASH)
    assert (bench.worker("e").node, bench.job.excluded) == ("n1", ["n2"])


def test_the_store_host_of_a_job_on_one_host_follows_ranks_that_left_it_behind() -> None:
    """Its ranks meet on loopback; a store on another host would be out of their reach."""
    bench = Bench(elastic(total=1, accelerator=1, per_node_max_failure=0), nodes=2, devices=1, node_num=1)
    assert (bench.worker("e").node, bench.store.node) == ("n1", "n1")
    bench.restart("e", 0, CRASH, settle_s=30)
    assert (bench.worker("e").node, bench.store.node, bench.store.incarnation) == ("n2", "n2", 1)
    run = bench.worker("e").run
    assert run is not None
    assert (run.store_host, run.round) == ("127.0.0.1", 2)


def test_the_ranks_of_a_job_on_several_hosts_meet_at_the_address_of_the_store_s_node() -> None:
    bench = Bench(elastic(accelerator=1), nodes=2, devices=1, node_num=2)
    run = bench.worker("e").run
    assert run is not None
    assert run.store_host == bench.world.core.cluster.nodes[bench.store.node].info.address


def test_the_status_tells_what_is_used_up_of_each_limit() -> None:
    bench = Bench(elastic(accelerator=1), simple(role_max_restart=5), nodes=3, devices=2, node_max_restart=7)
    assert in_use(bench.job) == []
    bench.restart("s", 0, USER, settle_s=2)
    bench.restart("e", 1, CRASH, settle_s=2)
    away = bench.worker("e", 1).node
    bench.world.kill_agent(away)
    bench.world.until(lambda: bool(bench.job.node_losses), "the loss")
    uses = [f"{use.limit} {use.used}/{use.allowed} {use.subject}".rstrip() for use in in_use(bench.job)]
    assert uses == [
        "max_restart 1/10 e_2-1_1-0",
        f"per_node_max_failure 1/3 e on {away}",
        "role_max_restart 1/5 s",
        f"node_max_restart 1/7 {away}",
        "job_max_restart 2/10",
    ]


def test_a_master_that_restarts_keeps_charges_and_their_age() -> None:
    bench = Bench(simple(max_restart=1), restart_window_s=60)
    bench.restart("s", 0, CRASH, settle_s=30)
    bench.world.restart_master()
    bench.world.run(10)
    assert bench.worker("s").num_failures == 1
    bench.world.run(30)
    assert (bench.worker("s").num_failures, bench.worker("s").incarnation) == (0, 1)


def test_a_node_that_leaves_and_rejoins_quickly_does_not_get_a_new_budget() -> None:
    """pytorch #147064: there the restarts are counted by the agent, so a new agent begins at 0."""
    bench = Bench(simple(), nodes=1, devices=1, node_max_restart=3)
    for count in range(1, 4):
        reborn(bench, "n1", count)
        bench.world.until(lambda count=count: bench.worker("s").incarnation == count, "the restart")  # type: ignore[misc]
        bench.running()
        assert bench.world.core.cluster.nodes["n1"].state is NodeState.ALIVE
        assert bench.job.node_losses == {"n1": count}
    reborn(bench, "n1", 4)
    assert bench.limit() == "node_max_restart"


def test_failures_and_exclusion_outlive_the_agent_of_the_node() -> None:
    bench = Bench(elastic(total=1, accelerator=1, per_node_max_failure=1), nodes=2, devices=1)
    bench.restart("e", 0, USER, settle_s=2)
    reborn(bench, "n1", 1)
    bench.world.run(1)
    bench.running()
    assert (bench.worker("e").node, bench.worker("e").num_failures) == ("n1", 1)
    bench.restart("e", 0, USER, settle_s=2)
    assert (bench.worker("e").node, bench.job.excluded) == ("n2", ["n1"])
    reborn(bench, "n1", 2)
    bench.world.run(2)
    assert bench.job.excluded == ["n1"]


@pytest.mark.parametrize(
    ("cap_s", "waits"), [(30.0, [0, 0, 0.5, 1, 2, 4, 8]), (1.5, [0, 0, 0.5, 1, 1.5, 1.5]), (0.0, [0] * 6)]
)
def test_a_worker_that_dies_at_once_each_time_waits_longer_up_to_the_cap(cap_s: float, waits: Sequence[float]) -> None:
    bench = Bench(simple(per_node_max_failure=99), restart_backoff_s=cap_s)
    for wait_s in waits:
        before = bench.world.now
        bench.restart("s", 0, CRASH)
        assert bench.world.now - before == pytest.approx(wait_s + 0.07, abs=0.05)
    bench.world.run(2)
    before = bench.world.now
    bench.restart("s", 0, CRASH)  # it ran for longer than a second: the next wait begins from none
    assert bench.world.now - before < 0.5


def test_a_role_that_leaves_an_excluded_node_does_not_take_the_job_beyond_node_num() -> None:
    """Another role is still on that node, which counts."""
    roles = [simple("p", total=3, per_group=3), simple("o", total=2, per_group=2), simple(per_node_max_failure=0)]
    roles = [msgspec.structs.replace(role, resources=Resources(accelerator=1)) for role in roles]
    bench = Bench(*roles, nodes=2, devices=3, failover_exec=2)
    bench.world.add(SimAgent("n3", resources(devices=3)))
    bench.world.run(0.1)
    away = bench.worker("s").node
    assert away == bench.worker("o").node
    bench.restart("s", 0, CRASH)
    assert bench.job.excluded == [away]
    assert {worker.node for worker in bench.job.workers.values()} == {"n1", "n2", "n3"} - {away}


def grouped(num_nodes: int = 4, per_node: int = 3, **options: Any) -> Bench:
    """An elastic role on n1 and n2, which are in one rack. Those that come later are in another."""
    role = elastic(accelerator=1, failover_label="rack", failover_timeout_s=60, per_node_max_failure=per_node)
    bench = Bench(role, nodes=2, devices=1, labels=[{"rack": RACKS[name]} for name in ("n1", "n2")], **options)
    for number in range(3, num_nodes + 1):
        name = f"n{number}"
        bench.world.add(SimAgent(name, resources(devices=1), labels={"rack": RACKS[name]}))
    bench.world.run(0.1)
    return bench


@pytest.mark.parametrize("failover_exec", [1, 2])
def test_a_group_is_given_up_if_the_role_does_not_run_again_in_time(failover_exec: Any) -> None:
    bench = grouped(failover_exec=failover_exec)
    bench.agent("n2").never_starts = True  # the rack's switch has failed: what starts there will hang
    bench.world.kill_agent("n1")
    bench.world.until(lambda: "n1" in bench.job.roles["e"].failed_groups, "the loss")
    bench.world.run(59)
    assert bench.job.excluded == []
    bench.running()
    assert [worker.node for worker in bench.job.ranks("e")] == ["n3", "n4"]
    assert bench.job.excluded == ["n1", "n2"]
    why = "role e does not run again 60 s after n1 failed: all nodes with rack=a are given up for this job (n1, n2)"
    assert events(bench, "node-group-given-up") == [why]
    assert (bench.job.node_losses, bench.job.num_charged_restarts) == ({"n1": 1}, 1 if failover_exec == 1 else 0)
    assert (bench.job.roles["e"].failed_groups, bench.job.roles["e"].group_due_at) == ({}, None)


def test_a_group_is_kept_if_the_role_runs_again_in_time_whatever_fails_later() -> None:
    bench = grouped(3)
    bench.world.kill_agent("n1")
    bench.world.until(lambda: bench.job.node_losses == {"n1": 1}, "the loss")
    bench.running()
    assert bench.job.roles["e"].failed_groups == {}
    bench.world.run(59.9)
    bench.end("e", 1, CRASH)
    bench.world.run(5)
    assert (bench.job.excluded, events(bench, "node-group-given-up")) == ([], [])


def test_a_group_is_kept_while_the_job_fits_nowhere_else() -> None:
    bench = grouped(2)
    bench.world.kill_agent("n1")
    bench.world.until(lambda: bench.job.is_waiting, "the job to wait")
    bench.world.run(130)
    kept = events(bench, "node-group-kept")
    assert len(kept) == 2
    assert kept[0].endswith("the other nodes with rack=a are kept, since the job does not fit on what is left")
    reborn(bench, "n1", 1)
    bench.running()
    assert [worker.node for worker in bench.job.ranks("e")] == ["n1", "n2"]


def test_a_node_of_a_group_is_used_again_when_its_agent_was_started_anew() -> None:
    bench = grouped()
    bench.agent("n2").never_starts = True
    bench.world.kill_agent("n1")
    bench.world.until(lambda: bench.job.excluded == ["n1", "n2"], "the end of the group")
    bench.running()
    reborn(bench, "n2", 1)
    bench.world.run(1)
    assert bench.job.excluded == ["n1"]


@pytest.mark.parametrize("down_s", [None, 0.5, 150])
def test_a_group_given_up_is_used_again_after_the_window(down_s: float | None) -> None:
    """The group is given up 60 s after the loss that was charged; a new master does not forget it."""
    bench = grouped(restart_window_s=100)
    bench.agent("n2").never_starts = True
    bench.world.kill_agent("n1")
    bench.world.until(lambda: bench.job.excluded == ["n1", "n2"], "the end of the group")
    given_up_at = bench.world.now
    bench.running()
    if down_s is not None:
        bench.world.crash_master(down_s)
        bench.world.run(down_s + 5)
    if bench.world.now < given_up_at + 100:
        bench.world.run(given_up_at + 95 - bench.world.now)
        assert (bench.job.charges, bench.job.excluded) == ([], ["n1", "n2"])
        bench.world.run(10)
    assert (bench.job.excluded, bench.job.given_up) == ([], {})
    assert events(bench, "node-readmitted") == ["this job may use n1, n2 again: the reason for the exclusion is over"]


def test_an_excluded_node_may_take_its_group_along_and_a_new_master_does_not_forget_it() -> None:
    bench = grouped(per_node=0)
    bench.agent("n2").never_starts = True
    bench.end("e", 0, CRASH)
    assert (bench.job.excluded, bench.job.roles["e"].failed_groups) == (["n1"], {"n1": "a"})
    bench.world.run(30)
    bench.world.restart_master()
    bench.running()
    assert bench.job.excluded == ["n1", "n2"]


BUG = Failure(summary="KeyError: 'lr'", exception_type="KeyError", traceback="train.py:3: KeyError: 'lr'")


def test_the_same_error_at_the_same_line_before_any_step_twice_is_permanent() -> None:
    bench = Bench(elastic())
    bench.restart("e", 1, BUG)
    bench.end("e", 0, BUG)  # the ranks fail alike
    assert bench.limit() == "permanent"
    assert bench.job.reason.endswith(
        "KeyError: 'lr'; permanent: the same error at the same line before any step, twice"
    )
    assert bench.incarnations() == {"e-0": 1, "e-1": 1}


@pytest.mark.parametrize(
    "second",
    [
        structs.replace(BUG, traceback="train.py:4: KeyError: 'lr'"),
        structs.replace(BUG, traceback=""),
        structs.replace(BUG, category="crash"),
        structs.replace(BUG, exception_type="requests.exceptions.ConnectionError"),
        structs.replace(BUG, exception_type="torch.AcceleratorError"),
        structs.replace(BUG, exception_type="unified.errors.EngineError"),
    ],
    ids=["other line", "no traceback", "crash", "network", "device", "engine"],
)
def test_other_failures_are_not_permanent(second: Failure) -> None:
    bench = Bench(simple(per_node_max_failure=9))
    for failure in (BUG, second, BUG, second):
        bench.restart("s", 0, failure)


def test_a_failure_after_a_step_is_not_permanent() -> None:
    bench = Bench(simple(total=2, restart_alone=True, per_node_max_failure=9))
    for attempt in range(1, 4):
        at_step(bench, attempt, rank=1)
        bench.restart("s", 0, BUG)  # a peer has reported a step
        assert bench.incarnations() == {"s-0": attempt, "s-1": 0}
    bench.restart("s", 1, CRASH)
    at_step(bench, 4)
    bench.restart("s", 0, BUG)  # it had reported one itself
    bench.restart("s", 0, BUG)
    bench.end("s", 0, BUG)  # none of these incarnations had
    assert bench.limit() == "permanent"


def at_step(bench: Bench, number: int, rank: int = 0) -> None:
    worker = bench.worker("s", rank)
    bench.world.say(worker.node, bench.agent(worker.node).report_progress("job-1", worker.name, number))


def test_failures_in_a_row_without_a_new_step_are_permanent() -> None:
    bench = Bench(simple(per_node_max_failure=99, max_restart=99), job_max_restart=99)
    for number in (*(7,) * 4, *(8,) * 4, 9):  # a new step, and they are counted anew
        at_step(bench, number)
        bench.restart("s", 0, CRASH)
    for number in (3, 9, 8):
        at_step(bench, number)
        bench.restart("s", 0, CRASH)
    bench.world.restart_master()
    bench.running()
    bench.end("s", 0, CRASH)
    assert bench.limit() == "permanent"
    assert bench.job.reason.endswith("permanent: 5 failures in a row, and no step beyond 9")


def test_ranks_that_fail_at_once_are_one_failure_without_a_new_step() -> None:
    bench = Bench(simple(total=3, per_node_max_failure=99, max_restart=99, restart_alone=True))
    at_step(bench, 7)
    for _ in range(2):
        for rank in range(3):
            bench.world.say("n1", bench.agent().end("job-1", bench.worker("s", rank).name, CRASH))
        bench.world.run(0.002)
        bench.running()
    assert bench.incarnations() == {"s-0": 2, "s-1": 2, "s-2": 2}
    assert bench.job.roles["s"].num_fruitless == 2


def test_a_job_without_steps_has_the_limits_alone() -> None:
    bench = Bench(simple(per_node_max_failure=99, max_restart=8))
    for _ in range(8):
        bench.restart("s", 0, CRASH)
    bench.end("s", 0, CRASH)
    assert bench.limit() == "max_restart"


def test_one_that_ran_for_long_may_have_done_something() -> None:
    bench = Bench(simple())
    for _ in range(3):
        bench.restart("s", 0, BUG, settle_s=EARLY_S)
    assert bench.incarnations() == {"s-0": 3}


def test_ranks_that_fail_alike_at_first_are_restarted_once_each() -> None:
    bench = Bench(simple(total=2, restart_alone=True))
    bench.restart("s", 0, BUG)
    bench.restart("s", 1, BUG)
    assert bench.incarnations() == {"s-0": 1, "s-1": 1}
    bench.end("s", 0, BUG)
    assert bench.limit() == "permanent"
