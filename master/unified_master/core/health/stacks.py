"""Stacks of a job's workers, collected from the agents of their nodes."""

from __future__ import annotations

from collections.abc import Sequence

from unified.core.hangs.stacks import merge
from unified.errors import listed, nearest
from unified.protocol.agent_master import ReadStacks, StacksRead
from unified.protocol.client_master import GetStacks, JobStacks, Refused
from unified.protocol.records import WorkerState
from unified.protocol.stacks import StackReport, WorkerStacks
from unified_master.core.state import JobRecord, StackCollection, WorkerRecord
from unified_master.core.step import MasterStep

MAX_WAIT_S = 60.0
SLACK_S = 1.0
"""Time that an agent's answer may take beyond the agent's own time limit."""
MAX_WORKERS = 10_000
"""Most workers of a request: its answer is one message."""
MAX_COLLECTIONS = 16


def get(step: MasterStep, peer: bytes, request_id: int, request: GetStacks, job: JobRecord) -> Refused | None:
    """Begin to collect what a client asks for, or return the reason why not."""
    workers = [worker for worker in job.workers.values() if worker.kind == "worker"]
    if request.role:
        if request.role not in job.roles:
            hint = nearest(request.role, job.roles) or f" Its roles are {listed(job.roles)}."
            reason = f"job {job.job_id} has no role {request.role[:100]!r}.{hint}"
            return Refused(code="not-found", reason=reason)
        workers = [worker for worker in workers if worker.role == request.role]
    if request.rank is not None:
        workers = [worker for worker in workers if worker.rank_in_round == request.rank]
    if not workers:
        return Refused(code="not-found", reason=f"job {job.job_id} has no worker of rank {request.rank} there.")
    if len(workers) > MAX_WORKERS:
        reason = f"{len(workers)} workers are more than the {MAX_WORKERS} of one answer: name a role or a rank."
        return Refused(code="bad-request", reason=reason)
    if len(step.cluster.collections) >= MAX_COLLECTIONS:
        return Refused(code="unavailable", reason="too many reads of stacks at once: try again in some seconds.")
    collection = StackCollection(job_id=job.job_id, peer=peer, request_id=request_id)
    collect(step, collection, workers, max(0.0, min(request.wait_s, MAX_WAIT_S)))
    return None


def collect(
    step: MasterStep, collection: StackCollection, workers: Sequence[WorkerRecord], within_s: float
) -> StackCollection | None:
    """Ask the agents of these workers; return the master's own collection if there is no agent to ask."""
    number = step.cluster.next_read
    step.cluster.next_read += 1
    step.cluster.collections[number] = collection
    for worker in workers:
        if not _is_there(worker):
            collection.reports.append(_without(worker, f"it has no process: {worker.reason or worker.state}"))
        elif step.connected_node(worker.node) is None:
            collection.reports.append(_without(worker, f"its node {worker.node} is not connected to the master"))
        else:
            collection.awaited.setdefault(worker.node, []).append(worker)
    for name, here in collection.awaited.items():
        names = [worker.name for worker in here]
        order = ReadStacks(job_id=collection.job_id, workers=names, within_s=within_s)
        step.send(step.cluster.nodes[name].peer, order, number)
    step.cluster.timers.arm(("stacks", str(number)), step.now + within_s + SLACK_S)
    return _finished(step, number)


def take(step: MasterStep, number: int, message: StacksRead) -> StackCollection | None:
    """Take in an agent's answer; return the collection if this was the last answer and the master itself asked."""
    collection = step.cluster.collections.get(number)
    if collection is None or collection.awaited.pop(message.node, None) is None:
        return None
    collection.reports.append(message.report)
    return _finished(step, number)


def overdue(step: MasterStep, number: int) -> StackCollection | None:
    """End a collection whose time is over, as `take` does."""
    collection = step.cluster.collections.get(number)
    if collection is None:
        return None
    for name, workers in collection.awaited.items():
        collection.reports += [_without(worker, f"the agent of node {name} did not answer") for worker in workers]
    collection.awaited.clear()
    return _finished(step, number)


def _finished(step: MasterStep, number: int) -> StackCollection | None:
    collection = step.cluster.collections[number]
    if collection.awaited:
        return None
    del step.cluster.collections[number]
    step.cluster.timers.cancel(("stacks", str(number)))
    if not collection.peer:
        return collection
    answer = JobStacks(job_id=collection.job_id, report=merge(collection.reports))
    step.send(collection.peer, answer, collection.request_id)
    return None


def _is_there(worker: WorkerRecord) -> bool:
    return worker.is_desired and worker.state not in (WorkerState.PENDING, WorkerState.EXITED)


def _without(worker: WorkerRecord, why: str) -> StackReport:
    stacks = WorkerStacks(
        worker=worker.name,
        incarnation=max(0, worker.incarnation),
        rank=worker.rank_in_round,
        node=worker.node,
        pid=worker.pid,
        note=why,
    )
    return StackReport(workers=[stacks])
