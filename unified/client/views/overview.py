"""The cluster at a glance: totals, and what needs the attention of a person, most urgent first. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from unified.client import report
from unified.client.mirror import ClusterMirror
from unified.protocol.client_master import JobStatus
from unified.protocol.records import SAVE_STEP, SAVE_WAIT_S, NodeState, Stage

WAITS_LONG_S = 600.0
"""Seconds for which a job may wait before a person is told."""
SAVE_WAITS_LONG_S = 60.0
SPENT_SHARE = 0.8
"""Used share of a limit from which on a person is told."""
RECENT_S = 24 * 3600.0
"""Seconds after its end for which a failed job is shown."""
LATE_INTERVALS = 3
"""Number of usual checkpoint intervals after which the next checkpoint is late."""
HANG_ENDS = ("hang-over", "role-restarts", "job-restarts", "job-requeued", "job-suspended", "job-stops")
FAILED = "failed"


class Totals(NamedTuple):
    """Counts of a cluster."""

    nodes: dict[str, int]
    """Nodes by state."""
    num_devices: int
    """Devices of the nodes that are alive."""
    num_free: int
    """Free devices of the nodes that are alive."""
    jobs: dict[str, int]
    """Jobs by stage, in the words of `stage_text`."""


class Attention(NamedTuple):
    """A matter that a person should look at."""

    what: str
    """Kind of the matter, in two words."""
    subject: str
    """Job or node."""
    text: str
    is_urgent: bool
    since: float | None = None
    """Time at which it began (seconds since 1970); None: it has no age."""
    is_node: bool = False

    def sentence(self, now: float) -> str:
        """Return kind, age and text in one line."""
        age = "" if self.since is None else report.duration_text(max(0.0, now - self.since))
        when = age and (f" {age} ago" if self.what == FAILED else f" for {age}")
        return f"{self.what}{when}: {self.text}"


def totals(mirror: ClusterMirror) -> Totals:
    alive = [node for node in mirror.nodes.values() if node.state is NodeState.ALIVE]
    return Totals(
        nodes=dict(Counter(report.node_state(node) for node in mirror.nodes.values())),
        num_devices=sum(len(node.resources.devices) for node in alive),
        num_free=sum(len(node.free.devices) for node in alive),
        jobs=dict(Counter(report.stage_text(job, mirror.at) for job in mirror.jobs.values())),
    )


def attention(mirror: ClusterMirror) -> list[Attention]:
    """Return what needs attention, urgent matters first. Failed jobs follow what goes on now, the newest first."""
    found: list[Attention] = []
    for node in mirror.nodes.values():
        if node.state is NodeState.LOST:
            reason = report.first_line(node.reason) or "its agent does not answer"
            found.append(Attention("node lost", node.node, reason, True, is_node=True))
        elif node.check and not node.check.startswith("ok"):
            found.append(Attention("node check", node.node, report.first_line(node.check), False, is_node=True))
        elif report.node_state(node) == report.DRAINING:
            text = f"{node.num_workers} workers left: {report.first_line(node.drained or '')}"
            found.append(Attention("draining", node.node, text, False, is_node=True))
    hangs, saves = _hangs(mirror), _saves(mirror)
    failed: list[JobStatus] = []
    for job in mirror.jobs.values():
        if job.stage is not Stage.STOPPED:
            found += _of_job(mirror, job, hangs.get(job.job_id), saves.get(job.job_id, []))
        elif report.is_failed(job) and mirror.at - (job.ended_at or 0.0) <= RECENT_S:
            failed.append(job)
    for job in sorted(failed, key=lambda job: job.ended_at or 0.0, reverse=True):
        reason = report.first_line(job.reason)
        if job.end is not None:
            reason = f"{job.end.worker} on {job.end.node or 'no node'}: {report.first_line(job.end.failure.summary)}"
        found.append(Attention(FAILED, job.job_id, f"exit code {job.exit_code}: {reason}", True, job.ended_at))
    return sorted(found, key=lambda each: not each.is_urgent)


def _of_job(mirror: ClusterMirror, job: JobStatus, hang: str | None, saves: Sequence[float]) -> list[Attention]:
    found: list[Attention] = []

    def add(what: str, text: str, is_urgent: bool, since: float | None = None) -> None:
        found.append(Attention(what, job.job_id, text, is_urgent, since))

    now, reason = mirror.at, report.first_line(job.reason) or "no reason is given"
    stage = report.stage_text(job, now)
    if hang is not None:
        add("may hang", hang, True)
    elif (since := report.stalled_since(job, now)) is not None:
        add("stalled", "no step", True, since)
    for worker in mirror.workers.get(job.job_id, {}).values():
        if worker.progress is None or SAVE_WAIT_S not in (metrics := worker.progress.metrics):
            continue
        waited_s = metrics[SAVE_WAIT_S]
        if isinstance(waited_s, int | float) and waited_s > SAVE_WAITS_LONG_S:
            step = metrics.get(SAVE_STEP)
            add("save waits", f"{worker.name}: the save of step {step} waits for its store for {waited_s:.0f} s", True)
    if stage == report.RESTARTING:
        add("restarting", reason, False)
    elif job.stage is Stage.INIT and stage != report.SUSPENDED and now - job.submitted_at > WAITS_LONG_S:
        add("waiting", reason, False, job.submitted_at)
    for use in job.budgets:
        if use.allowed and use.used >= SPENT_SHARE * use.allowed and use.limit != "per_node_max_failure":  # it moves
            add("few restarts left", report.budget_text(use), False)
    if job.stage is Stage.RUNNING and (usual := _usual_interval(saves)) and now - saves[-1] > LATE_INTERVALS * usual:
        add("checkpoint late", f"the usual interval is {report.duration_text(usual)}", False, saves[-1])
    return found


def _hangs(mirror: ClusterMirror) -> dict[str, str]:
    """Return why jobs may hang, by job."""
    found: dict[str, str] = {}
    for event in mirror.events:
        if event.event in ("hang-suspected", "hang-diagnosed", "queue-cycle"):
            found[event.job] = report.first_line(event.reason)
        elif event.event in (*HANG_ENDS, "queue-cycle-over"):
            found.pop(event.job, None)
    return found


def _saves(mirror: ClusterMirror) -> dict[str, list[float]]:
    """Return when checkpoints were complete, by job."""
    found: dict[str, list[float]] = {}
    for event in mirror.events:
        if event.event == "checkpoint-complete":
            found.setdefault(event.job, []).append(event.at)
    return found


def _usual_interval(times: Sequence[float]) -> float:
    """Return the usual seconds between checkpoints; 0.0: it is not known."""
    usual = median(later - earlier for earlier, later in pairwise(times)) if len(times) > 2 else 0.0
    return usual if usual > 1 else 0.0
