"""Reports of the state for clients."""

from __future__ import annotations

from unified.protocol.client_master import JobLine, JobStatus, NodeStatus, RoleStatus, Story, WorkerStatus
from unified.protocol.records import SAVE_STEP, SAVE_WAIT_S, NodeResources, WorkerState
from unified_master.core import budgets
from unified_master.core.node_capacity import EPSILON
from unified_master.core.state import Cluster, JobRecord, NodeRecord, WorkerRecord


def job_status(cluster: Cluster, job: JobRecord, *, has_workers: bool = True) -> JobStatus:
    """Return everything about one job; on demand without its workers, which may be many."""
    return JobStatus(
        job_id=job.job_id,
        name=job.spec.name,
        stage=job.stage,
        exit_code=job.exit_code,
        reason=job.reason,
        submitted_at=job.submitted_at,
        started_at=job.started_at,
        ended_at=job.ended_at,
        submitted_by=job.spec.submitted_by,
        num_restarts=job.num_restarts,
        roles=[
            RoleStatus(
                name=role.name,
                kind=role.kind,
                total=role.total,
                is_driver=role.is_driver and not job.is_service(role),
                round=job.roles[role.name].round,
                num_restarts=job.roles[role.name].num_restarts,
            )
            for role in job.spec.roles
        ],
        workers=[
            worker_status(cluster, job, worker)
            for worker in (job.workers.values() if has_workers else ())
            if worker.kind == "worker"
        ],
        end=job.end,
        outcome=job.outcome,
        suspended=job.suspended,
        num_leaving=len(cluster.leaving_of(job.job_id)),
        labels=job.spec.labels,
        budgets=budgets.in_use(job),
        times=job.account.spent if job.account.spent.since else None,
    )


def job_line(now: float, job: JobRecord) -> JobLine:
    return JobLine(
        job_id=job.job_id,
        name=job.spec.name,
        stage=job.stage,
        exit_code=job.exit_code,
        reason=f"{job.reason}{_waiting_save(job)}",
        submitted_at=job.submitted_at,
        ended_at=job.ended_at,
        num_workers=sum(role.total for role in job.spec.roles),
        started_at=job.started_at,
        num_restarts=max([job.num_restarts, *(role.num_restarts for role in job.roles.values())]),
        failure=job.end.failure.summary if job.end is not None else "",
        suspended=job.suspended,
        labels=job.spec.labels,
        stalled_since=job.account.spent.stalled_since(now),
    )


def _waiting_save(job: JobRecord) -> str:
    """Return the end of a job's reason if its first rank 0 reports that a save waits for its store; else empty."""
    first = next((each for each in job.workers.values() if each.kind == "worker" and each.rank == 0), None)
    metrics = first.progress.metrics if first is not None and first.progress is not None else {}
    waited_s = metrics.get(SAVE_WAIT_S)
    if first is None or not first.has_stepped:  # the metrics are of the incarnation before
        return ""
    if job.ended_at is not None or not isinstance(waited_s, int | float) or not waited_s > 0:
        return ""
    return f"; a save of step {metrics.get(SAVE_STEP)} has waited for the store for {waited_s:.0f} s"


def node_status(now: float, node: NodeRecord) -> NodeStatus:
    return NodeStatus(
        node=node.name,
        state=node.state,
        hostname=node.info.hostname,
        address=node.info.address,
        resources=node.info.resources,
        free=_free(node),
        labels=node.info.labels,
        num_workers=sum(1 for worker in node.incarnations.values() if worker.kind == "worker"),
        seen_s_ago=round(max(0.0, now - node.seen_at), 3),
        reason=node.reason,
        drained=node.drained if node.drained is not None else node.stops or None,
        num_leaving=len(node.leaving),
        check=node.check,
        metrics=node.info.metrics,
    )


def story(
    cluster: Cluster, job: JobRecord, worker: WorkerRecord | None, limit: int, before: int | None = None
) -> Story:
    """Return the events of a job, or those that concern one worker: its own, its role's and the whole job's."""
    events = [e for e in cluster.events.get(job.job_id, ()) if before is None or e.sequence < before]
    if worker is not None:
        of_worker = ("", worker.name)
        of_role = ("", worker.role)
        events = [event for event in events if event.worker in of_worker and (event.worker or event.role in of_role)]
    return Story(events=events[-limit:] if limit > 0 else [])


def worker_status(cluster: Cluster, job: JobRecord, worker: WorkerRecord) -> WorkerStatus:
    place = job.spec.role(worker.role).place(worker.rank)
    node = cluster.nodes.get(worker.node)
    is_coming = worker.is_held or job.is_waiting or worker.incarnation < 0 or job.is_absent(worker)
    return WorkerStatus(
        name=worker.name,
        role=worker.role,
        rank=place.rank,
        local_rank=place.local_rank,
        node_rank=place.node_rank,
        incarnation=max(0, worker.incarnation),
        state=WorkerState.PENDING if is_coming else worker.state,
        node=worker.node,
        address=node.info.address if node is not None else "",
        pid=worker.pid,
        devices=worker.devices,
        num_failures=worker.num_failures,
        progress=worker.progress,
        log_file=worker.log_file,
        reason=_reason(worker),
        output_lost=worker.output_lost,
        num_unread_errors=worker.num_unread_before + (worker.progress.num_unread_errors if worker.progress else 0),
    )


def _reason(worker: WorkerRecord) -> str:
    if worker.waits_for:
        return f"waits for {worker.waits_for}"
    return f"failed with {worker.cleans_up}, and cleans up" if worker.cleans_up else worker.reason


def _free(node: NodeRecord) -> NodeResources:
    has = node.info.resources
    left = node.capacity("GPU", len(has.devices))
    return NodeResources(
        cpu=max(0.0, left.cpu),
        memory_mb=max(0.0, left.memory_mb),
        disk_mb=max(0.0, left.disk_mb),
        devices=[each for each in has.devices if left.devices.get(("device", each.index), 1.0) > 1 - EPSILON],
        user_defined={name: max(0.0, amount) for name, amount in left.user_defined.items()},
    )
