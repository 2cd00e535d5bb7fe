"""Hangs: roles without progress are diagnosed before they fail, and those that go on are left alone."""

from typing import Any

import pytest

from tests.support.master import CRASH, Bench, elastic, simple
from unified.job.spec import RoleSpec
from unified.protocol.client_master import Explain, GetJob, JobStatus, Story
from unified.protocol.records import Stage, WorkerState
from unified.protocol.stacks import Collective, GroupCollectives
from unified_master.core.health.hangs import WITHIN_S


def waiting(number: int, *, is_in: bool) -> list[GroupCollectives]:
    """The collectives of a rank of two, of which one waits for the other."""
    recent = [Collective(number=number, operation="all_reduce", age_s=30, is_done=not is_in)]
    return [GroupCollectives(group="0", ranks=[0, 1], entered=number, recent=recent)]


def events(bench: Bench) -> dict[str, str]:
    """The last reason of each kind of event."""
    return {event.event: event.reason for event in bench.world.get(Story, Explain(job="job")).events}


def report(bench: Bench, role: str, rank: int, step: int, waits_for: str = "", **more: Any) -> None:
    worker = bench.worker(role, rank)
    agent = bench.agent(worker.node)
    bench.world.say(worker.node, agent.report_progress("job-1", worker.name, step, waits_for, **more))


def test_a_role_that_stands_still_is_diagnosed_and_restarts() -> None:
    this = Bench(elastic("e", hang_timeout_s=60), simple("s"), failover_exec=2)
    names = [this.worker("e", rank).name for rank in (0, 1)]
    this.agent().collectives = {names[0]: waiting(4, is_in=True), names[1]: waiting(3, is_in=False)}
    for number in range(5):
        this.world.run(50)
        report(this, "e", number % 2, number)
    assert "hang-suspected" not in events(this)
    this.world.run(60 + WITHIN_S + 5)
    told = events(this)
    finding = "rank 1 never entered all_reduce 4 (rank 0 has waited in it for 30 s)"
    assert "role e has made no progress for 60 s" in told["hang-suspected"]
    assert told["hang-diagnosed"].startswith(finding)
    counted = "(failure 1, max_restart=10)"
    assert f"{names[1]} on n1: hang: no progress for 60 s; {finding} {counted}" in told["role-restarts"]
    assert "category hang" in told["worker-failed"]
    assert this.incarnations() == {"e-0": 1, "e-1": 1, "s-0": 0}
    assert [this.worker("e", rank).num_failures for rank in (0, 1)] == [0, 1]
    this.running()


def test_a_rank_that_has_ended_is_to_blame_for_those_that_wait() -> None:
    this = Bench(elastic("e", hang_timeout_s=60))
    names = [this.worker("e", rank).name for rank in (0, 1)]
    this.agent().collectives = {names[0]: waiting(4, is_in=True), names[1]: waiting(3, is_in=False)}
    this.finish("e", 1)
    this.world.run(70)
    finding = "rank 1 never entered all_reduce 4; the program of rank 1 had ended after 3 collectives"
    assert events(this)["hang-diagnosed"].startswith(finding)
    assert [this.worker("e", rank).num_failures for rank in (0, 1)] == [0, 1]
    assert this.incarnations() == {"e-0": 1, "e-1": 1}
    this.running()


def test_a_rank_that_cleans_up_after_a_failure_is_to_blame() -> None:
    this = Bench(elastic("e", hang_timeout_s=60))
    names = [this.worker("e", rank).name for rank in (0, 1)]
    this.agent().collectives = {names[0]: waiting(3, is_in=False), names[1]: waiting(4, is_in=True)}
    report(this, "e", 1, 3, cleans_up="ValueError: boom in f, m.py:3")
    this.world.run(0.1)
    assert (
        events(this)["worker-cleans-up"]
        == "failed with ValueError: boom in f, m.py:3, and cleans up within a collective"
    )
    status = this.world.get(JobStatus, GetJob(job="job"))
    reasons = {worker.name: worker.reason for worker in status.workers}
    assert reasons[names[1]] == "failed with ValueError: boom in f, m.py:3, and cleans up"
    this.world.run(70)
    finding = (
        "rank 1 failed with ValueError: boom in f, m.py:3, and cleaned up in all_reduce 4, which rank 0 never entered"
    )
    assert events(this)["hang-diagnosed"].startswith(finding)
    assert [this.worker("e", rank).num_failures for rank in (0, 1)] == [0, 1]


