"""The directory of a job: the entry of each worker's newest incarnation, the names that it holds, and news for agents.

Each claim of a name is decided once, in the order of arrival.

A claim is granted if no other worker holds the name, else refused. The answer stands until the claim is withdrawn: a
worker never gets a name by a claim that was refused. A name is free again when its claim is withdrawn, or when the
incarnation that holds it is over.
"""

from __future__ import annotations

from unified.protocol.agent_master import DirectoryChanged
from unified.protocol.records import (
    DirectoryEntry,
    JournalPlace,
    NameClaims,
    NameRefusal,
    Reachability,
    Stage,
    WorkerState,
)
from unified_master.core.state import JobRecord, WorkerRecord
from unified_master.core.step import MasterStep, may_run_now

MAX_REPORTED_CLAIMS = 100
"""Most claims of an incarnation that are reported as events, so that endless claims do not flood the log."""


def publish(step: MasterStep, job: JobRecord, worker: WorkerRecord) -> None:
    """Note the worker's entry if it changed; `flush` sends it. An incarnation that is over loses its names here."""
    if not job.can_call(worker):
        free_names(job, worker)
    entry = _entry(job, worker)
    if entry is None or entry == worker.entry:
        return
    worker.entry = entry
    job.revision += 1
    step.touch_worker(job, worker)
    step.cluster.news.setdefault(job.job_id, {})[worker.name] = entry


def entries_of(job: JobRecord) -> list[DirectoryEntry]:
    """Return every entry of a job, by role and rank."""
    return [worker.entry for worker in job.workers.values() if worker.entry is not None]


def flush(step: MasterStep) -> None:
    """Send changed entries to the nodes of each job; a node that lacks earlier ones gets the whole directory."""
    for job_id in list(step.cluster.news):
        job = step.cluster.jobs.get(job_id)
        if job is not None and job.stage is not Stage.INIT and not may_run_now(step, ("news", job_id)):
            continue
        entries = list(step.cluster.news.pop(job_id).values())
        if job is None:
            continue
        before, job.notified_revision = job.notified_revision, job.revision
        if job.stage is Stage.INIT:
            continue  # nobody runs yet; the order to run brings the whole directory
        nodes = {worker.node for worker in job.workers.values() if worker.is_desired}
        if job.is_ending:  # stopping workers may wait for a worker that is gone
            nodes |= {leaving.node for leaving in step.cluster.leaving_of(job_id)}
        for name in sorted(nodes):
            if (node := step.connected_node(name)) is None:
                continue
            if node.notified.get(job_id, -1) >= before:
                step.send(node.peer, DirectoryChanged(job_id=job_id, entries=entries))
                node.notified[job_id] = job.revision
            else:
                step.touch_node(name)


def _entry(job: JobRecord, worker: WorkerRecord) -> DirectoryEntry | None:
    """Return the entry of the newest incarnation; None if no other worker can know of it yet."""
    if worker.kind == "store" or worker.incarnation < 0:
        return None
    is_alive = job.can_call(worker)
    if not is_alive and worker.state is not WorkerState.EXITED and worker.is_desired and not job.is_ending:
        return worker.entry  # it starts: the entry of the last incarnation stays published
    is_last = job.is_ending or worker.has_ended_well or job.is_absent(worker) or _is_ended(worker)
    over = Reachability.ENDED if is_last else Reachability.DEAD
    return DirectoryEntry(
        worker=worker.name,
        incarnation=worker.incarnation,
        state=Reachability.ALIVE if is_alive else over,
        inbox=worker.inbox if is_alive else None,
        node=worker.node,
        reason=_why_before(worker) if is_alive else _why(job, worker, is_last=is_last),
        names=worker.names,
        refused=worker.refused,
        journals={name: job.journals[name] for name in worker.names if name in job.journals},
        revision=worker.revision,
    )


def _is_ended(worker: WorkerRecord) -> bool:
    """Return True if the newest incarnation was published as ended, which agents keep until the next incarnation.

    The role went on without the worker, and may have room for it again.
    """
    last = worker.entry
    return last is not None and last.incarnation == worker.incarnation and last.state is Reachability.ENDED


def _why_before(worker: WorkerRecord) -> str:
    """Return the published reason for the end of the incarnation before this one; empty if none was published."""
    last = worker.entry
    is_of_before = last is not None and (last.incarnation == worker.incarnation) == (last.state is Reachability.ALIVE)
    return last.reason if last is not None and is_of_before else ""


def _why(job: JobRecord, worker: WorkerRecord, *, is_last: bool) -> str:
    if worker.failure is not None:
        return worker.failure.summary
    if job.is_ending and is_last:
        return f"job {job.job_id} ends: {job.reason}"
    return "its entry point is done" if is_last else worker.reason


def decide_claims(step: MasterStep, job: JobRecord, worker: WorkerRecord, claims: NameClaims) -> None:
    """Decide the claims of an incarnation that can be called. Old or repeated claims change nothing."""
    if claims.number <= worker.claims.number or not job.can_call(worker):
        return
    worker.claims = claims
    for name in worker.names.keys() - claims.names.keys():
        del job.holders[name]
    names: dict[str, int] = {}
    refused = {name: one for name, one in worker.refused.items() if claims.names.get(name) == one.number}
    for name, number in claims.names.items():
        if name in refused:
            continue
        holder = job.holders.setdefault(name, worker.name)
        if holder == worker.name:
            names[name] = number
        else:
            refused[name] = NameRefusal(number=number, holder=holder)
        if worker.names.get(name) != number:
            _report_claim(step, job, worker, name, number, holder)
    locations = {
        name: JournalPlace(node=worker.node, path=claims.journals[name])
        for name in names.keys() & claims.journals.keys()
    }
    is_moved = any(job.journals.get(name) != place for name, place in locations.items())
    if is_moved:
        job.journals.update(locations)
        step.touch_job(job)
    if is_moved or (names, refused) != (worker.names, worker.refused):
        worker.names, worker.refused = names, refused
        worker.revision += 1
    step.save_worker(worker)


def free_names(job: JobRecord, worker: WorkerRecord) -> None:
    """Free the names and claims of a worker whose incarnation is over."""
    for name in worker.names:
        del job.holders[name]
    worker.claims = NameClaims()
    worker.names = {}
    worker.refused = {}


def _report_claim(step: MasterStep, job: JobRecord, worker: WorkerRecord, name: str, number: int, holder: str) -> None:
    if number > MAX_REPORTED_CLAIMS:
        return
    if holder == worker.name:
        event, text = "name-claimed", f"it holds the name {name!r} from now on"
    else:
        event, text = "name-refused", f"the name {name!r} is held by worker {holder}"
    step.report(event, text, job, worker.role, worker.name, worker.node)
