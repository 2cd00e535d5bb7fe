"""Queues that wait for one another in a cycle are named while the cycle stands, and nothing else is."""

import pytest

from tests.support.master import CRASH, Bench, simple
from unified.protocol.client_master import Explain, GetJob, JobList, JobStatus, ListJobs, Story
from unified.protocol.records import Progress, QueueUse, WorkerLoad
from unified_master.core.health.hangs import QUEUES_S, queue_cycle


def thread(name: str, *uses: str) -> list[QueueUse]:
    """Uses of a thread, in words such as `puts x` and `waits gets y`."""
    found = [use.split() for use in uses]
    return [QueueUse(name, words[-2], words[-1], words[0] == "waits") for words in found]  # type: ignore[arg-type]


A = thread("main", "puts y", "waits puts x")
B = thread("main", "gets x", "waits gets y")
CYCLE = "worker a (thread main) puts to full queue 'x' -> worker b (thread main) gets from empty queue 'y' -> the first"


def test_two_that_wait_for_each_other() -> None:
    assert queue_cycle({"a": A, "b": B}) == CYCLE
    assert queue_cycle({"b": B, "a": A}) == CYCLE, "the order of the reports changes nothing"


def test_a_cycle_of_three() -> None:
    reports = {
        "a": thread("main", "gets z", "waits puts x"),
        "b": thread("main", "gets x", "waits puts y"),
        "c": thread("reader", "gets y", "waits puts z"),
    }
    assert queue_cycle(reports) == (
        "worker a (thread main) puts to full queue 'x' -> worker b (thread main) puts to full queue 'y' -> "
        "worker c (thread reader) puts to full queue 'z' -> the first"
    )


def test_a_thread_that_fills_what_it_alone_empties() -> None:
    reports = {"a": thread("main", "gets x", "waits puts x")}
    assert queue_cycle(reports) == "worker a (thread main) puts to full queue 'x' -> the first"


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"c": thread("", "gets x")}, id="another worker empties x"),
        pytest.param({"c": thread("", "puts y")}, id="another worker fills y"),
        pytest.param({"b": B + thread("", "gets x")}, id="another thread empties x"),
        pytest.param({"a": A + thread("", "puts y")}, id="a feeder waits while the main thread computes"),
        pytest.param({"c": thread("main", "gets x", "waits gets z")}, id="another waits where nobody is known"),
        pytest.param(
            {"c": thread("main", "gets x", "waits gets z"), "d": thread("", "puts z")},
            id="another waits for a free one",
        ),
    ],
)
def test_a_thread_that_may_go_on_ends_it(more: dict[str, list[QueueUse]]) -> None:
    assert queue_cycle({"a": A, "b": B, **more}) == ""


def test_others_that_wait_for_a_cycle_change_nothing() -> None:
    behind = {"c": thread("main", "puts y", "waits puts x"), "d": thread("main", "waits gets z", "gets x")}
    assert queue_cycle({"a": A, "b": B, **behind, "e": thread("main", "puts z", "waits puts x")}) == CYCLE


def test_waits_without_a_cycle() -> None:
    assert queue_cycle({}) == ""
    assert queue_cycle({"a": thread("main", "waits puts x")}) == "", "nobody is known to empty it"
    assert queue_cycle({"a": A}) == ""
    assert queue_cycle({"a": A, "b": thread("", "gets x", "gets y")}) == ""


def test_threads_of_one_name_count_as_one_that_goes_on_if_any_does() -> None:
    assert queue_cycle({"a": A, "b": B + thread("main", "waits gets z")}) == ""


# In a job


def uses(bench: Bench, role: str, queues: list[QueueUse], step: int = 1) -> None:
    worker = bench.worker(role)
    bench.world.say(worker.node, bench.agent().report_progress("job-1", worker.name, step, queues=queues))


def events(bench: Bench) -> dict[str, str]:
    return {
        each.event: each.reason for each in bench.world.get(Story, Explain(job="job")).events if "queue" in each.event
    }


