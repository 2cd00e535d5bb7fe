"""The queue of jobs: first come first served, all of a job or nothing of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from unified_master.core.rounds import incarnations, rendezvous
from unified_master.core.rounds.restart import Cause, restart
from unified_master.core.scheduling import waiting
from unified_master.core.scheduling.packing import Assignment
from unified_master.core.state import STORE, JobRecord
from unified_master.core.step import MasterStep, count

MAX_LOOKED_AT = 20_000
"""Number of nodes, summed over placed jobs, after which a step places no further job."""
MAX_NAMED = 16
"""Nodes that a sentence lists by name."""


def schedule(step: MasterStep) -> None:
    """Place every waiting job that fits, unless it is behind a job that could fit later."""
    ahead: JobRecord | None = None
    num_looked_at = 0
    for job in waiting.waiting_jobs(step.cluster):
        if ahead is not None:
            _wait(step, job, waiting.behind(ahead))
            continue
        if step.cluster.leaving_of(job.job_id):
            _wait(step, job, "its former workers are still stopping")
        else:
            found = waiting.plan_for(step.cluster, job)
            if found.fits:
                launch(step, job, found.assignments)
                num_looked_at += len(step.cluster.nodes)
                if num_looked_at >= MAX_LOOKED_AT:  # handle other messages before the next placement
                    step.cluster.timers.arm(("schedule",), step.now)
                    return
                continue
            _wait(step, job, found.reason)
        if waiting.could_ever_fit(step.cluster, job):
            ahead = job


def launch(step: MasterStep, job: JobRecord, assignments: Iterable[Assignment]) -> None:
    """Allocate a place for every worker, and begin their incarnations."""
    job.is_placed = True
    job.was_suspended = False
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


def suspend(step: MasterStep, job: JobRecord, reason: str) -> None:
    """Give up every place of a job, and keep it out of the queue until it is resumed.

    Its workers have the grace of a stop, and nothing is charged.
    """
    if job.is_ending or job.suspended is not None:
        return
    job.suspended, job.was_suspended = reason, True
    why = f"suspended: {reason}"
    if job.is_placed:
        restart(step, job, None, Cause("job-suspended", why))
    else:
        step.decide("job-suspended", why, job)
    step.wants_schedule = True  # others may have waited behind it


def resume(step: MasterStep, job: JobRecord, reason: str = "") -> None:
    """Put a suspended job back into the queue, in the order of submission."""
    if job.is_ending or job.suspended is None:
        return
    job.suspended = None
    step.wants_schedule = True
    step.decide("job-resumed", f"resumed{f', {reason}' if reason else ''}: it waits for room", job)


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
            text += f"; {shared}, because other nodes have no room"
    return text


def _wait(step: MasterStep, job: JobRecord, reason: str) -> None:
    """Say why the job waits, once for each reason."""
    reason = f"waits: {reason}"
    if job.reason != reason:
        step.decide("job-waits", reason, job)
