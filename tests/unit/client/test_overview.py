"""What a person is told at a glance."""

from typing import Any

import msgspec
import pytest

from tests.support.fake_master import RESOURCES, worker_status
from unified.client.mirror import ClusterMirror
from unified.client.views.overview import Attention, Totals, attention, totals
from unified.protocol.client_master import BudgetUse, Changes, EndReport, JobStatus, NodeStatus
from unified.protocol.records import EventRecord, Failure, NodeState, Progress, Stage, TimeSpent

NOW = 10_000.0


def node(name: str, **fields: Any) -> NodeStatus:
    free = msgspec.structs.replace(RESOURCES, devices=[])
    place = {"hostname": name, "address": "10.0.0.1", "resources": RESOURCES, "free": free}
    return NodeStatus(**{"node": name, "state": NodeState.ALIVE, **place, **fields})


def job(**fields: Any) -> JobStatus:
    return JobStatus(**{"job_id": "gpt-1", "name": "gpt", "stage": Stage.RUNNING, "submitted_at": NOW - 5, **fields})


def mirror(*jobs: JobStatus, nodes: list[NodeStatus] | None = None) -> ClusterMirror:
    made = ClusterMirror()
    made.at = NOW
    made.jobs = {each.job_id: each for each in jobs}
    made.nodes = {each.node: each for each in nodes or []}
    return made


def test_totals() -> None:
    lost = node("c", state=NodeState.LOST)
    made = mirror(
        job(), job(job_id="b-2", stage=Stage.INIT, suspended="why"), nodes=[node("a"), node("b", drained="x"), lost]
    )
    made.nodes["a"] = msgspec.structs.replace(made.nodes["a"], free=RESOURCES)
    assert totals(made) == Totals({"ALIVE": 1, "DRAINED": 1, "LOST": 1}, 2, 1, {"RUNNING": 1, "SUSPENDED": 1})
    stalled = job(times=TimeSpent(phase="productive", since=NOW - 31, stalls_at=NOW - 1))
    assert totals(mirror(stalled)).jobs == {"STALLED": 1}
    assert totals(mirror()) == Totals({}, 0, 0, {})


def failed(ended_at: float, **fields: Any) -> JobStatus:
    end = EndReport(worker="t-0", incarnation=1, node="a", failure=Failure(summary="ValueError: no\nmore"))
    return job(**{"stage": Stage.STOPPED, "exit_code": 1, "ended_at": ended_at, "end": end, **fields})


MATTERS: list[tuple[JobStatus, list[str]]] = [
    (job(), []),
    (job(stage=Stage.INIT, reason="waits: no room"), []),
    (
        job(stage=Stage.INIT, reason="waits: no room", submitted_at=NOW - 700),
        ["waiting for 11 min 40 s: waits: no room"],
    ),
    (job(stage=Stage.INIT, suspended="for you", submitted_at=NOW - 700), []),
    (job(stage=Stage.INIT, num_restarts=1, reason="t-0 failed"), ["restarting: t-0 failed"]),
    (failed(NOW - 60), ["failed 1 min 0 s ago: exit code 1: t-0 on a: ValueError: no"]),
    (failed(NOW - 60, end=None, reason="no node\nat all"), ["failed 1 min 0 s ago: exit code 1: no node"]),
    (failed(NOW - 25 * 3600), []),
    (failed(NOW - 60, exit_code=130), []),
    (failed(NOW - 60, exit_code=0, end=None), []),
    (
        job(budgets=[BudgetUse(limit="max_restart", subject="t-0", used=8, allowed=10)]),
        ["few restarts left: max_restart=10: 8 failures of t-0"],
    ),
    (job(budgets=[BudgetUse(limit="max_restart", subject="t-0", used=7, allowed=10)]), []),
    (job(times=TimeSpent(phase="productive", since=NOW - 31, stalls_at=NOW - 1)), ["stalled for 31 s: no step"]),
    (job(times=TimeSpent(phase="stalled", since=NOW - 70)), ["stalled for 1 min 10 s: no step"]),
    (job(times=TimeSpent(phase="productive", since=NOW - 500, stalls_at=NOW + 5)), []),
]


