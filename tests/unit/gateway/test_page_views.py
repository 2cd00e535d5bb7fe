"""What the page is told: the whole state, changes, and nothing twice."""

import json
from typing import Any

from msgspec import structs

from tests.support.fake_master import worker_status
from tests.support.page import changes, job, node
from unified.client.mirror import ClusterMirror
from unified.protocol.client_master import Changes, RoleStatus
from unified.protocol.records import EventRecord, NodeState, Progress, Stage, WorkerState
from unified_gateway.page.views import ChangedParts, JobRows, JobView, View

STEPS = [Progress(step=10 + rank, total=100, metrics={"loss": 2.0 + rank}) for rank in range(3)]


class Viewed:
    """A mirror with both views of it."""

    def __init__(self) -> None:
        self.mirror = ClusterMirror()
        rows = JobRows(self.mirror)
        self.rows = rows
        self.views = [View(self.mirror, rows), JobView(self.mirror, rows, "gpt-1")]

    def take(self, told: Changes) -> list[bool]:
        self.mirror.apply(told)
        parts = ChangedParts(is_whole=told.is_whole)
        parts.add(told)
        self.rows.forget(parts)
        return [view.update(parts) for view in self.views]


def viewed(**fields: Any) -> Viewed:
    made = Viewed()
    workers = [worker_status(rank, node=f"n{rank}", progress=STEPS[rank]) for rank in range(2)]
    nodes = [node(f"n{number}") for number in range(3)]
    events = [EventRecord(at=1.0, event="x", reason="y", job=name, sequence=1) for name in ("gpt-1", "other")]
    first = {"jobs": [job(), job(job_id="other")], "workers": workers, "nodes": nodes, "events": events}
    made.take(changes(1, is_whole=True, **{**first, **fields}))
    return made


def read(message: bytes) -> tuple[str, dict[str, Any]]:
    event, data, *rest = message.decode().split("\n")
    assert rest == ["", ""]
    return event.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def test_the_cluster_is_told_without_workers_and_each_role_summed_up() -> None:
    event, body = read(viewed().views[0].since(None))
    assert event == "whole"
    assert (body["version"], body["at"]) == (1, 1.0)
    assert set(body) == {"version", "at", "attention", "jobs", "nodes", "gone_jobs", "gone_nodes", "events"}
    assert body["nodes"]["node"] == ["n0", "n1", "n2"]
    assert [event["job"] for event in body["events"]] == ["gpt-1", "other"]
    first, other = body["jobs"]
    assert "workers" not in first
    assert "annotations" not in first
    assert (first["job_id"], first["stage"], first["num_workers"]) == ("gpt-1", "RUNNING", 2)
    assert first["summary"] == {
        "trainer": {
            "states": {"RUNNING": 2},
            "round": 1,
            "step": {"slowest": 10, "median": 11, "fastest": 11},
            "total": 100,
            "metrics": {"loss": 2.0},
        }
    }
    assert other["summary"]["trainer"] == {
        "states": {"PENDING": 2}, "round": 1, "step": None, "total": None, "metrics": {}
    }  # fmt: skip


def test_a_job_is_told_with_its_workers_its_nodes_and_its_events() -> None:
    event, body = read(viewed().views[1].since(None))
    assert event == "whole"
    assert set(body) == {"version", "at", "job", "workers", "nodes", "gone_nodes", "events"}
    assert body["job"]["job_id"] == "gpt-1"
    assert body["workers"]["rank"] == [0, 1]
    assert "reason" not in body["workers"]
    assert body["nodes"]["node"] == ["n0", "n1"]
    assert [event["job"] for event in body["events"]] == ["gpt-1"]


