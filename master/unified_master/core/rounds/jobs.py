"""Stages of a job: accepted, ready, running, stopping, stopped. The next stage follows from the job's workers."""

from __future__ import annotations

import msgspec

from unified.job.spec import JobSpec
from unified.protocol.client_master import EndReport
from unified.protocol.records import JOB_MOVES, Failure, JobWorkerIncarnation, NodeState, Stage, TimeSpent, WorkerState
from unified_master.core import directory, presence
from unified_master.core.accounting import Account
from unified_master.core.rounds import incarnations, rendezvous
from unified_master.core.state import JobRecord, NodeRecord, RoleRecord, WorkerRecord
from unified_master.core.step import MasterStep, count

MAX_ENDED = 1000
"""Jobs that have ended and are still known."""
MAX_ENDED_WEIGHT = 200_000
"""Most weight of all ended jobs: a worker, an event and a kilobyte of description each weigh 1 (similar memory)."""
EXIT_FAILED = 1
EXIT_STOPPED = 130
"""Exit code that a shell gives a program that Ctrl-C ended."""


def accept(step: MasterStep, spec: JobSpec) -> JobRecord:
    """Take a job into the queue."""
    cluster = step.cluster
    sequence = cluster.next_sequence
    cluster.next_sequence += 1
    job = JobRecord(
        job_id="-".join(filter(None, (spec.name, str(sequence), cluster.id_suffix))),
        sequence=sequence,
        submitted_at=step.now,
        spec=spec,
        roles={role.name: RoleRecord(name=role.name) for role in spec.roles},
        account=Account(spent=TimeSpent(phase="waiting", since=step.now)),
    )
    job.workers = new_workers(job)
    presence.restore(job)
    cluster.jobs[job.job_id] = job
    step.save("meta", "next_sequence", str(cluster.next_sequence).encode())
    step.save("spec", job.job_id, msgspec.msgpack.encode(spec))
    for worker in job.workers.values():
        step.touch_progress(job, worker)  # saved from its first change on: `restore` makes it from the spec
    step.to_advance[job.job_id] = None
    by = f" by {spec.submitted_by}" if spec.submitted_by else ""
    shape = ", ".join(f"{role.name}={role.total}" for role in spec.roles)
    step.decide("job-submitted", f"submitted{by}: {shape}", job)
    step.has_new_job = True
    return job


def new_workers(job: JobRecord) -> dict[str, WorkerRecord]:
    """Return the workers of a new job by name, in the order of roles."""
    return {
        (name := role.worker(rank)): WorkerRecord(job_id=job.job_id, name=name, role=role.name, rank=rank)
        for role in job.spec.roles
        for rank in range(role.total)
    }


def advance(step: MasterStep, job: JobRecord) -> None:
    """Move the job through every stage that its workers' states allow. Failures must have been judged before."""
    if job.stage is Stage.STOPPING:
        settle_stop(step, job)
        return
    if job.stage is Stage.STOPPED or not job.is_placed:
        return
    workers = [one for one in job.workers.values() if one.kind == "worker" and not job.is_absent(one)]
    if job.stage is Stage.INIT:
        is_ready = all(worker.has_ended_well or rendezvous.is_ready(worker) for worker in workers)
        if not is_ready or not rendezvous.is_store_ready(job):
            return
        job.stage = JOB_MOVES.check(job.job_id, job.stage, Stage.READY)
        step.decide("job-ready", f"{count(len(workers), 'worker')} answered", job)
    rendezvous.give_orders(step, job)
    if job.stage is Stage.READY:  # before the orders leave, so that entry points see RUNNING
        job.stage = JOB_MOVES.check(job.job_id, job.stage, Stage.RUNNING)
        job.started_at = job.started_at or step.now
        step.decide("job-running", "all workers run", job)
    if job.stage is Stage.RUNNING and _is_done(job):
        begin_stop(step, job, 0, "done: every worker that the job waits for has finished")


def prune(step: MasterStep) -> None:
    """Forget the jobs that ended first; the last ended job is always kept."""
    cluster = step.cluster
    ended = [job for job in cluster.jobs.values() if job.stage is Stage.STOPPED]
    weight = 0
    for number, job in enumerate(sorted(ended, key=lambda job: (job.ended_at or 0.0, job.sequence), reverse=True)):
        blobs = (job.spec.user_config, *(role.config for role in job.spec.roles))
        description_kb = sum(len(blob.data) for blob in blobs) // 1024
        weight += len(job.workers) + len(cluster.events.get(job.job_id, ())) + description_kb
        if number == 0 or (number < MAX_ENDED and weight <= MAX_ENDED_WEIGHT):
            continue
        del cluster.jobs[job.job_id]
        cluster.events.pop(job.job_id, None)
        cluster.batched_at.pop(("news", job.job_id), None)
        cluster.batched_at.pop(("advance", job.job_id), None)
        cluster.tails.forget(job.job_id)
        step.forget(job)


