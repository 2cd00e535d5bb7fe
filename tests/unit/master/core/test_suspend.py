"""Suspended jobs: their workers end with the grace of a stop, nothing is charged, and they wait to be resumed."""

from typing import Any

import pytest

from tests.support.master import CRASH, Bench, elastic, simple
from tests.support.sim.sim_agent import Delays
from unified.job.spec import JobSpec
from unified.protocol.agent_master import DesiredWorkers, MasterToAgent
from unified.protocol.client_master import (
    Accepted,
    Done,
    DrainNode,
    GetJob,
    JobStatus,
    Refused,
    ResumeJob,
    StopJob,
    SubmitJob,
    SuspendJob,
)
from unified.protocol.records import Stage, WorkerState
from unified_master.core.budgets import in_use

REASON = "the allocation ends at 14:03"


def suspend(bench: Bench, job: str = "job", reason: str = REASON) -> None:
    bench.world.get(Done, SuspendJob(job=job, reason=reason))


def resume(bench: Bench, job: str = "job") -> None:
    bench.world.get(Done, ResumeJob(job=job))


def status(bench: Bench) -> JobStatus:
    return bench.world.get(JobStatus, GetJob(job="job"))


@pytest.mark.parametrize("failover_exec", [0, 1, 2])
def test_a_job_waits_and_goes_on_without_a_charge(failover_exec: Any) -> None:
    bench = Bench(elastic(accelerator=1), simple(total=2), nodes=2, devices=2, failover_exec=failover_exec)
    suspend(bench)
    bench.world.run(60)
    assert (status(bench).suspended, status(bench).num_leaving, status(bench).stage) == (REASON, 0, Stage.INIT)
    assert {worker.reason for worker in bench.job.workers.values()} == {f"suspended: {REASON}"}
    assert not any(worker.is_desired or worker.allocation for worker in bench.job.workers.values())
    assert not any(node.allocations for node in bench.world.core.cluster.nodes.values())
    resume(bench)
    bench.running()
    assert set(bench.incarnations().values()) == {1}
    assert (in_use(bench.job), bench.job.num_restarts, bench.job.suspended) == ([], 0, None)
    assert f"suspended: {REASON}" in bench.world.recent()


def test_workers_have_the_grace_of_a_stop_and_their_failures_are_not_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(simple(total=2), nodes=1, stop_grace_s=20.0)
    agent, heard = bench.agent(), list[MasterToAgent]()
    agent.delays, receive = Delays(stop=15.0), agent.receive

    def hear(now: float, number: int, said: MasterToAgent) -> Any:
        heard.append(said)
        return receive(now, number, said)

    monkeypatch.setattr(agent, "receive", hear)
    suspend(bench)
    bench.world.run(10)
    (described,) = next(said.jobs for said in reversed(heard) if isinstance(said, DesiredWorkers))
    assert described.stop_grace_s is None, "all of the job's own, not the two seconds of a restart"
    assert status(bench).num_leaving == 2
    bench.end("s", 0, CRASH)
    resume(bench)
    bench.world.run(1)
    bench.world.ask(SubmitJob(spec=JobSpec(name="other", roles=[simple()])))  # the agent is sent a new set
    bench.world.run(1)
    described = next(
        job
        for said in reversed(heard)
        if isinstance(said, DesiredWorkers)
        for job in said.jobs
        if job.job_id == "job-1"
    )
    assert described.stop_grace_s is None, "they still save"
    assert bench.job.reason == "waits: its former workers are still stopping"
    bench.running()
    assert in_use(bench.job) == []


def test_a_suspended_job_holds_nobody_up() -> None:
    bench = Bench(elastic(total=1, accelerator=1), nodes=1, devices=1)
    bench.world.ask(SubmitJob(spec=JobSpec(name="other", roles=[elastic(total=1, accelerator=1)])))
    bench.world.run(5)
    assert bench.world.job("other").is_waiting
    suspend(bench)
    bench.world.until_stage("other", Stage.RUNNING)
    resume(bench)
    bench.world.run(5)
    assert bench.job.is_waiting
    assert bench.job.reason.startswith("waits: ")
    suspend(bench, "other")
    bench.running()


