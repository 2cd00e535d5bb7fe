"""Roles with a range of nodes: they begin with what is there, grow and shrink, in virtual time."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.master import CRASH, SETUP, USER, Bench, ranged, simple
from tests.support.sim.sim_agent import SimAgent, resources
from unified.job.spec import JobSpec, RoleSpec
from unified.protocol.client_master import SubmitJob
from unified.protocol.records import Reachability, Stage, WorkerState
from unified_master.core.job_faults import faults_of
from unified_master.core.state import WorkerRecord


class Range(Bench):
    """A job with one role with a range of nodes, and whoever else."""

    def __init__(self, role: RoleSpec, *others: RoleSpec, nodes: int = 1, **options: Any) -> None:
        super().__init__(role, *others, nodes=nodes, node_num=9, **options)

    def running(self) -> None:
        self.in_round(max(1, self.job.roles["e"].round))

    def members(self) -> list[WorkerRecord]:
        return self.job.members(self.job.spec.role("e"))

    def in_round(self, number: int, size: int | None = None) -> None:
        """Run until a round of so many workers has been joined by all of them."""

        def is_so() -> bool:
            members = self.members()
            is_whole = size is None or len(members) == size
            return is_whole and all(one.round == number and one.state is WorkerState.RUNNING for one in members)

        self.world.until(is_so, f"round {number} of {size}")

    def ranks(self) -> dict[str, int]:
        """The ranks of the newest round, by node."""
        return {worker.node: worker.run.rank for worker in self.members() if worker.run is not None}

    def join(self, node: str, **offer: Any) -> None:
        self.world.add(SimAgent(node, resources(devices=8, **offer)))
        self.world.run(0.01)

    def told(self, event: str) -> list[str]:
        return [record.reason for record in self.world.log if record.event == event]


def test_a_role_begins_with_the_nodes_that_are_there_and_grows_with_those_that_come() -> None:
    bench = Range(ranged(1, 3))
    assert bench.ranks() == {"n1": 0}
    assert [worker.run.world_size for worker in bench.members() if worker.run is not None] == [1]
    bench.join("n2")
    came_at = bench.world.now
    bench.in_round(2, size=2)
    assert bench.world.now - came_at == pytest.approx(bench.world.intervals.grow_settle_s, abs=0.5)
    assert bench.ranks() == {"n1": 0, "n2": 1}
    assert bench.incarnations() == {"e-0": 0, "e-1": 0, "e-2": -1}
    bench.join("n3")
    joined_at = bench.world.now
    bench.in_round(3, size=3)
    assert bench.world.now - joined_at > bench.world.intervals.grow_every_s / 2, "it grew again too soon"
    assert bench.incarnations() == {"e-0": 0, "e-1": 0, "e-2": 0}
    bench.join("n4")
    bench.world.run(60)
    assert bench.job.roles["e"].round == 3
    assert [worker.num_failures for worker in bench.job.ranks("e")] == [0, 0, 0]
    assert bench.job.num_charged_restarts == 0


def test_nodes_that_come_together_make_one_round() -> None:
    bench = Range(ranged(1, 4))
    for node in ("n2", "n3", "n4"):
        bench.join(node)
        bench.world.run(0.5)
    bench.in_round(2, size=4)
    assert sorted(bench.ranks().values()) == [0, 1, 2, 3]


def test_the_others_train_until_newcomers_are_ready_and_are_told_before() -> None:
    bench = Range(ranged(1, 2))
    bench.join("n2")
    bench.world.until(lambda: bench.worker("e", 1).state is WorkerState.STARTING, "a newcomer")
    assert bench.worker("e").notice is None
    bench.world.until(lambda: bench.worker("e").notice is not None, "a notice")
    notice = bench.worker("e").notice
    assert notice is not None
    assert bench.worker("e", 1).state is WorkerState.READY
    assert (notice.round, notice.kind, notice.within_s) == (1, "planned", 30.0)
    assert notice.reason == "the next round of role e has 2 nodes instead of 1"
    bench.in_round(2, size=2)


def test_processes_that_cannot_rejoin_are_restarted_when_all_have_left_or_the_time_is_over() -> None:
    for has_left in (True, False):
        bench = Range(ranged(1, 2, rejoins=False))
        bench.join("n2")
        bench.world.until(lambda: bench.worker("e").notice is not None, "a notice")  # noqa: B023  # called at once
        told_at = bench.world.now
        if has_left:
            bench.agent("n1").incarnations[bench.worker("e").incarnation_id].left_round = 1
            bench.world.say("n1", bench.agent("n1").report_progress("job-1", bench.worker("e").name, 1))
        bench.in_round(2, size=2)
        waited = bench.world.now - told_at
        assert waited < 1.0 if has_left else waited == pytest.approx(30.0, abs=1.0)
        assert bench.incarnations() == {"e-0": 1, "e-1": 0}
        assert bench.ranks() == {"n1": 0, "n2": 1}
        assert [worker.num_failures for worker in bench.job.ranks("e")] == [0, 0]


def test_a_loop_that_does_not_leave_even_a_broken_round_fails() -> None:
    bench = Range(ranged(2, 3), nodes=2)
    bench.agent("n2").is_hung = True
    bench.join("n3")
    bench.world.until(lambda: bool(bench.told("round-broken")), "the end of its time")
    assert bench.told("round-broken") == ["round 1 is broken off: not all left it in time"]
    bench.in_round(3, size=3)
    assert bench.incarnations() == {"e-0": 0, "e-1": 1, "e-2": 0}
    assert [worker.num_failures for worker in bench.job.ranks("e")] == [0, 1, 0]


@pytest.mark.parametrize("rejoins", [True, False], ids=["in place", "processes"])
def test_a_lost_node_that_none_replaces_makes_the_role_smaller(rejoins: bool) -> None:
    bench = Range(ranged(1, 3, rejoins=rejoins), nodes=3, failover_exec=2)
    bench.world.kill_agent("n1")
    bench.world.until(lambda: "node-lost" in [one.event for one in bench.world.log], "the loss")
    lost_at = bench.world.now
    bench.in_round(2, size=2)
    assert bench.world.now - lost_at == pytest.approx(bench.world.intervals.replace_s, abs=0.5)
    assert bench.ranks() == {"n2": 1, "n3": 0}, "the highest rank fills the hole; the other keeps its own"
    run = bench.members()[0].run
    assert run is not None
    assert run.world_size == 2
    assert bench.incarnations() == ({"e-0": 0, "e-1": 0, "e-2": 0} if rejoins else {"e-0": 0, "e-1": 1, "e-2": 1})
    gone = bench.worker("e", 0)
    assert gone.entry is not None
    assert gone.entry.state is Reachability.ENDED
    bench.join("n4")
    bench.in_round(3, size=3)
    assert bench.ranks() == {"n2": 1, "n3": 0, "n4": 2}
    assert bench.entry("e", 0).state is Reachability.ALIVE


def test_a_node_that_comes_in_time_replaces_a_lost_one_in_the_same_round() -> None:
    bench = Range(ranged(1, 3), nodes=3)
    bench.world.kill_agent("n1")
    bench.world.until(lambda: bench.job.roles["e"].waits_until is not None, "the loss")
    bench.world.run(1.0)
    bench.join("n4")
    bench.in_round(2, size=3)
    assert bench.ranks() == {"n4": 0, "n2": 1, "n3": 2}
    assert bench.incarnations() == {"e-0": 1, "e-1": 0, "e-2": 0}


def test_an_agent_that_stops_in_order_makes_the_role_smaller() -> None:
    bench = Range(ranged(1, 2), nodes=2)
    bench.world.say("n2", bench.agent("n2").leave())
    bench.world.kill_agent("n2")
    bench.in_round(2, size=1)
    assert bench.incarnations()["e-0"] == 0


def test_a_node_that_leaves_and_comes_back_at_once_costs_one_round() -> None:
    bench = Range(ranged(1, 2), nodes=2)
    for incarnation in range(1, 4):
        bench.world.kill_agent("n2")
        bench.world.add(SimAgent("n2", resources(), incarnation=str(incarnation)))
        bench.in_round(1 + incarnation, size=2)
    assert bench.job.node_losses == {"n2": 3}, "limits are kept where no agent can lose them"
    assert bench.incarnations() == {"e-0": 0, "e-1": 3}


def test_below_the_least_number_the_job_waits() -> None:
    bench = Range(ranged(2, 3, accelerator=8), nodes=2)
    bench.world.kill_agent("n2")
    bench.world.until(lambda: bench.job.is_waiting, "the job to wait")
    bench.join("n3")
    bench.in_round(2, size=2)


def test_it_does_not_begin_below_the_least_number() -> None:
    bench = Range(ranged(1, 1))
    role = ranged(3, 4, accelerator=8)
    bench.world.ask(SubmitJob(spec=JobSpec(name="big", roles=[role], node_num=4)))
    bench.world.run(5)
    assert bench.world.job("big").is_waiting
    bench.join("n2")
    bench.world.run(5)
    assert bench.world.job("big").is_waiting
    bench.join("n3")
    bench.world.until_stage("big", Stage.RUNNING)
    assert len(bench.world.job("big").members(role)) == 3


def test_groups_keep_their_local_ranks() -> None:
    bench = Range(ranged(1, 3, per_group=2), nodes=3)
    bench.world.kill_agent("n1")
    bench.in_round(2, size=4)
    runs = [(one.rank % 2, one.run.rank, one.run.node_rank) for one in bench.members() if one.run is not None]
    assert sorted(runs) == [(0, 0, 0), (0, 2, 1), (1, 1, 0), (1, 3, 1)]


def breaks_newcomer(bench: Range) -> None:
    bench.end("e", 1, USER)


def loses_newcomer(bench: Range) -> None:
    bench.world.kill_agent("n2")


@pytest.mark.parametrize("act", [breaks_newcomer, loses_newcomer, lambda bench: bench.end("e", 1, SETUP)])
def test_a_newcomer_that_fails_disturbs_nobody(act: Callable[[Range], None]) -> None:
    bench = Range(ranged(1, 2))
    bench.join("n2")
    bench.world.until(lambda: bench.worker("e", 1).state is WorkerState.STARTING, "a newcomer")
    bench.world.run(0.02)
    act(bench)
    bench.world.run(20.0)
    assert (bench.job.stage, bench.job.roles["e"].round) == (Stage.RUNNING, 1)
    assert bench.incarnations()["e-0"] == 0
    assert bench.worker("e").notice is None
    assert "goes on without it" in bench.worker("e", 1).reason
    if act is not loses_newcomer:
        bench.in_round(2, size=2)


def test_a_role_that_is_nearly_done_does_not_change_any_more() -> None:
    bench = Range(ranged(1, 2))
    bench.join("n2")
    bench.world.until(lambda: bench.worker("e", 1).state is WorkerState.STARTING, "a newcomer")
    bench.finish("e", 0)
    assert bench.stopped().exit_code == 0


def test_a_failure_during_a_planned_change_is_judged_and_the_round_follows() -> None:
    bench = Range(ranged(2, 3), nodes=2)
    bench.agent("n1").is_hung = True
    bench.join("n3")
    bench.world.until(lambda: bench.worker("e").notice is not None, "a notice")
    bench.agent("n1").is_hung = False
    bench.end("e", 1, CRASH)
    bench.in_round(2, size=3)
    assert bench.incarnations() == {"e-0": 0, "e-1": 1, "e-2": 0}
    assert [worker.num_failures for worker in bench.job.ranks("e")] == [0, 1, 0]


def test_a_job_that_waits_gets_the_node_first() -> None:
    bench = Range(ranged(1, 2, accelerator=8))
    needs = ranged(1, 2, accelerator=8).resources
    bench.world.ask(SubmitJob(spec=JobSpec(name="other", roles=[simple(resources=needs)])))
    bench.world.run(1)
    bench.join("n2")
    bench.world.run(60)
    assert bench.world.job("other").stage is Stage.RUNNING
    assert len(bench.members()) == 1


def test_the_master_may_restart_in_the_middle_of_a_change() -> None:
    for is_growing in (True, False):
        bench = Range(ranged(1, 2), nodes=1 if is_growing else 2)
        if is_growing:
            bench.agent("n1").is_hung = True
            bench.join("n2")
            bench.world.until(lambda: bench.worker("e").notice is not None, "a notice")  # noqa: B023  # called at once
        else:
            bench.world.kill_agent("n2")
            bench.world.until(lambda: bench.job.roles["e"].waits_until is not None, "the loss")  # noqa: B023  # as above
        bench.world.restart_master()
        bench.agent("n1").is_hung = False
        bench.in_round(2, size=2 if is_growing else 1)


def test_a_range_is_for_an_elastic_role_of_its_own() -> None:
    wrong = [
        ranged(1, 2, collocation="x"),
        simple("e", 2, min_nodes=1, max_nodes=2),
        ranged(1, 2, per_group=2, failover_label="rack"),
    ]
    found = [list(faults_of(JobSpec(name="job", roles=[role]))) for role in wrong]
    assert [len(faults) for faults in found] == [1, 1, 0]


def test_a_role_does_not_grow_onto_a_spare_node_which_replaces_a_lost_one() -> None:
    bench = Range(ranged(1, 3), nodes=2)
    bench.world.add(SimAgent("n3", resources(devices=8), labels={"spare": "yes"}))
    bench.world.run(60)
    assert bench.job.roles["e"].round == 1
    bench.world.kill_agent("n2")
    bench.in_round(2, size=2)
    assert bench.ranks() == {"n1": 0, "n3": 1}
