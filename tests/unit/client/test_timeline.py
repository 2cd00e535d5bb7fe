"""The timeline of a job: its lanes, and that slices nest in each."""

import random
from typing import Any, Literal

from unified.client.views.timeline import Timeline
from unified.protocol.client_master import JobStatus
from unified.protocol.records import CallSpan, EventRecord, Stage, TimeSpent, WorkerReport

TOLD: list[tuple[float, str, str, dict[str, Any]]] = [
    (0.0, "job-submitted", "submitted: t=1", {}),
    (1.0, "job-placed", "placed on n1 (1)", {}),
    (1.0, "worker-starts", "incarnation 0 starts on n1", {"worker": "t-0", "role": "t", "node": "n1"}),
    (2.0, "job-running", "all workers run", {}),
    (2.0, "round-sealed", "round 1 of role t: 1 rank on 1 node", {"role": "t"}),
    (4.0, "checkpoint-complete", "step 3 of series 'x' is at /c", {"worker": "t-0"}),
    (5.0, "worker-failed", "incarnation 0 on n1: killed by SIGKILL", {"worker": "t-0", "role": "t", "node": "n1"}),
    (5.0, "role-restarts", "t restarts", {"role": "t"}),
    (5.0, "worker-starts", "incarnation 1 starts on n2", {"worker": "t-0", "role": "t", "node": "n2"}),
    (6.0, "round-sealed", "round 2 of role t: 1 rank on 1 node", {"role": "t"}),
    (8.0, "job-stops", "done", {}),
    (8.5, "worker-exited", "it ended without a failure", {"worker": "t-0", "role": "t", "node": "n2"}),
    (9.0, "job-stopped", "exit code 0", {}),
]
AT = 1.7e9


def told(events: list[tuple[float, str, str, dict[str, Any]]]) -> list[EventRecord]:
    return [EventRecord(at=AT + at, event=event, reason=why, **more) for at, event, why, more in events]


def status(**more: Any) -> JobStatus:
    fields: dict[str, Any] = {"job_id": "j-1", "name": "j", "stage": Stage.STOPPED, "submitted_at": AT}
    return JobStatus(**(fields | {"ended_at": AT + 9} | more))


def lanes(trace: dict[str, Any], ph: str = "X") -> dict[str, list[tuple[str, float, float]]]:
    """Return name, begin and end in seconds of each slice, by process and lane."""
    events = trace["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found: dict[str, list[tuple[str, float, float]]] = {}
    for event in events:
        if event["ph"] == ph:
            begin, end = event["ts"] / 1e6, (event["ts"] + event.get("dur", 0)) / 1e6
            lane = f"{processes[event['pid']]}/{threads[event['tid']]}"
            found.setdefault(lane, []).append((event["name"], begin, end))
    return found


def check_nesting(trace: dict[str, Any]) -> None:
    """In each lane, two slices are apart, or one is within the other."""
    for lane, slices in lanes(trace).items():
        for name, begin, end in slices:
            for other, its_begin, its_end in slices:
                is_apart = end <= its_begin or its_end <= begin
                is_within = (begin >= its_begin and end <= its_end) or (its_begin >= begin and its_end <= end)
                assert is_apart or is_within, f"{lane}: {name} [{begin}, {end}], {other} [{its_begin}, {its_end}]"


def test_stages_rounds_incarnations_and_failures_are_there() -> None:
    times = TimeSpent(seconds={"productive": 9.0}, since=AT + 9)
    made = Timeline(status(times=times), AT + 100)
    made.add_events(told(TOLD))
    trace = made.trace()
    check_nesting(trace)
    assert lanes(trace) == {
        "job/stages": [
            ("j-1", 0, 9),
            ("waiting", 0, 1),
            ("starting", 1, 2),
            ("running", 2, 8),
            ("stopping", 8, 9),
        ],
        "job/rounds of t": [("round 1", 2, 5), ("round 2", 6, 8)],
        "node n1/t-0": [("incarnation 0", 1, 5)],
        "node n2/t-0": [("incarnation 1", 5, 8.5)],
    }
    instants = lanes(trace, "i")
    assert instants["job/failures"] == [("worker-failed", 5, 5)]
    assert instants["job/checkpoints"] == [("checkpoint-complete", 4, 4)]
    assert instants["node n1/t-0"] == [("worker-failed", 5, 5)]
    job = next(event for event in trace["traceEvents"] if event["name"] == "j-1")
    assert job["args"]["seconds"] == {"productive": 9.0}


def test_what_has_not_ended_ends_now_though_the_first_events_are_forgotten() -> None:
    made = Timeline(status(stage=Stage.RUNNING, ended_at=None), AT + 7)
    made.add_events(told(TOLD[4:10]))
    found = lanes(made.trace())
    assert found["job/stages"] == [("j-1", 0, 7), ("waiting", 0, 7)]
    assert found["job/rounds of t"][-1] == ("round 2", 6, 7)
    assert found["node n2/t-0"] == [("incarnation 1", 5, 7)]


def test_calls_that_overlap_lie_in_lanes_of_their_own() -> None:
    rng = random.Random(5)
    kinds: tuple[Literal["caller", "callee"], ...] = ("caller", "callee")
    spans = [
        CallSpan(
            kind=kind, at=AT + rng.uniform(0, 5), seconds=rng.uniform(0, 1), method="m", peer="b", call="c", trace="c"
        )
        for kind in kinds
        for _ in range(60)
    ]
    made = Timeline(status(), AT + 9)
    made.add_events(told(TOLD))
    made.add_calls("t-0", 0, spans)
    trace = made.trace()
    check_nesting(trace)
    calls = {lane: slices for lane, slices in lanes(trace).items() if "calls" in lane or "handles" in lane}
    assert sum(map(len, calls.values())) == 120
    assert {"node n1/t-0 calls", "node n1/t-0 calls 2", "node n1/t-0 handles"} <= calls.keys()


def test_reported_numbers_are_counters_and_a_save_is_an_instant() -> None:
    made = Timeline(status(), AT + 9)
    points: list[dict[str, Any]] = [{"loss": 0.5}, {"save_step": 2, "save_wait_s": 1.0}, {"save_step": 2, "note": "x"}]
    made.add_series("t-0", [WorkerReport(at=AT + n, step=n, total=9, metrics=each) for n, each in enumerate(points)])
    trace = made.trace()
    counters = [(event["name"], *event["args"].values()) for event in trace["traceEvents"] if event["ph"] == "C"]
    assert counters[:3] == [("t-0 step", 0), ("t-0 loss", 0.5), ("t-0 step", 1)]
    assert lanes(trace, "i") == {"job/checkpoints": [("save of step 2", 1, 1)]}