def _is_done(job: JobRecord) -> bool:
    """Return True if the roles that the job waits for are done, and nothing about them is left to decide."""
    roles = job.driver_roles()
    if not roles:  # services alone: they run until they are stopped, or all have ended themselves
        return all(worker.has_ended_well for worker in job.workers.values() if worker.kind == "worker")
    is_decided = not any(rendezvous.missed(job, role) for role in roles)
    return is_decided and all(worker.is_done for role in roles for worker in job.members(role))


def begin_stop(step: MasterStep, job: JobRecord, outcome: int, reason: str) -> None:
    """Set the coming exit code, and desire no worker any more."""
    job.stage = JOB_MOVES.check(job.job_id, job.stage, Stage.STOPPING)
    job.outcome = outcome
    job.restart_at = None
    step.cluster.timers.cancel(("restart", job.job_id))
    for role in job.roles.values():
        role.suspect = role.pending = ""
        step.cluster.timers.cancel(("settle", job.job_id, role.name))
    step.decide("job-stops", reason, job)
    for worker in job.workers.values():
        if worker.incarnation < 0:
            worker.reason = f"never started: {reason}"
            step.touch_worker(job, worker)
        elif worker.is_held or (worker.is_desired and worker.state not in (WorkerState.FINISHED, WorkerState.EXITED)):
            worker.reason = f"stopped with its job: {reason}"
        worker.is_held = False
        step.touch_worker(job, worker)
        incarnations.end(step, job, worker)
        directory.publish(step, job, worker)


def fail(step: MasterStep, job: JobRecord, worker: WorkerRecord, failure: Failure, limit: str, why: str) -> None:
    """Stop a job because of a failure that may not be repaired; `limit` names what forbids the repair."""
    job.end = _end_report(worker, failure, limit)
    begin_stop(step, job, EXIT_FAILED, f"failed: {worker.name} on {worker.node}: {failure.summary.rstrip('.')}; {why}")


def cut_short(step: MasterStep, incarnation: JobWorkerIncarnation, node: NodeRecord, failure: Failure) -> None:
    """Fail a job that went well so far, because a stop cut short what a program does at its end."""
    job = step.cluster.jobs.get(incarnation.job_id)
    worker = job.workers.get(incarnation.worker) if job is not None else None
    if job is None or worker is None or incarnation not in node.leaving:
        return
    text = f"incarnation {incarnation.number} on {node.name}: {failure.summary}"
    step.report("worker-failed", text, job, worker.role, worker.name, node.name)
    if job.stage is not Stage.STOPPING or job.outcome != 0 or worker.incarnation != incarnation.number:
        return
    job.outcome = EXIT_FAILED
    limit = f"stop_grace_s={job.spec.stop_grace_s:g}"
    job.end = _end_report(worker, failure, limit)
    why = f"{failure.summary.rstrip('.')}; {limit} is what a stop gives it"
    step.decide("job-failed", f"failed: {worker.name} on {node.name}: {why}", job)


def _end_report(worker: WorkerRecord, failure: Failure, limit: str) -> EndReport:
    return EndReport(
        worker=worker.name,
        incarnation=max(0, worker.incarnation),
        node=worker.node,
        failure=failure,
        limit=limit,
        log_file=worker.log_file,
    )


def settle_stop(step: MasterStep, job: JobRecord) -> None:
    """Move a STOPPING job to STOPPED when no incarnation of it is left."""
    if step.cluster.leaving_of(job.job_id) or _may_have_more(step, job):
        return
    for worker in job.workers.values():
        incarnations.release(step, job, worker)
    job.stage = JOB_MOVES.check(job.job_id, job.stage, Stage.STOPPED)
    job.exit_code = job.outcome
    job.ended_at = step.now
    step.wants_schedule = step.has_ended_job = True
    step.touch_job(job)
    step.report("job-stopped", f"exit code {job.exit_code}: {job.reason}", job)


def _may_have_more(step: MasterStep, job: JobRecord) -> bool:
    """Return True if a node that had workers of the job must still report: the master or the connection is new."""
    names = {worker.node for worker in job.workers.values()}
    names |= {past.node for worker in job.workers.values() for past in worker.past}
    nodes = (step.cluster.nodes.get(name) for name in names)
    return any(node is not None and node.state is NodeState.ALIVE and not node.has_reported for node in nodes)
