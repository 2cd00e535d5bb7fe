"""The lives of workers: given a place, begun, ended, and gone when the agent says so."""

from __future__ import annotations

import msgspec

from unified.protocol.records import JobWorkerIncarnation, WorkerState
from unified_master.core import directory
from unified_master.core.state import (
    Allocation,
    JobRecord,
    Leaving,
    NodeRecord,
    PastLife,
    TimerKey,
    WorkerRecord,
)
from unified_master.core.step import Turn

MAX_PAST = 20
START_SLACK_S = 5.0


def allocate(turn: Turn, job: JobRecord, worker: WorkerRecord, node: NodeRecord, allocation: Allocation) -> None:
    """Give the worker a place; its life must not be desired elsewhere."""
    release(turn, job, worker)
    _remember_life(worker)
    worker.node = node.name
    worker.allocation = allocation
    node.allocations[worker.place_key] = allocation
    turn.touch_worker(job, worker)


def release(turn: Turn, job: JobRecord, worker: WorkerRecord) -> None:
    """Give the place up. What a life that is still leaving uses stays held until it is gone."""
    if worker.allocation is None:
        return
    worker.allocation = None
    if (node := turn.cluster.nodes.get(worker.node)) is not None:
        node.allocations.pop(worker.place_key, None)
    turn.wants_schedule = True
    turn.touch_worker(job, worker)


def begin_life(turn: Turn, job: JobRecord, worker: WorkerRecord, reason: str) -> None:
    """Desire a new incarnation on the worker's node. The agent lets the old process go first."""
    end_life(turn, job, worker)
    if worker.incarnation >= 0 and not (worker.past and worker.past[-1].incarnation == worker.incarnation):
        _remember_life(worker)
    _forget_old(worker)
    worker.incarnation += 1
    worker.is_desired = True
    worker.is_held = False
    worker.reason = reason
    node = turn.cluster.nodes[worker.node]
    node.lives[worker.life] = worker
    turn.touch_node(node.name)
    turn.touch_worker(job, worker)
    turn.cluster.timers.arm(start_timer(worker), turn.now + _patience_s(turn, job, worker))
    if worker.kind == "worker":
        text = f"incarnation {worker.incarnation} starts on {node.name}{_on_devices(worker)}"
        turn.report("worker-starts", text, job, worker.role, worker.name, node.name)


def end_life(turn: Turn, job: JobRecord, worker: WorkerRecord) -> None:
    """Desire this life no longer. Until its agent confirms the end, it is leaving."""
    if not worker.is_desired:
        return
    worker.is_desired = False
    turn.cluster.timers.cancel(start_timer(worker))
    node = turn.cluster.nodes.get(worker.node)
    if node is not None and node.lives.pop(worker.life, None) is not None:
        turn.touch_node(node.name)
        if worker.state is not WorkerState.EXITED:
            note_leaving(node, worker.life, worker.allocation)
    turn.touch_worker(job, worker)
    directory.publish(turn, job, worker)


def note_leaving(node: NodeRecord, life: JobWorkerIncarnation, allocation: Allocation | None) -> None:
    """Expect the end of a life; a report of the next generation that lacks it is proof."""
    node.leaving[life] = Leaving(life=life, node=node.name, generation=node.generation + 1, allocation=allocation)


def confirm_gone(turn: Turn, node: NodeRecord, life: JobWorkerIncarnation) -> None:
    """The agent knows this life no longer, or reports its exit."""
    if node.leaving.pop(life, None) is None:
        return
    turn.wants_schedule = True
    job = turn.cluster.jobs.get(life.job_id)
    if job is None:
        return
    turn.to_advance[job.job_id] = None
    turn.touch_progress(job)
    worker = job.workers.get(life.worker)
    if worker is not None and worker.life == life and worker.state is not WorkerState.EXITED:
        worker.state = WorkerState.EXITED
        turn.touch_worker(job, worker)
        directory.publish(turn, job, worker)


def start_timer(worker: WorkerRecord) -> TimerKey:
    return ("start", worker.job_id, worker.name, str(worker.incarnation))


def _forget_old(worker: WorkerRecord) -> None:
    worker.is_seen = False
    worker.state = WorkerState.STARTING
    if worker.progress is not None and worker.progress.num_unread_errors:
        worker.num_unread_before += worker.progress.num_unread_errors
        worker.progress = msgspec.structs.replace(worker.progress, num_unread_errors=0)
    worker.pid = 0
    worker.round = 0
    worker.inbox = None
    worker.store_port = 0
    worker.failure = None
    worker.log_file = ""
    worker.run = None
    worker.running_at = None
    worker.revision = 0


def _remember_life(worker: WorkerRecord) -> None:
    if worker.incarnation >= 0 and worker.node:
        life = PastLife(incarnation=worker.incarnation, node=worker.node, log_file=worker.log_file)
        known = [past for past in worker.past if past.incarnation != worker.incarnation]
        worker.past = [*known, life][-MAX_PAST:]


def _patience_s(turn: Turn, job: JobRecord, worker: WorkerRecord) -> float:
    """How long the new life may take: the old process is given its grace first, and the agent, which sees more,
    the first word about a process that does not start.
    """
    return turn.cluster.intervals.start_s + START_SLACK_S + (job.spec.stop_grace_s if worker.incarnation > 0 else 0.0)


def _on_devices(worker: WorkerRecord) -> str:
    if not (devices := worker.devices):
        return ""
    return f" with device{'s' if len(devices) > 1 else ''} {', '.join(map(str, devices))}"
