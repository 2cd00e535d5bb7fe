"""Presence of the workers that a job needs, and the phase of the job's time that follows from it.

Each change of a worker's record updates the set of absent workers, so that no step looks at all workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from msgspec.structs import replace

from unified.job.spec import has_range
from unified.protocol.records import Phase, Stage
from unified_master.core.membership import WorkerMembership, membership_of
from unified_master.core.state import JobRecord, WorkerRecord

_PRESENT = (WorkerMembership.RUNNING, WorkerMembership.LEAVING, WorkerMembership.DONE)


def follow(
    now: float, known: Mapping[str, JobRecord], jobs: Iterable[JobRecord], workers: Iterable[WorkerRecord]
) -> Iterator[JobRecord]:
    """Update jobs whose records or workers may have changed; yield the jobs whose phases changed."""
    changed = {job.job_id: job for job in jobs}
    for worker in workers:
        if (job := known.get(worker.job_id)) is not None:
            changed[job.job_id] = job
            (job.away.add if is_away(job, worker) else job.away.discard)(worker.name)
    for job in changed.values():
        if job.account.enter(now, phase_of(job), is_whole=job.stage is Stage.RUNNING and not job.away):
            yield job


def restore(job: JobRecord) -> None:
    """Look at all workers of a new or loaded job. The time without a master is no stall."""
    job.away = {worker.name for worker in job.workers.values() if is_away(job, worker)}
    job.account.spent = replace(job.account.spent, stalls_at=None)


def phase_of(job: JobRecord) -> Phase | None:
    """Return the phase of a job that is not whole; None: it has ended."""
    if job.is_ending:
        return Phase.STOPPING if job.stage is Stage.STOPPING else None
    if job.is_waiting:
        return Phase.WAITING
    return Phase.RECOVERING if job.account.has_run else Phase.STARTING


def is_away(job: JobRecord, worker: WorkerRecord) -> bool:
    """Return True if the job cannot be whole because of this worker.

    In a role with a range of nodes, workers without a place, and newcomers for a later round, are not missed.
    """
    if worker.kind != "worker" or not leads(job, worker.role) or worker.has_ended_well:
        return False
    is_new = worker.run is None and worker.node_rank < 0 and job.roles[worker.role].round > 0
    if (is_new or worker.allocation is None) and has_range(job.spec.role(worker.role)):
        return False
    return membership_of(worker) not in _PRESENT


def leads(job: JobRecord, role: str) -> bool:
    """Return True if a role's workers and steps count: it is elastic or, if no role is, the job waits for it."""
    roles = [each for each in job.spec.roles if each.total > 0]
    driving = [each for each in roles if each.is_driver and not each.is_service]
    leading = [each for each in roles if each.kind == "elastic"] or driving or roles
    return any(each.name == role for each in leading)
