"""Incarnations of workers: given a place, begun, ended, and gone when the agent says so."""

from __future__ import annotations

import msgspec

from unified.protocol.records import JobWorkerIncarnation, NodeState, WorkerState
from unified_master.core import directory
from unified_master.core.node_capacity import Allocation
from unified_master.core.state import (
    JobRecord,
    Leaving,
    NodeRecord,
    PastIncarnation,
    TimerKey,
    WorkerRecord,
)
from unified_master.core.step import MasterStep

MAX_PAST = 20
START_SLACK_S = 5.0


def allocate(step: MasterStep, job: JobRecord, worker: WorkerRecord, node: NodeRecord, allocation: Allocation) -> None:
    """Give the worker a place; no incarnation of it may be desired elsewhere."""
    release(step, job, worker)
    _remember(worker)
    worker.node = node.name
    worker.allocation = allocation
    node.hold(worker, allocation)
    step.show_node(node.name)
    step.touch_worker(job, worker)


def release(step: MasterStep, job: JobRecord, worker: WorkerRecord) -> None:
    """Give the place up. Resources of an incarnation that is still leaving stay held until it is gone."""
    if worker.allocation is None:
        return
    worker.allocation = None
    if (node := step.cluster.nodes.get(worker.node)) is not None:
        node.hold(worker, None)
        step.show_node(node.name)
    step.wants_schedule = True
    step.touch_worker(job, worker)


def begin(step: MasterStep, job: JobRecord, worker: WorkerRecord, reason: str) -> None:
    """Desire a new incarnation on the worker's node. The agent ends the old process first."""
    end(step, job, worker)
    if worker.incarnation >= 0 and not (worker.past and worker.past[-1].incarnation == worker.incarnation):
        _remember(worker)
    _forget_old(worker)
    worker.incarnation += 1
    worker.is_desired = True
    worker.is_held = False
    worker.began_at = step.now
    worker.reason = reason
    node = step.cluster.nodes[worker.node]
    node.incarnations[worker.incarnation_id] = worker
    step.touch_node(node.name)
    step.touch_worker(job, worker)
    # The old process has its grace first. With the slack, the agent, which sees more, reports a hang before us.
    before_s = job.spec.stop_grace_s + job.spec.save_grace_s if worker.incarnation > 0 else 0.0
    step.cluster.timers.arm(start_timer(worker), step.now + step.cluster.intervals.start_s + START_SLACK_S + before_s)
    if worker.kind == "worker":
        plural, devices = "s" if len(worker.devices) > 1 else "", ", ".join(map(str, worker.devices))
        where = f"{node.name} with device{plural} {devices}" if devices else node.name
        text = f"incarnation {worker.incarnation} starts on {where}"
        step.report("worker-starts", text, job, worker.role, worker.name, node.name)


def end(step: MasterStep, job: JobRecord, worker: WorkerRecord) -> None:
    """Desire this incarnation no longer. Until its agent confirms the end, it is leaving."""
    if not worker.is_desired:
        return
    worker.is_desired = False
    step.cluster.timers.cancel(start_timer(worker))
    step.cluster.timers.cancel(join_timer(worker))
    node = step.cluster.nodes.get(worker.node)
    if node is not None and node.incarnations.pop(worker.incarnation_id, None) is not None:
        step.touch_node(node.name)
        if worker.state is not WorkerState.EXITED:
            expect_end(step, node, worker.incarnation_id, worker.allocation)
    step.touch_worker(job, worker)
    directory.publish(step, job, worker)


def expect_end(
    step: MasterStep,
    node: NodeRecord,
    incarnation: JobWorkerIncarnation,
    allocation: Allocation | None,
    *,
    is_unknown: bool = False,
) -> None:
    """Expect the end of an incarnation; a report of the next generation without it is the proof."""
    leaving = Leaving(
        incarnation=incarnation,
        node=node.name,
        generation=node.generation + 1,
        allocation=allocation,
        is_unknown=is_unknown,
    )
    step.cluster.add_leaving(node, leaving)


def confirm_end(step: MasterStep, node: NodeRecord, incarnation: JobWorkerIncarnation) -> None:
    """Mark an incarnation as gone that the agent no longer knows, or reports as exited."""
    if not step.cluster.remove_leaving(node, incarnation):
        return
    step.wants_schedule = True
    job = step.cluster.jobs.get(incarnation.job_id)
    if job is None:
        return
    step.to_advance[job.job_id] = None
    step.show_job(job)
    worker = job.workers.get(incarnation.worker)
    if worker is not None and worker.incarnation_id == incarnation and worker.state is not WorkerState.EXITED:
        worker.state = WorkerState.EXITED
        step.touch_worker(job, worker)
        directory.publish(step, job, worker)


def start_timer(worker: WorkerRecord) -> TimerKey:
    return ("start", worker.job_id, worker.name, str(worker.incarnation))


def join_timer(worker: WorkerRecord) -> TimerKey:
    return ("join", worker.job_id, worker.name, str(worker.incarnation))


def has_good_place(step: MasterStep, job: JobRecord, worker: WorkerRecord) -> bool:
    """Return True if the worker's node is believed alive (reported in this term or not), in service, not excluded."""
    node = step.cluster.nodes.get(worker.node)
    return (
        worker.allocation is not None
        and node is not None
        and node.state is NodeState.ALIVE
        and node.is_in_service
        and node.name not in job.excluded
    )


def _forget_old(worker: WorkerRecord) -> None:
    worker.is_seen = False
    worker.state = WorkerState.STARTING
    if worker.progress is not None:
        worker.num_unread_before += worker.progress.num_unread_errors
        worker.progress = msgspec.structs.replace(worker.progress, num_unread_errors=0, waits_for="", cleans_up="")
    worker.pid = 0
    worker.round = 0
    worker.inbox = None
    worker.store_port = 0
    worker.failure = None
    worker.log_file = ""
    worker.output_lost = ""
    worker.run = worker.notice = None
    worker.can_rejoin = False
    worker.left_round = 0
    worker.running_at = None
    worker.has_stepped = False
    worker.revision = 0


def _remember(worker: WorkerRecord) -> None:
    if worker.incarnation >= 0 and worker.node:
        incarnation = PastIncarnation(incarnation=worker.incarnation, node=worker.node, log_file=worker.log_file)
        known = [past for past in worker.past if past.incarnation != worker.incarnation]
        worker.past = [*known, incarnation][-MAX_PAST:]
