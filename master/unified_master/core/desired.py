"""The desired set of a node, as its agent receives it."""

from __future__ import annotations

from itertools import zip_longest

from msgspec.structs import replace

from unified.job.spec import RoleSpec, has_range
from unified.protocol.agent_master import DesiredJob, DesiredWorker, DesiredWorkers
from unified_master.core import copy_nodes, directory
from unified_master.core.state import JobRecord, NodeRecord, WorkerRecord
from unified_master.core.step import MasterStep

RESTART_GRACE_S = 2.0
"""Longest grace of a failed worker's peers: its restart waits for their ends."""


def send(step: MasterStep, node: NodeRecord) -> None:
    """Send the whole desired set under a new generation; later, if the node's agent is not connected."""
    node.generation += 1
    if node.is_connected:
        _send(step, node)


def send_again(step: MasterStep, node: NodeRecord) -> None:
    """Send the same generation again to an agent that seems to lack it, with all descriptions and directories."""
    node.notified.clear()
    _send(step, node)


def _send(step: MasterStep, node: NodeRecord) -> None:
    node.sent_at = step.now
    jobs = step.cluster.jobs
    groups: dict[tuple[str, str, int], list[int]] = {}
    workers = [
        _worker(jobs[incarnation.job_id], node.incarnations[incarnation], groups)
        for incarnation in sorted(node.incarnations)
    ]
    job_ids = sorted(
        {incarnation.job_id for incarnation in node.incarnations} | {incarnation.job_id for incarnation in node.leaving}
    )
    known = [jobs[job_id] for job_id in job_ids if job_id in jobs]
    notified, node.notified = node.notified, {job.job_id: job.revision for job in known}
    num_elsewhere = sum(
        worker.kind == "worker"
        for other in step.cluster.nodes_of_host(node.info.host_id)
        if other is not node
        for worker in other.incarnations.values()
    )
    described = [
        DesiredJob(
            job_id=job.job_id,
            spec=None if job.job_id in notified else job.spec,
            directory=[] if notified.get(job.job_id) == job.revision else directory.entries_of(job),
            stop_grace_s=_stop_grace_s(job, node),
            is_interrupted=job.is_interrupted,
            copy_node=copy_nodes.address_of(step.cluster, job),
            earlier_nodes=copy_nodes.earlier_nodes(step.cluster, job, node),
        )
        for job in known
    ]
    desired = DesiredWorkers(generation=node.generation, workers=workers, jobs=described, num_elsewhere=num_elsewhere)
    step.send(node.peer, desired)


def _stop_grace_s(job: JobRecord, node: NodeRecord) -> float | None:
    if job.is_forced:
        return 0.0
    if job.is_ending or job.was_suspended or not node.is_in_service:  # planned: workers may save their state
        return None
    return min(job.spec.stop_grace_s, RESTART_GRACE_S)


def _worker(job: JobRecord, worker: WorkerRecord, groups: dict[tuple[str, str, int], list[int]]) -> DesiredWorker:
    """Return a worker as its agent receives it; `groups` caches the devices of each group for its other workers."""
    if worker.kind == "store":
        return DesiredWorker(job_id=job.job_id, name=worker.name, worker_incarnation=worker.incarnation, kind="store")
    role: RoleSpec = job.spec.role(worker.role)
    total = len(job.members(role)) if has_range(role) else role.total
    place = role.place(worker.rank)
    group = (job.job_id, role.name, place.node_rank)
    if group not in groups:
        groups[group] = _group_devices(job, role, group[-1])
    return DesiredWorker(
        job_id=job.job_id,
        name=worker.name,
        worker_incarnation=worker.incarnation,
        kind="worker",
        role=worker.role,
        place=replace(place, world_size=total),
        devices=worker.devices,
        group_devices=groups[group],
        run=worker.run,
        notice=worker.notice,
    )


def _group_devices(job: JobRecord, role: RoleSpec, group: int) -> list[int]:
    """Return the devices of a role's workers in one group: the first of each by local rank, then the second of each.

    The local rank of a worker with whole devices is then the index of its first. A shared device is listed once.
    """
    if role.kind != "elastic" and not role.rank_based_gpu_selection:
        return []
    members = job.ranks(role.name)[group * role.per_group : (group + 1) * role.per_group]
    rows = zip_longest(*(worker.devices for worker in members))
    return list(dict.fromkeys(index for row in rows for index in row if index is not None))
