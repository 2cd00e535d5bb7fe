"""Who can be called: the directory entry of each worker's newest life, and the news of it for agents."""

from __future__ import annotations

from unified.protocol.agent_master import DirectoryChanged
from unified.protocol.records import DirectoryEntry, Reachability, Stage, WorkerState
from unified_master.core import batching, names
from unified_master.core.state import JobRecord, WorkerRecord
from unified_master.core.step import Turn


def publish(turn: Turn, job: JobRecord, worker: WorkerRecord) -> None:
    """Note the worker's entry if it changed; `flush` sends it. A life that is over loses its names here."""
    if not job.can_call(worker):
        names.free(job, worker)
    entry = _entry(job, worker)
    if entry is None or entry == worker.entry:
        return
    worker.entry = entry
    job.revision += 1
    turn.touch_worker(job, worker)
    turn.cluster.news.setdefault(job.job_id, {})[worker.name] = entry


def whole(job: JobRecord) -> list[DirectoryEntry]:
    """Every entry of a job, by role and rank."""
    return [worker.entry for worker in job.workers.values() if worker.entry is not None]


def flush(turn: Turn) -> None:
    """Send the news to the nodes of each job; one that does not know what they are news to gets the whole directory."""
    for job_id in list(turn.cluster.news):
        job = turn.cluster.jobs.get(job_id)
        if job is not None and job.stage is not Stage.INIT and not batching.may_pass(turn, ("news", job_id)):
            continue
        entries = list(turn.cluster.news.pop(job_id).values())
        if job is None:
            continue
        before, job.told_revision = job.told_revision, job.revision
        if job.stage is Stage.INIT:
            continue  # nobody runs yet; the order to run brings the whole directory
        nodes = {worker.node for worker in job.workers.values() if worker.is_desired}
        if job.is_ending:  # workers that are still stopping may wait for one that is gone
            nodes |= {leaving.node for leaving in turn.cluster.leaving_of(job_id)}
        for name in sorted(nodes):
            if (node := turn.connected_node(name)) is None:
                continue
            if node.told.get(job_id, -1) >= before:
                turn.send(node.peer, DirectoryChanged(job_id=job_id, entries=entries))
                node.told[job_id] = job.revision
            else:
                turn.touch_node(name)


def _entry(job: JobRecord, worker: WorkerRecord) -> DirectoryEntry | None:
    """What is true of the newest life; None as long as nobody could have heard of it."""
    if worker.kind == "store" or worker.incarnation < 0:
        return None
    if job.can_call(worker):
        return _write(worker, Reachability.ALIVE, "")
    if worker.state is not WorkerState.EXITED and worker.is_desired and not job.is_ending:
        return worker.entry  # a life that is being born: the end of the one before it stays published
    is_last = job.is_ending or worker.has_ended_well
    return _write(worker, Reachability.ENDED if is_last else Reachability.DEAD, _why(job, worker, is_last=is_last))


def _write(worker: WorkerRecord, state: Reachability, reason: str) -> DirectoryEntry:
    return DirectoryEntry(
        worker=worker.name,
        incarnation=worker.incarnation,
        state=state,
        inbox=worker.inbox if state is Reachability.ALIVE else None,
        node=worker.node,
        reason=reason,
        names=worker.names,
        refused=worker.refused,
        revision=worker.revision,
    )


def _why(job: JobRecord, worker: WorkerRecord, *, is_last: bool) -> str:
    if worker.failure is not None:
        return worker.failure.summary
    if job.is_ending and is_last:
        return f"job {job.job_id} ends: {job.reason}"
    return "its entry point is done" if is_last else worker.reason