@pytest.mark.parametrize(("given", "expected"), MATTERS)
def test_what_of_a_job_needs_attention(given: JobStatus, expected: list[str]) -> None:
    found = attention(mirror(given))
    assert [each.sentence(NOW) for each in found] == expected
    assert {each.subject for each in found} <= {"gpt-1"}


def event(word: str, at: float = NOW, **fields: Any) -> EventRecord:
    return EventRecord(**{"at": at, "event": word, "reason": f"{word}\nmore", "job": "gpt-1", **fields})


@pytest.mark.parametrize("word", ["hang-over", "role-restarts", "job-stops"])
def test_a_job_may_hang_until_it_goes_on_or_begins_anew(word: str) -> None:
    made = mirror(job(times=TimeSpent(phase="productive", since=NOW - 500, stalls_at=NOW - 90)))
    made.events += [event("hang-suspected"), event("worker-finished"), event(word, job="other-2")]
    assert attention(made) == [Attention("may hang", "gpt-1", "hang-suspected", True)]
    made.events.append(event(word))
    assert [each.what for each in attention(made)] == ["stalled"]


def test_a_job_whose_queues_wait_for_one_another_may_hang() -> None:
    made = mirror(job())
    made.events.append(event("queue-cycle"))
    assert attention(made) == [Attention("may hang", "gpt-1", "queue-cycle", True)]
    made.events.append(event("queue-cycle-over"))
    assert attention(made) == []


def test_a_checkpoint_is_late_after_three_usual_intervals() -> None:
    made = mirror(job(), job(job_id="new-2"))
    made.events += [event("checkpoint-complete", NOW - ago) for ago in (91, 61, 41, 31)]
    made.events += [event("checkpoint-complete", NOW - ago, job="new-2") for ago in (900, 890)]
    assert attention(made) == []
    made.at += 30
    (found,) = attention(made)
    assert found.sentence(made.at) == "checkpoint late for 1 min 1 s: the usual interval is 20 s"


def test_the_urgent_comes_first() -> None:
    slow, lost = node("a", check="slow: matmul 3.1"), node("b", state=NodeState.LOST, reason="nothing was heard")
    draining = node("c", drained="by you\nnow", num_workers=2)
    made = mirror(failed(NOW - 60, job_id="b-2"), failed(NOW - 9, job_id="b-3"), job(), nodes=[slow, lost, draining])
    saving = worker_status(progress=Progress(step=9, metrics={"save_step": 7, "save_wait_s": 90.0}))
    made.workers["gpt-1"] = {saving.name: saving}
    reason = "exit code 1: t-0 on a: ValueError: no"
    assert attention(made) == [
        Attention("node lost", "b", "nothing was heard", True, is_node=True),
        Attention("save waits", "gpt-1", f"{saving.name}: the save of step 7 waits for its store for 90 s", True),
        Attention("failed", "b-3", reason, True, NOW - 9),
        Attention("failed", "b-2", reason, True, NOW - 60),
        Attention("node check", "a", "slow: matmul 3.1", False, is_node=True),
        Attention("draining", "c", "2 workers left: by you", False, is_node=True),
    ]


def test_a_master_that_can_decide_nothing_between_two_parts_of_an_answer_leaves_the_state_incomplete() -> None:
    made = ClusterMirror()
    made.apply(Changes(version=5, at=NOW, is_whole=True, jobs=[job()], is_last=False))
    made.apply(Changes(version=-1, at=NOW, problem="its disk is full"))
    assert (made.version, made.is_complete, made.problem) == (5, False, "its disk is full")
    made.apply(Changes(version=6, at=NOW))
    made.apply(Changes(version=-1, at=NOW, problem="its disk is full"))
    assert (made.version, made.is_complete) == (6, True)
