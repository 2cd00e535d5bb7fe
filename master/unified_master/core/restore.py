"""Restores the master's state from its store."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable

import msgspec

from unified.errors import UnifiedError
from unified.job.spec import JobSpec
from unified.protocol.records import EventRecord, JobWorkerIncarnation, NodeState, Stage, WorkerState
from unified_master.core import presence
from unified_master.core.changes import ChangeLog
from unified_master.core.clients.watching import MAX_SENT_EVENTS
from unified_master.core.health import hangs
from unified_master.core.nodes import FORGET_S, GRACE_LEASES, NodeMemory
from unified_master.core.rounds import incarnations, rendezvous
from unified_master.core.rounds.jobs import new_workers
from unified_master.core.state import MAX_EVENTS, JobRecord, NodeRecord, WorkerRecord
from unified_master.core.step import MasterStep, count

Record = tuple[str, str, bytes]
"""Kind, key, data: as in `SaveRecord`."""


class RestoreError(UnifiedError):
    """The store holds what this version cannot read."""


def newest_time(records: Iterable[Record], events: Iterable[EventRecord]) -> float:
    """Return the newest time in the records of earlier terms, or 0.0 if they have none."""
    times = [event.at for event in events]
    for data in (data for kind, _, data in records if kind == "job"):
        with contextlib.suppress(msgspec.DecodeError):  # `restore` raises for it
            times.append(msgspec.msgpack.decode(data, type=JobRecord).account.spent.since)
    return max(times, default=0.0)


def restore(step: MasterStep, records: Iterable[Record], events: Iterable[EventRecord]) -> None:
    """Rebuild the cluster; nothing is restarted, nothing is sent until agents are back."""
    by_kind: dict[str, dict[str, bytes]] = {}
    for kind, key, data in records:
        by_kind.setdefault(kind, {})[key] = data
    kept = list(events)
    step.cluster.next_event = max((event.sequence + 1 for event in kept), default=1)
    try:
        _meta(step, by_kind.get("meta", {}))
        _nodes(step, by_kind.get("node", {}), float(by_kind.get("meta", {}).get("away_until", b"0")))
        _jobs(step, by_kind)
    except (msgspec.DecodeError, ValueError, KeyError) as error:
        raise RestoreError(
            f"a record of the store cannot be read ({error}): it was written by another version, or is damaged. "
            "Move the state directory away to start with an empty one; running workers will then be stopped."
        ) from error
    for name in step.cluster.nodes:
        step.show_node(name)
    for job in step.cluster.jobs.values():
        step.show_job(job)
        for worker in job.workers.values():
            step.touch_progress(job, worker)
    step.cluster.recent_events.extendleft(
        (step.cluster.changes.tick(), event) for event in kept[: -MAX_SENT_EVENTS - 1 : -1]
    )
    for event in kept:
        if event.job in step.cluster.jobs:
            step.cluster.events.setdefault(event.job, deque(maxlen=MAX_EVENTS)).append(event)


def _meta(step: MasterStep, meta: dict[str, bytes]) -> None:
    if "term" in meta:
        step.cluster.term = int(meta["term"]) + 1
        step.cluster.changes = ChangeLog(step.cluster.first_number)
        step.report("master-restarted", f"the master is back ({count(step.cluster.term, 'restart')} so far)")
    step.save("meta", "term", str(step.cluster.term).encode())
    step.cluster.next_sequence = int(meta.get("next_sequence", b"1"))


def _nodes(step: MasterStep, nodes: dict[str, bytes], away_until: float) -> None:
    """Restore the nodes; alive nodes have some time to come back, at least as long as they were told to wait."""
    cluster = step.cluster
    grace_s = max(GRACE_LEASES * cluster.intervals.lease_s, away_until - step.now)
    if grace_s > away_until - step.now:
        step.save("meta", "away_until", None)
    for name in sorted(nodes):
        memory = msgspec.msgpack.decode(nodes[name], type=NodeMemory)
        node = NodeRecord(
            info=memory.info,
            state=memory.state,
            reason=memory.reason,
            drained=memory.drained,
            check=memory.check,
            generation=cluster.first_number,
            seen_at=step.now,
        )
        cluster.nodes[name] = node
        if node.state is NodeState.ALIVE:
            cluster.leases.renew(name, step.now, lease_s=grace_s)
        else:
            cluster.timers.arm(("forget", name), step.now + FORGET_S)


def _jobs(step: MasterStep, by_kind: dict[str, dict[str, bytes]]) -> None:
    loaded = [msgspec.msgpack.decode(data, type=JobRecord) for data in by_kind.get("job", {}).values()]
    for job in sorted(loaded, key=lambda job: job.sequence):
        job.spec = msgspec.msgpack.decode(by_kind["spec"][job.job_id], type=JobSpec)
        job.workers = new_workers(job)
        step.cluster.jobs[job.job_id] = job
    workers = [msgspec.msgpack.decode(data, type=WorkerRecord) for data in by_kind.get("worker", {}).values()]
    order = {
        (job.job_id, role.name): number
        for job in step.cluster.jobs.values()
        for number, role in enumerate(job.spec.roles)
    }
    for worker in sorted(workers, key=lambda worker: (order.get((worker.job_id, worker.role), 1 << 30), worker.rank)):
        if (owner := step.cluster.jobs.get(worker.job_id)) is not None:
            owner.workers[worker.name] = worker
            _worker(step, worker)
            if owner.stage is not Stage.STOPPED:
                _past(step, worker)
            hangs.progressed(step, owner, worker)
    for job in step.cluster.jobs.values():
        presence.restore(job)
        job.holders = {name: worker.name for worker in job.workers.values() for name in worker.names}
        if job.restart_at is not None:
            step.cluster.timers.arm(("restart", job.job_id), job.restart_at)
        if job.charges or job.given_up:  # some may have expired while no master ran
            step.cluster.timers.arm(("refill", job.job_id), step.now)
        for role in job.roles.values():
            if role.group_due_at is not None:
                step.cluster.timers.arm(("group", job.job_id, role.name), role.group_due_at)
            for what, at in (("replace", role.waits_until), ("change", role.change_due_at)):
                if at is not None:
                    step.cluster.timers.arm((what, job.job_id, role.name), at)
        for suspected in (role.name for role in job.roles.values() if role.suspect):
            until = step.now + step.cluster.intervals.settle_s
            step.cluster.timers.arm(("settle", job.job_id, suspected), until)
        step.to_advance[job.job_id] = None
    step.wants_schedule = True


def _worker(step: MasterStep, worker: WorkerRecord) -> None:
    """Put a worker back on its node: its allocation, and its incarnation that is desired or still leaves."""
    node = step.cluster.nodes.get(worker.node)
    if node is None:
        return
    if worker.allocation is not None:
        node.hold(worker, worker.allocation)
    if worker.is_desired:
        node.incarnations[worker.incarnation_id] = worker
        if worker.state is WorkerState.STARTING:
            step.cluster.timers.arm(incarnations.start_timer(worker), step.now + step.cluster.intervals.start_s)
        elif worker.is_joining and (job := step.cluster.jobs.get(worker.job_id)) is not None:
            rendezvous.arm_join(step, job, worker)
    elif worker.incarnation >= 0 and worker.state is not WorkerState.EXITED and node.state is NodeState.ALIVE:
        incarnations.expect_end(step, node, worker.incarnation_id, worker.allocation)


def _past(step: MasterStep, worker: WorkerRecord) -> None:
    """Expect the ends of earlier incarnations on other nodes: earlier confirmations are not saved."""
    for past in worker.past:
        node = step.cluster.nodes.get(past.node)
        if node is not None and node.state is NodeState.ALIVE and past.node != worker.node:
            incarnation = JobWorkerIncarnation(worker.job_id, worker.name, past.incarnation)
            incarnations.expect_end(step, node, incarnation, None, is_unknown=True)
