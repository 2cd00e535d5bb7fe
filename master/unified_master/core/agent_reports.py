"""Reconciles agents' reports of their workers with the desired state."""

from __future__ import annotations

import msgspec

from unified.protocol.agent_master import ObservedWorker, ObservedWorkers, OutputTails
from unified.protocol.records import Failure, JobWorkerIncarnation, Progress, WorkerState
from unified_master.core import directory, presence
from unified_master.core.health import hangs
from unified_master.core.health.node_faults import judge_nodes
from unified_master.core.nodes import catch_up
from unified_master.core.rounds import exclusion, incarnations, jobs, recovery
from unified_master.core.state import JobRecord, NodeRecord, TimerKey, WorkerRecord
from unified_master.core.step import MasterStep

_STATE_ORDER = {state: number for number, state in enumerate(WorkerState)}


def observe(step: MasterStep, node: NodeRecord, report: ObservedWorkers) -> None:
    """Process a whole report of a node: root causes first, then collateral failures."""
    if not node.has_reported:
        node.has_reported = True
        step.wants_schedule = True
        step.touch_ending_jobs()
    seen: dict[JobWorkerIncarnation, ObservedWorker] = {}
    unknown: set[str] = set()
    workers = sorted(report.workers, key=lambda each: each.kind == "store")  # of a shared fault, a worker's node pays
    for observed in sorted(workers, key=lambda each: each.failure is not None and each.failure.is_collateral):
        incarnation = JobWorkerIncarnation(observed.job_id, observed.name, observed.worker_incarnation)
        seen[incarnation] = observed
        _take_losses(step, incarnation, observed.output_lost)
        if incarnation in node.incarnations:
            _update(step, step.cluster.jobs[incarnation.job_id], node.incarnations[incarnation], observed)
        elif observed.state is WorkerState.EXITED:
            if observed.failure is not None and observed.failure.is_cut:
                jobs.cut_short(step, incarnation, node, observed.failure)
            incarnations.confirm_end(step, node, incarnation)
        elif incarnation not in node.leaving:  # left from before a restart or a partition, with all that it held
            known = step.cluster.worker(incarnation.job_id, incarnation.worker)
            allocation = known.allocation if known is not None and known.node == node.name else None
            incarnations.expect_end(step, node, incarnation, allocation, is_unknown=allocation is None)
            step.touch_node(node.name)
            unknown |= {incarnation.job_id} - step.cluster.jobs.keys()
    for job_id in sorted(unknown):
        why = "this master has no record of the job, as after the restore of an older backup"
        step.report("unknown-job", f"the workers of job {job_id} are stopped: {why}", node=node.name)
    for incarnation, leaving in list(node.leaving.items()):
        if incarnation not in seen and report.generation >= leaving.generation:
            incarnations.confirm_end(step, node, incarnation)
    for incarnation, worker in list(node.incarnations.items()):
        if (
            worker.is_seen
            and incarnation not in seen
            and incarnation in node.incarnations
            and worker.state is not WorkerState.EXITED
        ):
            _vanished(step, node, worker)
    for incarnation, observed in seen.items():  # last, because ends in the same report free names
        if incarnation in node.incarnations and observed.claims.number > node.incarnations[incarnation].claims.number:
            job, worker = step.cluster.jobs[incarnation.job_id], node.incarnations[incarnation]
            directory.decide_claims(step, job, worker, observed.claims)
            directory.publish(step, job, worker)
    catch_up(step, node, report.generation)


def _take_losses(step: MasterStep, incarnation: JobWorkerIncarnation, lost: str) -> None:
    """Note dropped output of a worker's newest incarnation, even if it has ended."""
    worker = step.cluster.worker(incarnation.job_id, incarnation.worker)
    if worker is None or worker.incarnation != incarnation.number or lost == worker.output_lost:
        return
    job = step.cluster.jobs[incarnation.job_id]
    if not worker.output_lost:
        step.report("output-dropped", lost, job, worker.role, worker.name, worker.node)
    worker.output_lost = lost
    step.touch_progress(job, worker)