def test_only_what_changed_is_told_and_only_to_those_whom_it_concerns() -> None:
    made = viewed()
    made.views[1].whole()
    assert made.take(changes(2, workers=[worker_status(1, node="n2", progress=STEPS[2])])) == [True, True]
    event, body = read(made.views[0].since(made.views[0].tick - 1))
    assert event == "changes"
    assert [row["job_id"] for row in body["jobs"]] == ["gpt-1"]
    assert body["jobs"][0]["summary"]["trainer"]["step"]["fastest"] == 12
    assert body["nodes"] == {}
    event, body = read(made.views[1].since(made.views[1].tick - 1))
    assert (event, body["workers"]["node"], body["nodes"]["node"]) == ("changes", ["n2"], ["n2"])
    assert made.take(changes(3, jobs=[job(job_id="other")])) == [True, False]
    assert made.take(changes(4)) == [False, False]
    assert made.take(changes(5, gone_nodes=["n0"])) == [True, True]
    assert made.take(changes(6, gone_jobs=["gpt-1"])) == [True, True]
    assert read(made.views[0].since(made.views[0].tick - 1))[1]["gone_jobs"] == ["gpt-1"]
    assert read(made.views[1].since(made.views[1].tick - 1))[1]["job"] is None


def test_what_needs_attention_is_told_when_it_changes_also_by_time_alone() -> None:
    made = viewed(jobs=[job(stage=Stage.INIT, submitted_at=1.0)])
    assert read(made.views[0].whole())[1]["attention"] == {"shown": [], "total": 0, "urgent": 0}
    assert made.take(structs.replace(changes(2), at=600.0)) == [False, False]
    assert made.take(structs.replace(changes(3), at=602.0)) == [True, False]
    told = read(made.views[0].since(1))[1]["attention"]
    (waiting,) = told.pop("shown")
    assert (waiting["what"], waiting["subject"], waiting["since"]) == ("waiting", "gpt-1", 1.0)
    assert told == {"total": 1, "urgent": 0}
    lost = [node(f"n{number}", state=NodeState.LOST) for number in range(30)]
    assert made.take(structs.replace(changes(4, nodes=lost), at=603.0))[0]
    told = read(made.views[0].since(2))[1]["attention"]
    assert ({each["what"] for each in told.pop("shown")}, told) == ({"node lost"}, {"total": 31, "urgent": 30})
    assert made.take(structs.replace(changes(5, nodes=lost[:1]), at=604.0))[0]
    assert read(made.views[0].since(3))[1]["attention"] is None


def test_a_viewer_that_missed_a_message_gets_the_whole_state() -> None:
    made = viewed()
    view = made.views[0]
    seen = view.tick
    made.take(changes(2, jobs=[job(Stage.STOPPING)]))
    made.take(changes(3, jobs=[job(Stage.STOPPED)]))
    event, body = read(view.since(seen))
    assert (event, body["version"], body["jobs"][0]["stage"]) == ("whole", 3, "STOPPED")
    assert view.since(view.tick) == b""


def test_each_message_is_encoded_once() -> None:
    made = viewed()
    view = made.views[0]
    assert view.since(None) is view.since(None)
    made.take(changes(2, jobs=[job(Stage.STOPPING)]))
    assert view.since(view.tick - 1) is view.since(view.tick - 1)


def test_after_a_new_beginning_of_the_master_all_is_told_anew() -> None:
    made = viewed()
    tick = made.views[1].tick
    assert made.take(changes(1, is_whole=True)) == [True, True]
    event, body = read(made.views[1].since(tick))
    assert (event, body["job"], body["workers"], body["nodes"]) == ("whole", None, {}, {})


def test_infinity_is_told_as_a_text_and_nan_as_none() -> None:
    worker = worker_status(0, progress=Progress(step=1, metrics={"loss": float("nan"), "lr": float("inf")}))
    roles = [RoleStatus(name="trainer", kind="simple", total=1, is_driver=True)]
    made = viewed(jobs=[job(roles=roles)], workers=[worker])
    row = read(made.views[0].whole())[1]["jobs"][0]
    assert row["summary"]["trainer"]["metrics"] == {"loss": None, "lr": "Infinity"}
    assert row["summary"]["trainer"]["states"] == {str(WorkerState.RUNNING): 1}
