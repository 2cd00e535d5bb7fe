"""Restarts of workers: the others that must restart with them, where, and when."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from unified.job.spec import RoleSpec
from unified.protocol.records import JOB_MOVES, Failure, Stage, WorkerState
from unified_master.core import budgets
from unified_master.core.node_capacity import Unit
from unified_master.core.rounds import incarnations, jobs, rendezvous
from unified_master.core.scheduling import waiting
from unified_master.core.scheduling.packing import PlacementPlan
from unified_master.core.scheduling.placement import control_unit, place_within_ranges, units_of
from unified_master.core.state import JobRecord, WorkerRecord
from unified_master.core.step import MasterStep


class Cause(NamedTuple):
    """Reason for which workers restart, and what the restart is charged to."""

    event: str
    """Name of the decision in the event log."""
    why: str
    """Reason of the decision, and of each worker that restarts."""
    role: str = ""
    worker: str = ""
    node: str = ""
    failed: tuple[WorkerRecord, Failure] | None = None
    """Worker or store host that failed, and how; None: nothing failed, as after a request or a drain."""
    delay_s: float = 0.0
    """Back-off before the next incarnations begin."""
    is_role_limited: bool = False
    """True if the role's own limit counts, and not the job's, even when the whole job restarts."""
    is_excluding: bool = False
    """True if the failed worker's node was excluded. Then a job that can never fit without the node fails."""


def restart(step: MasterStep, job: JobRecord, names: Iterable[str] | None, cause: Cause) -> None:
    """Restart workers and those that depend on them: the only way to a next incarnation of a worker with a place.

    The restart of a whole job after a failure is charged to the job, which fails if its limit is used up. A job without
    room for the restart goes back into the queue, as does one that was suspended.

    Args:
        names: workers; None: the whole job, which is back in INIT then.
    """
    if job.suspended is not None:
        _requeue(step, job, cause.why, cause.event)
        return
    charged = cause.failed if names is None and not cause.is_role_limited else None
    if charged is not None and (refusal := budgets.job_refusal(job)) is not None:
        jobs.fail(step, job, *charged, *refusal)
        return
    workers, found = _stop(step, job, _all_workers(job) if names is None else names, cause.why)
    is_last = cause.is_excluding and not found.fits and not waiting.could_ever_fit(step.cluster, job)
    if cause.failed is not None and is_last:
        limit = budgets.node_limit(job.spec.role(cause.failed[0].role))
        why = f"the limit {limit} is used up and {found.reason}"
        jobs.fail(step, job, *cause.failed, budgets.NODE_LIMIT, why)
        return
    if charged is not None:
        budgets.charge_restart(step, job)
    if names is None:
        job.num_restarts += 1
        _return_to_init(job)
    step.decide(cause.event, cause.why, job, cause.role, cause.worker, cause.node)
    if found.fits:
        _begin(step, job, workers, cause.delay_s)
    else:
        _requeue(step, job, f"waits for room to restart: {found.reason}")


def _stop(
    step: MasterStep, job: JobRecord, names: Iterable[str], reason: str
) -> tuple[list[WorkerRecord], PlacementPlan]:
    """End the named workers and those that depend on them. Workers whose node is lost or excluded move. Staying workers
    of their roles are notified.

    Returns:
        The workers that ended and must begin again, and the new places, or why there are none.
    """
    planned = {role.name for role in job.elastic_roles() if rendezvous.is_planned(job, role.name)}
    scope, moving = _widen(step, job, set(names))
    if is_store_leaving(step, job) and any(_is_broken(job, role, scope) for role in job.elastic_roles()):
        leave_store(step, job)
        scope, moving = _widen(step, job, scope)
    if (store := job.store) is not None and store.state is WorkerState.STARTING and unfinished_elastic(job) <= scope:
        incarnations.end(step, job, store)  # it may be as late as they are, which is charged already
    is_new_store = is_store_lost(job)
    workers = [worker for worker in job.workers.values() if worker.name in scope]
    for worker in workers:
        worker.reason = reason  # before `end`, which publishes it to callers
        step.touch_worker(job, worker)
        incarnations.end(step, job, worker)
    for role in job.elastic_roles():
        if is_new_store or any(worker.role == role.name for worker in workers):
            rendezvous.break_round(step, job, role.name, reason)
    plan = _move(step, job, [*moving, *_moving_store(step, job)])
    for role in job.elastic_roles():
        rendezvous.await_absent(step, job, role, is_planned=role.name in planned)
    return [worker for worker in workers if not job.is_absent(worker)], plan


def _begin(step: MasterStep, job: JobRecord, workers: list[WorkerRecord], delay_s: float) -> None:
    for worker in workers:
        worker.is_held = True
        step.touch_worker(job, worker)
    for name in {worker.role: None for worker in workers}:
        record = job.roles[name]
        record.num_restarts += 1
        record.suspect = record.pending = ""
        step.cluster.timers.cancel(("settle", job.job_id, name))
    step.touch_job(job)
    begin_at = max(step.now + delay_s, job.restart_at or 0.0)
    if begin_at <= step.now:
        begin_held(step, job, workers if job.restart_at is None else job.workers.values())
    else:
        job.restart_at = begin_at
        step.cluster.timers.arm(("restart", job.job_id), begin_at)