def keep_tails(step: MasterStep, message: OutputTails) -> None:
    """Keep the newest output of workers."""
    for tail in message.tails:
        if step.cluster.worker(tail.job_id, tail.worker) is not None:
            incarnation = JobWorkerIncarnation(tail.job_id, tail.worker, tail.worker_incarnation)
            step.cluster.tails.add(incarnation, tail.stream, tail.offset, tail.data)


def overdue(step: MasterStep, key: TimerKey) -> None:
    """Fail an incarnation that did not start, or did not join a round, in time."""
    job = step.cluster.jobs.get(key[1])
    worker = job.workers.get(key[2]) if job is not None else None
    if job is None or worker is None or str(worker.incarnation) != key[3] or job.is_ending:
        return
    if worker.waits_for:
        step.cluster.timers.arm(key, step.now + step.cluster.intervals.start_s)
        return
    if worker.is_joining and worker.run is not None:
        text = f"did not leave round {worker.round} and join round {worker.run.round} in time; it may hang"
    elif worker.is_desired and worker.state is WorkerState.STARTING:
        text = f"did not start within {step.cluster.intervals.start_s:g} s; see the agent's log on {worker.node}"
    else:
        return
    incarnations.end(step, job, worker)
    recovery.on_failure(step, job, worker, Failure(summary=text, category="crash"))


def _update(step: MasterStep, job: JobRecord, worker: WorkerRecord, observed: ObservedWorker) -> None:
    """Apply the report about a desired incarnation."""
    if worker.state is WorkerState.EXITED or _STATE_ORDER[observed.state] < _STATE_ORDER[worker.state]:
        return  # states only move forward: this report is late
    seen, before = observed.progress or Progress(), worker.progress or Progress()
    if (seen.queues, seen.load) != (before.queues, before.load):  # apart, because this is no progress
        worker.progress = msgspec.structs.replace(before, queues=seen.queues, load=seen.load)
        step.touch_progress(job, worker)
        if seen.queues != before.queues and (timer := ("queues", job.job_id)) not in step.cluster.timers:
            step.cluster.timers.arm(timer, step.now + hangs.QUEUES_S)
    if observed.progress is not None and observed.progress != worker.progress:
        if worker.progress is None or _shown(observed.progress) != _shown(worker.progress):
            step.touch_progress(job, worker)
        waited, cleaned_up = worker.waits_for, worker.cleans_up
        worker.progress = observed.progress
        _count_step(step, job, worker, observed.progress)
        if worker.waits_for and not waited:
            text = f"waits for {worker.waits_for}"
            step.report("worker-waits", text, job, worker.role, worker.name, worker.node)
        if worker.cleans_up and not cleaned_up:
            text = f"failed with {worker.cleans_up}, and cleans up within a collective"
            step.report("worker-cleans-up", text, job, worker.role, worker.name, worker.node)
        if waited and not worker.waits_for and worker.state is WorkerState.STARTING:  # its time begins now
            step.cluster.timers.arm(incarnations.start_timer(worker), step.now + step.cluster.intervals.start_s)
        hangs.progressed(step, job, worker)
        if worker.waits_for != waited:
            job.waited_at = step.now
    if not worker.has_stepped and observed.progress is not None and observed.progress.step is not None:
        worker.has_stepped = True
        step.save_worker(worker)
    if observed.node_check is not None and observed.node_check != worker.node_check:
        worker.node_check = observed.node_check
        if judge_nodes(step, job, worker, observed.node_check):
            return
    news = (observed.state, observed.pid, observed.round, observed.inbox, observed.store_port, observed.log_file)
    known = (worker.state, worker.pid, worker.round, worker.inbox, worker.store_port or None, worker.log_file)
    ability, known_ability = (observed.can_rejoin, observed.left_round), (worker.can_rejoin, worker.left_round)
    if worker.is_seen and news == known and ability == known_ability:
        return
    was = worker.state
    worker.is_seen = True
    worker.state = observed.state
    worker.pid = observed.pid
    worker.round = observed.round
    worker.inbox = observed.inbox
    worker.store_port = observed.store_port or 0
    worker.log_file = observed.log_file
    worker.can_rejoin, worker.left_round = ability
    step.touch_worker(job, worker)
    if not worker.is_joining:
        step.cluster.timers.cancel(incarnations.join_timer(worker))
    hangs.progressed(step, job, worker)
    if worker.state is not was:
        _moved(step, job, worker, observed, was)
    if worker.rejoins and worker.run is not None and worker.left_round >= worker.run.round:
        recovery.on_left(step, job, worker)
    directory.publish(step, job, worker)