def test_the_stacks_are_in_the_end_report() -> None:
    this = Bench(elastic("e", hang_timeout_s=60, max_restart=0))
    this.agent().collectives = {this.worker("e", 1).name: None}
    this.world.run(70)
    assert this.limit() == "max_restart"
    assert this.job.end is not None
    failure = this.job.end.failure
    assert failure.category == "hang"
    assert "rank 1 did not answer: its process was stopped" in failure.traceback


def test_a_role_without_a_limit_is_never_suspected() -> None:
    this = Bench(elastic("e"), simple("s"))
    this.world.run(10_000)
    assert this.world.core.cluster.hangs == {}
    assert this.job.stage is Stage.RUNNING


@pytest.mark.parametrize("role", [elastic("e", hang_timeout_s=5), simple("e", 2, hang_timeout_s=5)])
def test_workers_that_have_finished_are_not_watched(role: RoleSpec) -> None:
    this = Bench(role, simple("s"))
    for rank in (0, 1):
        this.finish("e", rank)
    this.world.run(100)
    assert "hang-suspected" not in events(this)
    assert this.world.core.cluster.hangs == {}


def test_one_worker_of_a_simple_role_is_watched_by_itself() -> None:
    this = Bench(simple("s", 2, hang_timeout_s=60, restart_alone=True))
    for number in range(4):
        this.world.run(40)
        report(this, "s", 0, number)
    this.world.run(10)
    assert this.incarnations() == {"s-0": 0, "s-1": 2}, "60 s without progress, twice"
    assert "none of its ranks waits in a collective" in events(this)["hang-diagnosed"]


def test_progress_during_the_diagnosis_ends_the_suspicion() -> None:
    this = Bench(elastic("e", hang_timeout_s=60))
    this.agent().is_mute = True
    this.world.until(lambda: "hang-suspected" in events(this), "a suspicion")
    report(this, "e", 0, 1)
    this.world.run(WITHIN_S + 2)
    assert "role e goes on" in events(this)["hang-over"]
    assert this.incarnations() == {"e-0": 0, "e-1": 0}
    this.world.run(70)
    assert this.incarnations() == {"e-0": 1, "e-1": 1}, "watched again, and agents that say nothing save nobody"


def test_a_node_that_is_silent_is_its_leases_business() -> None:
    this = Bench(elastic("e", total=2, per_group=1, accelerator=1, hang_timeout_s=4.5), nodes=2, devices=1)
    this.world.kill_agent("n2")
    this.world.run(20)
    assert "hang-suspected" not in events(this)
    assert this.worker("e", 0).state is not WorkerState.RUNNING


def test_a_stop_ends_the_watch() -> None:
    this = Bench(elastic("e", hang_timeout_s=60))
    this.agent().is_mute = True
    this.world.until(lambda: "hang-suspected" in events(this), "a suspicion")
    for rank in (0, 1):
        this.finish("e", rank)
    this.stopped()
    this.world.run(200)
    assert this.job.exit_code == 0
    assert this.world.core.cluster.hangs == {}


def test_a_master_that_restarts_begins_to_count_anew() -> None:
    this = Bench(elastic("e", hang_timeout_s=60))
    this.world.run(50)
    this.world.restart_master()
    this.world.run(50)
    assert "hang-suspected" not in events(this)
    this.world.run(30)
    assert "hang-diagnosed" in events(this)


def test_nothing_of_a_job_hangs_while_a_worker_waits_at_a_breakpoint() -> None:
    this = Bench(elastic("e", hang_timeout_s=60), simple("s", hang_timeout_s=50))
    report(this, "s", 0, 1, waits_for="somebody")
    this.world.run(500)
    told = events(this)
    assert told["worker-waits"] == "waits for somebody"
    assert "hang-suspected" not in told, "the ranks of e may wait for s"
    assert reasons(this)["s"] == "waits for somebody"
    report(this, "s", 0, 1)
    this.world.run(45)
    assert "hang-suspected" not in events(this), "all have their time from then on"
    assert reasons(this)["s"] != "waits for somebody"
    report(this, "e", 0, 1)
    this.world.run(20)
    assert "s_1-0_1-0 has made no progress for 50 s" in events(this)["hang-suspected"]


def test_a_worker_that_ended_at_a_breakpoint_waits_no_more() -> None:
    this = Bench(elastic("e", hang_timeout_s=60))
    report(this, "e", 1, 1, waits_for="somebody")
    this.end("e", 0, CRASH)
    this.running()
    assert this.incarnations() == {"e-0": 1, "e-1": 1}
    assert "waits for somebody" not in reasons(this).values()
    this.world.run(80)
    assert "hang-suspected" in events(this)


def reasons(bench: Bench) -> dict[str, str]:
    """What the status says of the last worker of each role."""
    status = bench.world.get(JobStatus, GetJob(job="job"))
    return {worker.role: worker.reason for worker in status.workers}
