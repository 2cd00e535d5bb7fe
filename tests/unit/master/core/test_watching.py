"""Watches of a job and of the cluster: when they are answered, and with what."""

import pytest

from tests.support.master import CRASH, Bench, simple
from unified.job.spec import JobSpec
from unified.protocol.client_master import Changes, MasterAnswer, Refused, StopJob, SubmitJob, WatchCluster
from unified_master.core.rounds import jobs


def bench() -> Bench:
    return Bench(simple("s", 2), nodes=2)


def now_at(made: Bench, job: str = "job") -> int:
    return made.world.get(Changes, WatchCluster(job=job)).version


def answer_after(made: Bench, number: int) -> tuple[float, MasterAnswer]:
    """Return the seconds until a request is answered, and the answer."""
    began = made.world.now
    made.world.until(lambda: made.world.answer(number) is not None, "the answer")
    answer = made.world.answer(number)
    assert answer is not None
    return made.world.now - began, answer


def report_step(made: Bench, step: int) -> None:
    worker = made.worker("s")
    made.world.say(worker.node, made.agent(worker.node).report_progress("job-1", worker.name, step))


def test_the_first_answer_is_whole() -> None:
    made = bench()
    changes = made.world.get(Changes, WatchCluster(wait_s=30))
    assert (changes.is_whole, changes.is_last, [job.job_id for job in changes.jobs]) == (True, True, ["job-1"])
    assert sorted(changes.nodes["node"]) == ["n1", "n2"]
    assert len(changes.workers["job-1"]["name"]) == 2
    assert "job-submitted" in [event.event for event in changes.events]


def test_of_a_worker_that_reports_only_that_one_is_told_when_the_changes_have_settled() -> None:
    made = bench()
    number = made.world.ask(WatchCluster(job="job", after_version=now_at(made), wait_s=30, settle_s=0.5))
    for step in range(5):
        report_step(made, step)
        made.world.run(0.05)
    waited, changes = answer_after(made, number)
    assert 0 <= waited <= 0.5
    assert isinstance(changes, Changes)
    assert (changes.nodes, changes.events) == ({}, [])
    assert changes.jobs[0].times is not None
    assert changes.jobs[0].times.phase == "productive", "a step says how the job spends its time"
    assert [progress.step for progress in changes.workers["job-1"]["progress"]] == [4]


def test_a_decision_about_the_job_is_told_at_once() -> None:
    made = bench()
    number = made.world.ask(WatchCluster(job="job", after_version=now_at(made), wait_s=30, settle_s=20))
    made.end("s", 1, CRASH)
    waited, changes = answer_after(made, number)
    assert waited < 1.0
    assert isinstance(changes, Changes)
    assert "killed by SIGKILL" in changes.jobs[0].reason


def test_who_watches_the_job_alone_does_not_hear_of_workers() -> None:
    made = bench()
    request = WatchCluster(job="job", after_version=now_at(made), wait_s=3, has_workers=False)
    number = made.world.ask(request)
    report_step(made, 7)
    waited, changes = answer_after(made, number)
    assert waited == pytest.approx(3.0)
    assert isinstance(changes, Changes)
    assert (changes.jobs, changes.workers) == ([], {})
    assert made.world.core.cluster.watches == {}


def test_without_news_the_answer_comes_in_time_and_is_empty() -> None:
    made = bench()
    number = made.world.ask(WatchCluster(job="job", after_version=now_at(made), wait_s=3))
    waited, changes = answer_after(made, number)
    assert waited == pytest.approx(3.0)
    assert isinstance(changes, Changes)
    assert (changes.jobs, changes.workers) == ([], {})


def test_after_a_restart_of_the_master_the_answer_is_whole() -> None:
    made = bench()
    version = now_at(made, "")
    made.world.restart_master()
    made.world.run(1.0)
    changes = made.world.get(Changes, WatchCluster(after_version=version, wait_s=30))
    assert changes.is_whole
    assert "master-restarted" in [event.event for event in changes.events]


def test_a_watch_of_a_job_that_is_forgotten_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench()
    made.world.request(StopJob(job="job", force=True))
    made.stopped()
    number = made.world.ask(WatchCluster(job="job-1", after_version=now_at(made), wait_s=100))
    monkeypatch.setattr(jobs, "MAX_ENDED", 0)
    made.world.request(SubmitJob(spec=JobSpec(name="later", roles=[simple("t")])))
    made.world.request(StopJob(job="later", force=True))
    _, answer = answer_after(made, number)
    assert isinstance(answer, Refused)
    assert answer.code == "not-found"