def _count_step(step: MasterStep, job: JobRecord, worker: WorkerRecord, progress: Progress) -> None:
    if progress.step is not None and (job.account.role or presence.leads(job, worker.role)):
        is_last, spent = progress.total is not None and progress.step >= progress.total, job.account.spent
        job.account.stepped(step.now, worker.role, progress.step, is_last=is_last)
        if job.account.spent is not spent:
            step.show_times(job)


def _shown(progress: Progress) -> Progress:
    """Return the part that people see."""
    return msgspec.structs.replace(progress, num_activities=0)


def _moved(step: MasterStep, job: JobRecord, worker: WorkerRecord, observed: ObservedWorker, was: WorkerState) -> None:
    if worker.state is not WorkerState.STARTING:
        step.cluster.timers.cancel(incarnations.start_timer(worker))
    if worker.state in (WorkerState.RUNNING, WorkerState.SERVING, WorkerState.FINISHED) and worker.running_at is None:
        worker.running_at = step.now
        if worker.kind == "worker":
            exclusion.on_running(step, job, worker.role)
    if worker.state is WorkerState.SERVING:
        job.roles[worker.role].has_served = True
        step.touch_job(job)
        worker.reason = "serves: it answers calls until it is stopped"
        step.report("worker-serves", worker.reason, job, worker.role, worker.name, worker.node)
    if worker.state is WorkerState.FINISHED:
        text = "its entry point returned; it goes on answering calls"
        worker.reason = "finished: its entry point returned"
        step.report("worker-finished", text, job, worker.role, worker.name, worker.node)
    if worker.state is WorkerState.EXITED:
        _exited(step, job, worker, observed.failure, was)


def _exited(step: MasterStep, job: JobRecord, worker: WorkerRecord, failure: Failure | None, was: WorkerState) -> None:
    """Settle how a desired incarnation has ended: well, badly, or too early."""
    is_driver = any(role.name == worker.role for role in job.driver_roles())
    if was is WorkerState.FINISHED and is_driver:
        # Its work was delivered; how its process ends changes nothing.
        text = f"its process ended after its work was done{': ' + failure.summary if failure else ''}"
        worker.reason = f"finished; {text}"
        step.report("worker-exited", text, job, worker.role, worker.name, worker.node)
    elif failure is not None:
        recovery.on_failure(step, job, worker, failure)
    elif worker.kind == "store" or worker.run is None:
        text = "exited with code 0 before it had been told to run" if worker.kind == "worker" else "exited"
        recovery.on_failure(step, job, worker, Failure(summary=text, category="crash", exit_code=0))
    else:
        worker.reason = "finished: it ended without a failure"
        step.report("worker-exited", "it ended without a failure", job, worker.role, worker.name, worker.node)


def _vanished(step: MasterStep, node: NodeRecord, worker: WorkerRecord) -> None:
    job = step.cluster.jobs[worker.job_id]
    worker.state = WorkerState.EXITED
    incarnations.end(step, job, worker)
    text = f"the agent of {node.name} knows nothing of it any more"
    recovery.on_failure(step, job, worker, Failure(summary=text, category="crash"))
