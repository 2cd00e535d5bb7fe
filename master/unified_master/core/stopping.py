"""The end of a job: its outcome is decided, its workers stop, it has stopped."""

from __future__ import annotations

from unified.protocol.client_master import EndReport
from unified.protocol.records import JOB_MOVES, Failure, NodeState, Stage, WorkerState
from unified_master.core import directory, incarnations
from unified_master.core.state import JobRecord, LifeKey, NodeRecord, WorkerRecord
from unified_master.core.step import Turn

EXIT_FAILED = 1
EXIT_STOPPED = 130
"""What a shell says of a program that Ctrl-C ended."""


def begin_stop(turn: Turn, job: JobRecord, outcome: int, reason: str) -> None:
    """Decide the exit code and desire no worker any more."""
    job.stage = JOB_MOVES.check(job.job_id, job.stage, Stage.STOPPING)
    job.outcome = outcome
    job.restart_at = None
    turn.cluster.timers.cancel(("restart", job.job_id))
    for role in job.roles.values():
        role.suspect = role.pending = ""
        turn.cluster.timers.cancel(("settle", job.job_id, role.name))
    turn.decide("job-stops", reason, job)
    for worker in job.workers.values():
        if worker.incarnation < 0:
            worker.reason = f"never started: {reason}"
            turn.touch_worker(job, worker)
        elif worker.is_held or (worker.is_desired and worker.state not in (WorkerState.FINISHED, WorkerState.EXITED)):
            worker.reason = f"stopped with its job: {reason}"
        worker.is_held = False
        incarnations.end_life(turn, job, worker)
        directory.publish(turn, job, worker)


def end_badly(turn: Turn, job: JobRecord, worker: WorkerRecord, failure: Failure, limit: str, why: str) -> None:
    """Stop a job because of a failure that nothing may repair; `limit` names what forbade it."""
    job.end = _end_report(worker, failure, limit)
    begin_stop(turn, job, EXIT_FAILED, f"failed: {worker.name} on {worker.node}: {failure.summary.rstrip('.')}; {why}")


def cut_short(turn: Turn, life: LifeKey, node: NodeRecord, failure: Failure) -> None:
    """A stop has cut short what a program does at its end: a job that went well so far did not."""
    job = turn.cluster.jobs.get(life.job_id)
    worker = job.workers.get(life.worker) if job is not None else None
    if job is None or worker is None or life not in node.leaving:
        return
    text = f"incarnation {life.incarnation} on {node.name}: {failure.summary}"
    turn.report("worker-failed", text, job, worker.role, worker.name, node.name)
    if job.stage is not Stage.STOPPING or job.outcome != 0 or worker.incarnation != life.incarnation:
        return
    job.outcome = EXIT_FAILED
    limit = f"stop_grace_s={job.spec.stop_grace_s:g}"
    job.end = _end_report(worker, failure, limit)
    why = f"{failure.summary.rstrip('.')}; {limit} is what a stop gives it"
    turn.decide("job-failed", f"failed: {worker.name} on {node.name}: {why}", job)


def _end_report(worker: WorkerRecord, failure: Failure, limit: str) -> EndReport:
    return EndReport(
        worker=worker.name,
        incarnation=max(0, worker.incarnation),
        node=worker.node,
        failure=failure,
        limit=limit,
        log_file=worker.log_file,
    )


def settle_stop(turn: Turn, job: JobRecord) -> None:
    """A STOPPING job has STOPPED when no life of it is left."""
    if turn.cluster.leaving_of(job.job_id) or _may_have_more(turn, job):
        return
    for worker in job.workers.values():
        incarnations.leave_seat(turn, job, worker)
    job.stage = JOB_MOVES.check(job.job_id, job.stage, Stage.STOPPED)
    job.exit_code = job.outcome
    job.ended_at = turn.now
    turn.wants_schedule = True
    turn.touch_job(job)
    turn.report("job-stopped", f"exit code {job.exit_code}: {job.reason}", job)


def _may_have_more(turn: Turn, job: JobRecord) -> bool:
    """A node that had lives of the job has yet to say which it has: the master or the connection is new."""
    names = {worker.node for worker in job.workers.values()}
    names |= {past.node for worker in job.workers.values() for past in worker.past}
    nodes = (turn.cluster.nodes.get(name) for name in names)
    return any(node is not None and node.state is NodeState.ALIVE and not node.has_reported for node in nodes)
