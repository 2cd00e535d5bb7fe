"""Timeline of a job in Chrome's trace-event format, which Perfetto opens. Pure.

In terms of the format, the job and its nodes are processes, and lanes are threads. The slices of a lane must nest, so
overlapping calls get lanes of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from unified.protocol.client_master import JobStatus
from unified.protocol.records import CallSpan, EventRecord, WorkerReport

JOB = "job"
STAGES = {
    "job-submitted": "waiting",
    "job-requeued": "waiting",
    "job-suspended": "waiting",
    "job-placed": "starting",
    "job-restarts": "restarting",
    "job-running": "running",
    "job-stops": "stopping",
}
"""Stages of a job by the events that begin them."""
ROUND_ENDS = ("round-broken", "worker-failed", "worker-restarts-along", "role-restarts", "workers-move")
"""Events of a role that end its round."""
WAITS = ("job-requeued", "job-suspended")
FAILURES = ("worker-failed", "hang-suspected", "hang-diagnosed", "node-lost", "node-excluded", "job-failed")
_NUMBER = re.compile(r"\d+")


class _OpenSlice(NamedTuple):
    name: str
    began_at: float
    process: str
    lane: str


class Timeline:
    """Trace of one job. Slices that are still open end at `now`."""

    def __init__(self, status: JobStatus, now: float) -> None:
        self._status = status
        self._begin, self._end = status.submitted_at, status.ended_at or max(now, status.submitted_at)
        self._events: list[dict[str, Any]] = []
        self._lanes: dict[tuple[str, str], int] = {}
        self._processes: dict[str, int] = {}
        self._nodes: dict[tuple[str, int], str] = {}
        times = status.times.at(self._end) if status.times is not None else {}
        job = _OpenSlice(status.job_id, self._begin, JOB, "stages")
        self._slice(job, self._end, stage=status.stage, seconds=times)

    def add_events(self, events: Sequence[EventRecord]) -> None:
        """Add events: stages, rounds and incarnations as slices, and every event as an instant."""
        stage = _OpenSlice("waiting", self._begin, JOB, "stages")
        rounds: dict[str, _OpenSlice] = {}
        incarnations: dict[str, _OpenSlice] = {}
        for event in events:
            at, word = event.at, event.event
            following = STAGES.get(word, stage.name)
            if following != stage.name:
                self._slice(stage, at)
                stage = stage._replace(name=following, began_at=at)
            if word in STAGES and following not in ("starting", "running"):
                self._close(rounds, list(rounds), at, word)
            if word in ROUND_ENDS or word == "round-sealed":
                self._close(rounds, [event.role], at, word)
            if word in (*WAITS, "worker-failed", "worker-exited", "worker-starts"):
                self._close(incarnations, list(incarnations) if word in WAITS else [event.worker], at, event.reason)
            if word == "round-sealed":
                name = f"round {_number(event.reason)}"
                rounds[event.role] = _OpenSlice(name, at, JOB, f"rounds of {event.role}")
            elif word == "worker-starts":
                number = _number(event.reason)
                self._nodes[event.worker, number] = event.node
                incarnations[event.worker] = _OpenSlice(f"incarnation {number}", at, f"node {event.node}", event.worker)
            args = {"reason": event.reason, "role": event.role, "worker": event.worker, "node": event.node}
            lane = "failures" if word in FAILURES else "checkpoints" if "checkpoint" in word else "decisions"
            self._put("i", word, at, JOB, lane, s="t", args=args)
            if lane == "failures" and event.worker and event.node:
                self._put("i", word, at, f"node {event.node}", event.worker, s="t", args=args)
        self._slice(stage, self._end)
        for left in (rounds, incarnations):
            self._close(left, list(left), self._end, "")

    def add_series(self, worker: str, reports: Iterable[WorkerReport]) -> None:
        """Add a worker's reports: numbers as counters, and the saves that it began as instants."""
        saved: object = None
        for report in reports:
            for name, value in {"step": report.step, **report.metrics}.items():
                if isinstance(value, int | float):
                    self._put("C", f"{worker} {name}", report.at, JOB, "reported", args={name: value})
            if (step := report.metrics.get("save_step")) is not None and step != saved:
                saved = step
                self._put("i", f"save of step {step}", report.at, JOB, "checkpoints", s="t", args={"worker": worker})

    def add_calls(self, worker: str, incarnation: int, spans: Sequence[CallSpan]) -> None:
        """Add spans of calls on their worker's node, with arrows from caller to callee. Call it after `add_events`."""
        process = f"node {self._nodes.get((worker, incarnation), '')}"
        ends: dict[str, list[list[float]]] = {"caller": [], "callee": []}
        for span in sorted(spans, key=lambda span: (span.at, -span.seconds)):
            number = _lane(ends[span.kind], span.at, span.at + span.seconds)
            word, arrow = ("calls", "s") if span.kind == "caller" else ("handles", "f")
            lane = f"{worker} {word}" + (f" {number + 1}" if number else "")
            args = {"peer": span.peer, "trace": span.trace, "error": span.error, "queued_s": span.queued_s}
            self._slice(_OpenSlice(span.method, span.at, process, lane), span.at + span.seconds, **args)
            self._put(arrow, "call", span.at, process, lane, id=span.call, cat="call", bp="e")

    def trace(self) -> dict[str, Any]:
        """Return the trace, to be written as JSON. Times are microseconds since the submission."""
        named = [("process_name", pid, 0, name) for name, pid in self._processes.items()]
        named += [("thread_name", self._processes[of], tid, name) for (of, name), tid in self._lanes.items()]
        names = [
            {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}} for kind, pid, tid, name in named
        ]
        about = {"job": self._status.job_id, "submitted_at": self._begin}
        return {"traceEvents": [*names, *self._events], "displayTimeUnit": "ms", "otherData": about}

    def _close(self, slices: dict[str, _OpenSlice], keys: Iterable[str], at: float, why: str) -> None:
        for key in keys:
            if (found := slices.pop(key, None)) is not None:
                self._slice(found, at, ended=why)

    def _slice(self, begun: _OpenSlice, ended_at: float, **args: object) -> None:
        name, began_at, process, lane = begun
        # Whole microseconds, so that a slice ends where the next one begins.
        duration = max(0, self._at_us(ended_at) - self._at_us(began_at))
        self._put("X", name, began_at, process, lane, dur=duration, args=args)

    def _put(self, ph: str, name: str, at: float, process: str, lane: str, **more: Any) -> None:
        pid = self._processes.setdefault(process, len(self._processes) + 1)
        tid = self._lanes.setdefault((process, lane), len(self._lanes) + 1)
        if "args" in more:
            more["args"] = {key: value for key, value in more["args"].items() if value not in ("", 0.0) or ph == "C"}
        self._events.append({"ph": ph, "name": name, "ts": self._at_us(at), "pid": pid, "tid": tid, **more})

    def _at_us(self, at: float) -> int:
        return round((at - self._begin) * 1e6)


def _lane(ends: list[list[float]], begin: float, end: float) -> int:
    """Return the first lane in which a slice lies after all others or within one; `ends`: open slices by lane."""
    for number, lane in enumerate(ends):
        while lane and lane[-1] <= begin:
            lane.pop()
        if not lane or end <= lane[-1]:
            lane.append(end)
            return number
    ends.append([end])
    return len(ends) - 1


def _number(reason: str) -> int:
    found = _NUMBER.search(reason)
    return int(found[0]) if found else 0
