"""What an agent reports of its workers, compared with what we believe and want."""

from __future__ import annotations

from unified.protocol.agent_master import ObservedWorker, ObservedWorkers
from unified.protocol.records import Failure, JobWorkerIncarnation, WorkerState
from unified_master.core import directory, incarnations, jobs, recovery
from unified_master.core.nodes import catch_up
from unified_master.core.state import JobRecord, NodeRecord, TimerKey, WorkerRecord
from unified_master.core.step import Turn

_COURSE = list(WorkerState)
"""States of a life in their order."""


def observe(turn: Turn, node: NodeRecord, report: ObservedWorkers) -> None:
    """Take a whole report of a node. Root causes come before their collateral, whatever the agent's order."""
    if not node.has_reported:
        node.has_reported = True
        turn.wants_schedule = True
        turn.touch_ending_jobs()
    seen: dict[JobWorkerIncarnation, ObservedWorker] = {}
    for observed in sorted(report.workers, key=_is_collateral):
        life = JobWorkerIncarnation(observed.job_id, observed.name, observed.worker_incarnation)
        seen[life] = observed
        if life in node.lives:
            _update(turn, turn.cluster.jobs[life.job_id], node.lives[life], observed)
        elif observed.state is WorkerState.EXITED:
            if observed.failure is not None and observed.failure.is_cut:
                jobs.cut_short(turn, life, node, observed.failure)
            incarnations.confirm_gone(turn, node, life)
        elif life not in node.leaving:
            _meet_stranger(turn, node, life)
    for life, leaving in list(node.leaving.items()):
        if life not in seen and report.generation >= leaving.generation:
            incarnations.confirm_gone(turn, node, life)
    for life, worker in list(node.lives.items()):
        if worker.is_seen and life not in seen and life in node.lives and worker.state is not WorkerState.EXITED:
            _vanished(turn, node, worker)
    for life, observed in seen.items():  # after the ends in the same report, which have freed names
        if life in node.lives and observed.claims.number > node.lives[life].claims.number:
            _claims(turn, node.lives[life], observed)
    catch_up(turn, node, report.generation)


def start_overdue(turn: Turn, key: TimerKey) -> None:
    """A life has had its time to start, and did not say hello."""
    job = turn.cluster.jobs.get(key[1])
    worker = job.workers.get(key[2]) if job is not None else None
    if job is None or worker is None or str(worker.incarnation) != key[3]:
        return
    if not worker.is_desired or worker.state is not WorkerState.STARTING or job.is_ending:
        return
    incarnations.end_life(turn, job, worker)
    text = f"did not start within {turn.cluster.intervals.start_s:g} s; see the agent's log on {worker.node}"
    recovery.on_failure(turn, job, worker, Failure(summary=text, category="crash"))


def _is_collateral(observed: ObservedWorker) -> bool:
    return observed.failure is not None and observed.failure.is_collateral


def _update(turn: Turn, job: JobRecord, worker: WorkerRecord, observed: ObservedWorker) -> None:
    """News of a life that shall be."""
    if worker.state is WorkerState.EXITED or _COURSE.index(observed.state) < _COURSE.index(worker.state):
        return  # a state is never left for an earlier one: this report was overtaken
    if observed.progress is not None and observed.progress != worker.progress:
        worker.progress = observed.progress
        turn.touch_progress(job)
    news = (observed.state, observed.pid, observed.round, observed.inbox, observed.store_port, observed.log_file)
    known = (worker.state, worker.pid, worker.round, worker.inbox, worker.store_port or None, worker.log_file)
    if worker.is_seen and news == known:
        return
    was = worker.state
    worker.is_seen = True
    worker.state = observed.state
    worker.pid = observed.pid
    worker.round = observed.round
    worker.inbox = observed.inbox
    worker.store_port = observed.store_port or 0
    worker.log_file = observed.log_file
    turn.touch_worker(job, worker)
    if worker.state is not was:
        _moved(turn, job, worker, observed, was)
    directory.publish(turn, job, worker)


def _claims(turn: Turn, worker: WorkerRecord, observed: ObservedWorker) -> None:
    job = turn.cluster.jobs[worker.job_id]
    directory.hear(turn, job, worker, observed.claims)
    directory.publish(turn, job, worker)


def _moved(turn: Turn, job: JobRecord, worker: WorkerRecord, observed: ObservedWorker, was: WorkerState) -> None:
    if worker.state is not WorkerState.STARTING:
        turn.cluster.timers.cancel(incarnations.start_timer(worker))
    if worker.state in (WorkerState.RUNNING, WorkerState.FINISHED) and worker.running_at is None:
        worker.running_at = turn.now
    if worker.state is WorkerState.FINISHED:
        text = "its entry point returned; it goes on answering calls"
        worker.reason = "finished: its entry point returned"
        turn.report("worker-finished", text, job, worker.role, worker.name, worker.node)
    if worker.state is WorkerState.EXITED:
        _exited(turn, job, worker, observed.failure, was)


def _exited(turn: Turn, job: JobRecord, worker: WorkerRecord, failure: Failure | None, was: WorkerState) -> None:
    """A life that we wanted has ended: well, badly, or too early."""
    is_driver = any(role.name == worker.role for role in job.driver_roles())
    if was is WorkerState.FINISHED and is_driver:
        # Its work was delivered; how its process ends changes nothing.
        text = f"its process ended after its work was done{': ' + failure.summary if failure else ''}"
        worker.reason = f"finished; {text}"
        turn.report("worker-exited", text, job, worker.role, worker.name, worker.node)
    elif failure is not None:
        recovery.on_failure(turn, job, worker, failure)
    elif worker.kind == "store" or worker.run is None:
        text = "exited with code 0 before it had been told to run" if worker.kind == "worker" else "exited"
        recovery.on_failure(turn, job, worker, Failure(summary=text, category="crash", exit_code=0))
    else:
        worker.reason = "finished: it ended without a failure"
        turn.report("worker-exited", "it ended without a failure", job, worker.role, worker.name, worker.node)


def _vanished(turn: Turn, node: NodeRecord, worker: WorkerRecord) -> None:
    job = turn.cluster.jobs[worker.job_id]
    worker.state = WorkerState.EXITED
    incarnations.end_life(turn, job, worker)
    text = f"the agent of {node.name} knows nothing of it any more"
    recovery.on_failure(turn, job, worker, Failure(summary=text, category="crash"))


def _meet_stranger(turn: Turn, node: NodeRecord, life: JobWorkerIncarnation) -> None:
    """A life that we do not want, left from before a restart or a partition: it is leaving, and holds what it used."""
    job = turn.cluster.jobs.get(life.job_id)
    worker = job.workers.get(life.worker) if job is not None else None
    allocation = worker.allocation if worker is not None and worker.node == node.name else None
    incarnations.note_leaving(node, life, allocation)
    turn.touch_node(node.name)
