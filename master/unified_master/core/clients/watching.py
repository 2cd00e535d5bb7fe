"""Watches: answers about what changed since a client's last one, at a cost of the changes alone."""

from __future__ import annotations

from unified.protocol.client_master import Changes, Refused, WatchCluster, WorkerStatus
from unified.protocol.columns import Columns, columns_of
from unified_master.core.changes import ChangedPart
from unified_master.core.clients import status
from unified_master.core.state import Cluster, ParkedWatch, TimerKey
from unified_master.core.step import MasterStep

MAX_WAIT_S = 300.0
MAX_PARTS = 4096
"""Most parts of one answer, which take the loop milliseconds. More parts follow in further answers."""
FEW_PARTS = 40
"""Most parts of an answer to a client that missed little: heartbeats wait only half a millisecond for it."""
LITTLE = 2000
"""Most changes that count as little."""
MAX_SENT_EVENTS = 500
"""Events in one answer, the newest."""


def watch(step: MasterStep, peer: bytes, request_id: int, request: WatchCluster, job_id: str) -> Changes | None:
    """Return what changed, or park the request until something has."""
    cluster, after = step.cluster, request.after_version
    if not _is_known(cluster, after) or request.wait_s <= 0:
        return changes_since(step, job_id, after, has_workers=request.has_workers)
    parked = ParkedWatch(
        peer=peer,
        request_id=request_id,
        job_id=job_id,
        after_version=after,
        has_workers=request.has_workers,
        settled_at=step.now + max(0.0, request.settle_s),
        ends_at=step.now + min(request.wait_s, MAX_WAIT_S),
    )
    key = ("watch", job_id, peer.hex(), str(request_id))
    cluster.watches.setdefault(job_id, {})[key] = parked
    cluster.timers.arm(key, parked.ends_at)
    if cluster.changes.has_changed(after, job_id):
        _consider(step, key, parked)
    return None


def settle(step: MasterStep) -> None:
    """Answer the watches that this step's changes concern, or arm their timers."""
    cluster = step.cluster
    if not cluster.watches or cluster.changes.version == step.first_version:
        return
    changed, _ = cluster.changes.since(step.first_version, cluster.changes.version)
    for job_id in {"", *(part.job_id for part in changed)}:
        for key, parked in list(cluster.watches.get(job_id, {}).items()):
            _consider(step, key, parked)


def overdue(step: MasterStep, key: TimerKey) -> None:
    """Answer a watch whose changes have settled, or whose time is over."""
    if (parked := step.cluster.watches.get(key[1], {}).get(key)) is not None:
        _tell(step, key, parked)


def changes_since(step: MasterStep, job_id: str, after: int, *, has_workers: bool = True) -> Changes:
    cluster = step.cluster
    is_whole = not _is_known(cluster, after)
    after = cluster.changes.first if is_whole else after
    limit = FEW_PARTS if not is_whole and cluster.changes.version - after <= LITTLE else MAX_PARTS
    parts, version = cluster.changes.since(after, limit, job_id)
    of_kind: dict[str, list[ChangedPart]] = {}
    for part in parts:
        of_kind.setdefault(part.kind, []).append(part)
    workers: dict[str, list[WorkerStatus]] = {}
    for part in of_kind.get("worker", ()) if has_workers else ():
        job = cluster.jobs[part.job_id]
        workers.setdefault(part.job_id, []).append(status.worker_status(cluster, job, job.workers[part.name]))
    kinds = ("job", "times") if has_workers else ("job",)
    changed_jobs = {part.job_id: None for kind in kinds for part in of_kind.get(kind, ())}
    nodes: Columns = columns_of(
        [status.node_status(step.now, cluster.nodes[part.name]) for part in of_kind.get("node", ())]
    )
    events = [] if job_id else [event for at, event in cluster.recent_events if after < at <= version]
    return Changes(
        version=version,
        at=step.now,
        is_whole=is_whole,
        is_last=version == cluster.changes.version,
        jobs=[status.job_status(cluster, cluster.jobs[name], has_workers=False) for name in changed_jobs],
        workers={name: columns_of(rows) for name, rows in workers.items()},
        nodes=nodes,
        gone_jobs=[part.job_id for part in of_kind.get("gone-job", ())],
        gone_nodes=[part.name for part in of_kind.get("gone-node", ())],
        events=events[-MAX_SENT_EVENTS:],
    )


def _is_known(cluster: Cluster, version: int) -> bool:
    return cluster.changes.floor <= version <= cluster.changes.version


def _is_gone(cluster: Cluster, parked: ParkedWatch) -> bool:
    return bool(parked.job_id) and parked.job_id not in cluster.jobs


def _consider(step: MasterStep, key: TimerKey, parked: ParkedWatch) -> None:
    """Answer a watch with a change: at once about a decision for the job, else when the changes have settled."""
    decided = step.cluster.changes.version_of(ChangedPart("job", parked.job_id)) if parked.job_id else 0
    has_settled = parked.has_workers and step.now >= parked.settled_at
    if decided > parked.after_version or has_settled or _is_gone(step.cluster, parked):
        _tell(step, key, parked)
    elif parked.has_workers:
        step.cluster.timers.arm(key, min(parked.settled_at, parked.ends_at))


def _tell(step: MasterStep, key: TimerKey, parked: ParkedWatch) -> None:
    watches = step.cluster.watches[parked.job_id]
    del watches[key]
    if not watches:
        del step.cluster.watches[parked.job_id]
    step.cluster.timers.cancel(key)
    answer: Changes | Refused
    if _is_gone(step.cluster, parked):
        answer = Refused(code="not-found", reason=f"job {parked.job_id} ended long ago and is not known any more.")
    else:
        answer = changes_since(step, parked.job_id, parked.after_version, has_workers=parked.has_workers)
    step.send(parked.peer, answer, parked.request_id)