def _requeue(step: MasterStep, job: JobRecord, reason: str, event: str = "job-requeued") -> None:
    """Give up every place of a job, so that it waits in the queue like any other."""
    _return_to_init(job)
    job.is_placed = False
    job.attempt = None
    job.restart_at = None
    step.cluster.timers.cancel(("restart", job.job_id))
    for role in job.roles.values():
        role.suspect = role.pending = ""
        role.waits_until = role.change_due_at = None
    for worker in job.workers.values():
        if worker.state is not WorkerState.EXITED:
            worker.reason = "the job waits for room" if job.suspended is None else reason
        step.touch_worker(job, worker)
        incarnations.end(step, job, worker)
        incarnations.release(step, job, worker)
        worker.is_held = False
        worker.node_rank = -1
    step.wants_schedule = True
    step.decide(event, reason, job)


def _return_to_init(job: JobRecord) -> None:
    if job.stage is not Stage.INIT:
        job.stage = JOB_MOVES.check(job.job_id, job.stage, Stage.INIT)


def _all_workers(job: JobRecord) -> list[str]:
    """Return the names of all workers, without the store's."""
    return [worker.name for worker in job.workers.values() if worker.kind == "worker"]


def begin_held(step: MasterStep, job: JobRecord, workers: Iterable[WorkerRecord]) -> None:
    """Begin the incarnations whose back-off is over, of all workers or of those that alone have one."""
    job.restart_at = None
    step.cluster.timers.cancel(("restart", job.job_id))
    step.touch_job(job)
    for worker in list(workers):
        if worker.is_held:
            incarnations.begin(step, job, worker, worker.reason)
    rendezvous.settle_store(step, job, "its last incarnation or its node is gone")


def _widen(step: MasterStep, job: JobRecord, names: set[str]) -> tuple[set[str], list[Unit]]:
    """Return all workers that must restart with `names`, and the units that must move.

    An elastic role restarts whole, except workers that stay. A unit moves whole. Failed workers of a role that restarts
    do so, too. Without its store no elastic role can go on.
    """
    kinds = {role.name: role.kind for role in job.spec.roles}
    if is_store_lost(job):
        names |= broken_with_store(step, job)
    while True:
        before = len(names)
        is_moving = not all(incarnations.has_good_place(step, job, job.workers[name]) for name in names)
        moving = [
            unit
            for unit in (units_of(job.spec) if is_moving else ())
            if any(member.worker in names for member in unit.members)
            and not all(incarnations.has_good_place(step, job, job.workers[member.worker]) for member in unit.members)
        ]
        names.update(member.worker for unit in moving for member in unit.members)
        roles = {job.workers[name].role for name in names}
        stay = {
            name for role in roles if kinds[role] == "elastic" for name in rendezvous.staying(step, job, role, names)
        }
        names.update(
            worker.name
            for role in roles
            for worker in job.ranks(role)
            if (kinds[role] == "elastic" or worker.has_failed) and worker.name not in stay
        )
        if len(names) == before:
            return names, moving


def is_store_lost(job: JobRecord) -> bool:
    """Return True if the store host is needed, and its incarnation is over."""
    store = job.store
    return store is not None and (not store.is_desired or store.state is WorkerState.EXITED)


def is_store_leaving(step: MasterStep, job: JobRecord) -> bool:
    """Return True if the store host is on a node that is out of service."""
    return job.store is not None and is_on_leave(step, job.store)


def is_on_leave(step: MasterStep, worker: WorkerRecord) -> bool:
    """Return True if the worker, or store host, is on a node that is out of service."""
    node = step.cluster.nodes.get(worker.node)
    return worker.is_desired and node is not None and not node.is_in_service


def leave_store(step: MasterStep, job: JobRecord) -> None:
    """End the store host; another begins with the workers that restart."""
    if job.store is not None:
        incarnations.end(step, job, job.store)
        incarnations.release(step, job, job.store)


def _is_broken(job: JobRecord, role: RoleSpec, restarting: set[str]) -> bool:
    return any(
        worker.name in restarting or (worker.notice is not None and worker.notice.kind == "broken")
        for worker in job.ranks(role.name)
    )


def unfinished_elastic(job: JobRecord) -> set[str]:
    """Return the workers of the elastic roles that are not wholly done."""
    open_roles = [
        role
        for role in job.elastic_roles()
        if rendezvous.missed(job, role) or not all(worker.is_done for worker in job.members(role))
    ]
    return {worker.name for role in open_roles for worker in job.members(role)}


def broken_with_store(step: MasterStep, job: JobRecord) -> set[str]:
    """Return the workers that must restart if the store host is lost: those that it serves, and that cannot rejoin."""
    served = {name for name in unfinished_elastic(job) if job.workers[name].run and not job.workers[name].is_held}
    return served.difference(*(rendezvous.staying(step, job, role.name) for role in job.elastic_roles()))


def outlives_store(step: MasterStep, job: JobRecord) -> bool:
    """Return True if each elastic role that the store host serves has workers that stay when the store host is lost."""
    broken = {job.workers[name].role for name in broken_with_store(step, job)}
    return all(rendezvous.staying(step, job, role) for role in broken)


def _moving_store(step: MasterStep, job: JobRecord) -> list[Unit]:
    """Return the store host's unit, if the job places the store and it must go to another node."""
    unit, store = control_unit(job.spec), job.store
    if unit is None or store is None or not is_store_lost(job) or incarnations.has_good_place(step, job, store):
        return []
    incarnations.end(step, job, store)
    return [unit]


def _move(step: MasterStep, job: JobRecord, moving: list[Unit]) -> PlacementPlan:
    if not moving:
        return PlacementPlan()
    for unit in moving:
        for member in unit.members:
            incarnations.release(step, job, job.workers[member.worker])
    found = place_within_ranges(step.cluster, job, moving)
    for one in found.assignments:
        incarnations.allocate(step, job, job.workers[one.worker], step.cluster.nodes[one.node], one.allocation)
    return found
