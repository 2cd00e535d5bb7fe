"""`failover_trigger_strategy` and `failover_exec_strategy`, which hold for every failure, in virtual time."""

from typing import Any

import pytest

from tests.support.master import COLLATERAL, CRASH, USER, Bench, elastic, simple
from unified.job.spec import JobSpec, RoleSpec
from unified.protocol.records import Failure, WorkerState
from unified_master.core.job_faults import faults_of


@pytest.mark.parametrize(("exec_strategy", "num_restarts"), [(1, 1), (2, 0)])
@pytest.mark.parametrize("failure", [USER, CRASH], ids=["exception", "killed"])
@pytest.mark.parametrize("roles", [(simple("x", 2), elastic("y", 1)), (elastic("x"), simple("y"))])
def test_a_failure_follows_the_strategy(
    roles: tuple[RoleSpec, ...], failure: Failure, exec_strategy: Any, num_restarts: int
) -> None:
    bench = Bench(*roles, failover_exec=exec_strategy)
    bench.restart("x", 0, failure)
    assert bench.incarnations() == {"x-0": 1, "x-1": 1, "y-0": num_restarts}
    assert bench.job.num_restarts == num_restarts


@pytest.mark.parametrize("exec_strategy", [1, 2])
def test_workers_that_are_independent_restart_alone(exec_strategy: Any) -> None:
    bench = Bench(simple(total=3, restart_alone=True), simple("d"), nodes=2, failover_exec=exec_strategy)
    bench.restart("s", 1, CRASH)
    assert bench.incarnations() == {"s-0": 0, "s-1": 1, "s-2": 0, "d-0": 0}
    bench.restart("d", 0, CRASH)
    restarted = {"s-0": 1, "s-1": 2, "s-2": 1, "d-0": 1}
    assert bench.incarnations() == (restarted if exec_strategy == 1 else {"s-0": 0, "s-1": 1, "s-2": 0, "d-0": 1})


def test_ranks_that_train_together_cannot_restart_alone() -> None:
    spec = JobSpec(name="job", roles=[elastic(restart_alone=True)])
    assert list(faults_of(spec)) == [
        "role e: the ranks of an elastic role restart together, so restart_alone is not for it."
    ]


ROLES = [simple(), simple(restart_alone=True), elastic("s")]


@pytest.mark.parametrize("option", ["failover_exec", "failover_trigger"])
@pytest.mark.parametrize("role", ROLES, ids=["simple", "alone", "elastic"])
@pytest.mark.parametrize("failure", [USER, CRASH], ids=["exception", "killed"])
def test_strategy_0_stops_the_job_at_any_failure(option: str, role: RoleSpec, failure: Failure) -> None:
    bench = Bench(role, **{option: 0})
    bench.end("s", 0, failure)
    assert bench.limit() == f"{option}_strategy=0"


@pytest.mark.parametrize("option", ["failover_exec", "failover_trigger"])
@pytest.mark.parametrize("role", ROLES, ids=["simple", "alone", "elastic"])
def test_strategy_0_stops_the_job_when_a_node_or_its_store_is_lost(option: str, role: RoleSpec) -> None:
    bench = Bench(role, nodes=2, **{option: 0})
    bench.world.kill_agent("n1")
    assert bench.limit() == f"{option}_strategy=0"
    bench = Bench(elastic(), nodes=2, **{option: 0})
    bench.end_worker(bench.store, CRASH)
    assert bench.limit() == f"{option}_strategy=0"


@pytest.mark.parametrize(("role", "failure"), [(elastic("s", 3), CRASH), (simple(total=3), USER)])
def test_trigger_1_waits_for_the_others_of_the_role(role: RoleSpec, failure: Failure) -> None:
    bench = Bench(role, failover_trigger=1, failover_exec=2)
    bench.end("s", 0, failure)
    if role.kind == "elastic":
        bench.end("s", 1, COLLATERAL)
    else:
        bench.finish("s", 1)
    bench.world.run(10)
    assert bench.incarnations() == {"s-0": 0, "s-1": 0, "s-2": 0}
    assert "decided when the others of role s are done" in bench.job.reason
    bench.finish("s", 2)
    bench.running()
    assert bench.incarnations() == {"s-0": 1, "s-1": 1, "s-2": 1}
    assert [worker.num_failures for worker in bench.job.ranks("s")] == [1, 0, 0]


def test_trigger_1_waits_for_the_others_of_a_lost_node() -> None:
    bench = Bench(simple(total=2), simple("d", 2), nodes=2, failover_trigger=1, failover_exec=2)
    bench.finish("d", 0)
    bench.world.kill_agent("n2")
    bench.world.until(lambda: bench.incarnations() == {"s-0": 0, "s-1": 0, "d-0": 1, "d-1": 1}, "a restart of d")
    assert "decided when the others of role s are done" in "".join(event.reason for event in bench.world.log)
    bench.finish("s", 0)
    bench.running()
    assert bench.incarnations() == {"s-0": 1, "s-1": 1, "d-0": 1, "d-1": 1}
    assert (bench.job.node_losses, bench.worker("s", 1).num_failures) == ({"n2": 1}, 0)


def test_trigger_1_waits_for_all_who_use_a_lost_store() -> None:
    bench = Bench(elastic("a"), elastic("b"), failover_trigger=1, failover_exec=2)
    store = bench.job.store
    assert store is not None
    bench.end_worker(store, CRASH)
    for role, rank in (("a", 0), ("a", 1), ("b", 0)):
        bench.finish(role, rank)
    bench.world.run(5)
    assert store.incarnation == 0
    bench.restart("b", 1, CRASH)
    assert bench.incarnations() == {"a-0": 0, "a-1": 0, "b-0": 1, "b-1": 1}
    assert store.incarnation == 1


def test_trigger_1_does_not_wait_for_workers_that_wait_for_the_failed_one() -> None:
    bench = Bench(elastic(), failover_trigger=1, failover_exec=2)
    bench.end("e", 0, CRASH)
    bench.finish("e", 1)  # its process is there until it is stopped, so that its next incarnation begins later
    bench.world.until(lambda: bench.worker("e", 0).state is WorkerState.READY, "rank 0 to be ready")
    bench.restart("e", 0, USER)
    assert bench.incarnations() == {"e-0": 2, "e-1": 2}


def test_a_lost_node_with_simple_workers_follows_the_strategy() -> None:
    for strategy in (1, 2):
        bench = Bench(simple(total=2), nodes=2, failover_exec=strategy)
        bench.world.kill_agent("n2")
        bench.world.until(lambda bench=bench: bench.incarnations() == {"s-0": 1, "s-1": 1}, "the restart")  # type: ignore[misc]
    bench = Bench(simple(total=2, restart_alone=True), nodes=2)
    bench.world.kill_agent("n2")
    bench.world.until(lambda: bench.incarnations() == {"s-0": 0, "s-1": 1}, "the restart")
    bench.running()
    assert bench.worker("s", 1).node == "n1"
    bench = Bench(simple(total=2), nodes=2, failover_exec=0)
    bench.world.kill_agent("n2")
    assert bench.limit() == "failover_exec_strategy=0"