def test_a_waiting_job_that_is_suspended_is_not_placed() -> None:
    bench = Bench(elastic(total=1, accelerator=1), nodes=1, devices=1)
    bench.world.ask(SubmitJob(spec=JobSpec(name="other", roles=[elastic(total=1, accelerator=1)])))
    suspend(bench, "other")
    suspend(bench, "job")
    bench.world.run(60)
    assert bench.world.job("other").is_waiting
    resume(bench, "other")
    bench.world.until_stage("other", Stage.RUNNING)


def test_all_jobs_at_once() -> None:
    bench = Bench(simple(), nodes=1)
    bench.world.ask(SubmitJob(spec=JobSpec(name="other", roles=[simple()])))
    bench.world.until_stage("other", Stage.RUNNING)
    suspend(bench, job="")
    bench.world.run(5)
    assert [bench.world.job(name).suspended for name in ("job", "other")] == [REASON, REASON]
    resume(bench, job="")
    bench.running()
    bench.world.until_stage("other", Stage.RUNNING)


def test_the_master_remembers_it() -> None:
    bench = Bench(simple(), nodes=1)
    suspend(bench)
    bench.world.restart_master()
    bench.world.run(60)
    assert (bench.job.suspended, bench.job.is_waiting) == (REASON, True)
    resume(bench)
    bench.running()
    assert in_use(bench.job) == []


def test_a_node_that_is_lost_or_comes_while_a_job_is_suspended_changes_nothing() -> None:
    bench = Bench(elastic(total=1, accelerator=1), nodes=2, devices=1)
    bench.agent("n1").delays = Delays(stop=1000)
    suspend(bench)
    bench.world.kill_agent("n1")
    bench.world.run(60)
    assert (status(bench).num_leaving, bench.job.is_waiting, in_use(bench.job)) == (0, True, [])
    resume(bench)
    bench.running()
    assert bench.worker("e").node == "n2"


def test_it_can_be_stopped_and_neither_resumed_nor_suspended_after_its_end() -> None:
    bench = Bench(simple(), nodes=1)
    suspend(bench)
    bench.world.ask(StopJob(job="job"))
    bench.world.until_stage("job", Stage.STOPPED)
    assert bench.worker("s").state is not WorkerState.RUNNING
    for request in (SuspendJob(job="job"), ResumeJob(job="job")):
        assert bench.world.get(Refused, request).code == "ended"
    assert bench.world.get(Refused, SuspendJob(job="jop")).code == "not-found"
    assert bench.world.get(Done, SuspendJob(job="")).note == "suspended: no job."


def test_a_second_time_changes_nothing() -> None:
    bench = Bench(simple(), nodes=1)
    suspend(bench)
    suspend(bench, reason="another")
    assert bench.job.suspended == REASON
    resume(bench)
    resume(bench)
    bench.world.run(10)
    bench.running()
    assert set(bench.incarnations().values()) == {1}


def test_who_joins_a_suspended_job_resumes_it() -> None:
    """A batch script that SLURM starts again says the same command."""
    bench = Bench(simple(), nodes=1)
    spec = JobSpec(name="job", roles=[simple()])
    suspend(bench)
    assert "`unified resume job-1`" in bench.world.get(Refused, SubmitJob(spec=spec)).reason
    assert bench.world.get(Accepted, SubmitJob(spec=spec, joins=True)).job_id == "job-1"
    assert bench.job.suspended is None
    bench.world.run(10)
    bench.running()


def test_no_group_is_given_up_while_nothing_is_meant_to_run() -> None:
    labels = [{"rack": rack} for rack in "aabb"]
    role = elastic(total=2, accelerator=1, failover_label="rack", failover_timeout_s=30.0)
    bench = Bench(role, nodes=4, devices=1, labels=labels)
    bench.world.kill_agent(bench.worker("e").node)
    suspend(bench)
    bench.world.run(120)
    assert bench.job.excluded == []
    resume(bench)
    bench.world.run(10)
    bench.running()


def test_the_log_says_who_resumed_a_job_and_who_put_a_node_back() -> None:
    bench = Bench(simple("s", 1))
    suspend(bench)
    bench.world.get(Done, ResumeJob(job="job", reason="asked by ann"))
    bench.world.get(Done, DrainNode(node="n1", reason="a fan"))
    bench.world.get(Done, DrainNode(node="n1", is_over=True, reason="asked by ann"))
    reasons = [event.reason for _, event in bench.world.core.cluster.recent_events]
    assert "resumed, asked by ann: it waits for room" in reasons
    assert "it is in service again: asked by ann" in reasons
