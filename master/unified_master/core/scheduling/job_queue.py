"""The queue of jobs: first come first served, all of a job or nothing of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from unified.protocol.records import JOB_MOVES, Stage, WorkerState
from unified_master.core import incarnations, rendezvous
from unified_master.core.scheduling import waiting
from unified_master.core.scheduling.packing import Assignment, PlacementPlan
from unified_master.core.state import STORE, Cluster, JobRecord
from unified_master.core.step import MasterStep, count

MAX_LOOKED_AT = 20_000
"""Number of nodes, each counted once a job, after which a step places no further job."""
MAX_NAMED = 16
"""Nodes that a sentence lists by name."""


def waiting_jobs(cluster: Cluster) -> list[JobRecord]:
    """Return the jobs without a place, oldest first."""
    return sorted((job for job in cluster.jobs.values() if job.is_waiting), key=lambda job: job.sequence)


def schedule(step: MasterStep) -> None:
    """Place every waiting job that fits and is not behind one that could fit."""
    ahead: JobRecord | None = None
    num_looked_at = 0
    for job in waiting_jobs(step.cluster):
        if ahead is not None:
            _wait(step, job, behind(ahead))
            continue
        if step.cluster.leaving_of(job.job_id):
            _wait(step, job, "its former workers are still stopping")
        else:
            found = waiting.plan_for(step.cluster, job)
            if found.fits:
                launch(step, job, found.assignments)
                num_looked_at += len(step.cluster.nodes)
                if num_looked_at >= MAX_LOOKED_AT:  # others are to be heard before the next job is placed
                    step.cluster.timers.arm(("schedule",), step.now)
                    return
                continue
            _wait(step, job, found.reason)
        if waiting.could_ever_fit(step.cluster, job):
            ahead = job


def blocker(cluster: Cluster) -> JobRecord | None:
    """Return the waiting job that all later ones are behind."""
    return next((job for job in waiting_jobs(cluster) if waiting.could_ever_fit(cluster, job)), None)


def behind(job: JobRecord) -> str:
    return f"job {job.job_id} came first and waits for room"


def launch(step: MasterStep, job: JobRecord, assignments: Iterable[Assignment]) -> None:
    """Allocate every worker's place and begin an incarnation of it."""
    job.is_placed = True
    job.attempt = None
    for assignment in assignments:
        worker = rendezvous.store_of(job) if assignment.worker == STORE else job.workers[assignment.worker]
        incarnations.allocate(step, job, worker, step.cluster.nodes[assignment.node], assignment.allocation)
    placed = [worker for worker in job.workers.values() if worker.allocation is not None]
    counts = Counter(worker.node for worker in placed if worker.kind == "worker")
    control = "".join(f"; its store host on {worker.node}" for worker in placed if worker.kind == "store")
    step.decide("job-placed", f"placed on {_where(counts)}{control}{_sharing(job)}", job)
    for worker in list(job.workers.values()):
        if worker.allocation is not None and worker.kind == "worker":
            incarnations.begin(step, job, worker, "the job was placed")
    if any(worker.allocation is not None for worker in job.workers.values()):
        rendezvous.settle_store(step, job, "the job was placed")


def requeue(step: MasterStep, job: JobRecord, reason: str) -> None:
    """Give up every place of a job, so that it waits in the queue like any other."""
    if job.stage is not Stage.INIT:
        job.stage = JOB_MOVES.check(job.job_id, job.stage, Stage.INIT)
    job.is_placed = False
    job.attempt = None
    job.restart_at = None
    step.cluster.timers.cancel(("restart", job.job_id))
    for role in job.roles.values():
        role.suspect = role.pending = ""
        role.waits_until = role.change_due_at = None
    for worker in job.workers.values():
        if worker.state is not WorkerState.EXITED:
            worker.reason = "the job waits for room"
        incarnations.end(step, job, worker)
        incarnations.release(step, job, worker)
        worker.is_held = False
        worker.node_rank = -1
    step.wants_schedule = True
    step.decide("job-requeued", reason, job)


def requeue_unless(step: MasterStep, job: JobRecord, found: PlacementPlan) -> None:
    """Put a job back into the queue unless the plan for its restart fits."""
    if not found.fits:
        requeue(step, job, f"waits for room to restart: {found.reason}")


def _where(counts: Counter[str]) -> str:
    if not counts:
        return "no node: it has no workers"
    if len(counts) > MAX_NAMED:
        return f"{len(counts)} nodes ({counts.total()} workers)"
    return ", ".join(f"{node} ({number})" for node, number in sorted(counts.items()))


def _sharing(job: JobRecord) -> str:
    """Return which elastic roles share nodes although the job may use more, because there was no room."""
    text = ""
    for role in job.elastic_roles():
        members = job.members(role)
        num_nodes, num_groups = len({worker.node for worker in members}), len(members) // role.per_group
        if num_nodes < min(num_groups, job.spec.node_num):
            shared = f"the {num_groups} groups of role {role.name} share {count(num_nodes, 'node')}"
            text += f"; {shared}, for want of room on others"
    return text


def _wait(step: MasterStep, job: JobRecord, reason: str) -> None:
    """Say why the job waits, once for each reason."""
    reason = f"waits: {reason}"
    if job.reason != reason:
        step.decide("job-waits", reason, job)