def named(bench: Bench) -> str:
    return CYCLE.replace("worker a", f"worker {bench.worker('a').name}").replace(
        "worker b", f"worker {bench.worker('b').name}"
    )


@pytest.fixture
def bench() -> Bench:
    return Bench(simple("a", restart_alone=True), simple("b", restart_alone=True))


def reasons(bench: Bench) -> set[str]:
    line = bench.world.get(JobList, ListJobs()).jobs[0]
    return {bench.world.get(JobStatus, GetJob(job="job")).reason, line.reason}


def test_a_job_says_that_it_has_one_until_it_has_none(bench: Bench) -> None:
    uses(bench, "a", A)
    bench.world.run(3 * QUEUES_S)
    assert events(bench) == {}
    uses(bench, "b", B)
    bench.world.run(QUEUES_S + 1)
    assert events(bench) == {"queue-cycle": f"queues wait for one another: {named(bench)}"}
    assert reasons(bench) == {f"queues wait for one another: {named(bench)}"}
    uses(bench, "b", thread("", "gets x", "gets y"))
    bench.world.run(QUEUES_S + 1)
    assert events(bench)["queue-cycle-over"] == "the queues go on"
    assert reasons(bench) == {"the queues go on"}
    assert all(timer[0] != "queues" for timer in bench.world.core.cluster.timers)


def test_it_is_named_once(bench: Bench) -> None:
    uses(bench, "a", A)
    uses(bench, "b", B)
    bench.world.run(10 * QUEUES_S)
    uses(bench, "a", A, step=2)
    bench.world.run(10 * QUEUES_S)
    story = bench.world.get(Story, Explain(job="job")).events
    assert [each.event for each in story if "queue" in each.event] == ["queue-cycle"]


def test_a_master_that_restarts_finds_it_again(bench: Bench) -> None:
    uses(bench, "a", A)
    uses(bench, "b", B)
    bench.world.run(QUEUES_S + 1)
    bench.world.restart_master()
    bench.world.run(30)
    assert bench.job.queue_cycle == named(bench)
    uses(bench, "b", thread("", "gets x", "gets y"))
    bench.world.run(QUEUES_S + 1)
    assert bench.job.queue_cycle == ""


def test_it_is_over_with_an_incarnation_of_it(bench: Bench) -> None:
    uses(bench, "a", A)
    uses(bench, "b", B)
    bench.world.run(QUEUES_S + 1)
    bench.restart("b", 0, CRASH)
    bench.world.run(QUEUES_S + 1)
    assert bench.job.queue_cycle == ""
    assert set(events(bench)) == {"queue-cycle", "queue-cycle-over"}


def test_load_is_shown_and_is_no_progress() -> None:
    bench = Bench(simple("a", hang_timeout_s=60, max_restart=0))
    uses(bench, "a", [])
    bench.world.run(50)
    worker, load = bench.worker("a"), WorkerLoad(memory_mb=120.0, cpu=0.8)
    version = bench.world.core.cluster.changes.version
    bench.world.say(worker.node, bench.agent().report_progress("job-1", worker.name, 1, load=load))
    bench.world.run(1)
    assert bench.world.core.cluster.changes.version > version
    assert bench.world.get(JobStatus, GetJob(job="job")).workers[0].progress == Progress(step=1, load=load)
    bench.world.run(29)
    assert bench.limit() == "max_restart"


def test_a_wait_is_no_progress() -> None:
    bench = Bench(simple("a", hang_timeout_s=60, max_restart=0))
    uses(bench, "a", [])
    bench.world.run(50)
    uses(bench, "a", thread("main", "waits puts x"))
    bench.world.run(30)
    assert bench.limit() == "max_restart"
    assert bench.job.end is not None
    assert bench.job.end.failure.category == "hang"
    worker = bench.worker("a")
    assert worker.progress == Progress(step=1, queues=thread("main", "waits puts x"))
