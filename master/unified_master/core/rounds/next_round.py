"""Next rounds of elastic roles that run: uncharged restarts of peers, and the growth of roles with a range of nodes.

A role grows in three steps. Groups without a place get one, and start while the others train. When the new groups are
READY, the others are notified. When the others have left their round, or their time is over, the next round is sealed;
workers that cannot rejoin then restart as processes.
"""

from __future__ import annotations

from unified.errors import listed
from unified.job.spec import RoleSpec, has_range
from unified.protocol.agent_master import RoundNotice
from unified.protocol.records import Stage, WorkerState
from unified_master.core import directory
from unified_master.core.rounds import incarnations, rendezvous
from unified_master.core.rounds.restart import Cause, is_on_leave, is_store_leaving, leave_store, restart
from unified_master.core.scheduling import waiting
from unified_master.core.scheduling.packing import PlacementPlan
from unified_master.core.scheduling.placement import place_within_ranges, units_of
from unified_master.core.state import JobRecord, WorkerRecord
from unified_master.core.step import MasterStep, count


def gather(step: MasterStep, job: JobRecord) -> None:
    """Take the next step towards rounds that wait for workers of the last rounds."""
    if job.stage is not Stage.RUNNING:
        return
    for role in job.elastic_roles():
        workers = job.members(role)
        kinds = {worker.notice.kind for worker in workers if worker.notice is not None and worker.is_desired}
        if "broken" in kinds:
            behind = [worker for worker in workers if _is_left_behind(worker) or is_on_leave(step, worker)]
            restart_along(step, job, behind)
        elif kinds or has_range(role):
            _change(step, job, role, workers, is_notified=bool(kinds))


def restart_along(step: MasterStep, job: JobRecord, workers: list[WorkerRecord]) -> None:
    """Restart workers because their round is broken. Only the failure that broke it is charged."""
    if not workers:
        return
    names = [worker.name for worker in workers]
    first = workers[0]
    text = f"{listed(names)}: restarts for the next round of role {first.role}"
    why = f"{text}: round {job.roles[first.role].round} is broken"
    restart(step, job, names, Cause("worker-restarts-along", why, first.role, first.name, first.node))


def begin_anew(step: MasterStep, job: JobRecord, role: str, reason: str) -> None:
    """Break the round of a role without ended workers; the next round begins with all of them."""
    step.decide("round-broken", reason, job, role)
    rendezvous.break_round(step, job, role, reason)


def grow(step: MasterStep) -> None:
    """Place groups that have no place: at once if a round waits for them, else after some time."""
    for job in step.cluster.jobs.values():
        if job.stage is not Stage.RUNNING or job.is_ending:
            continue
        for role in job.elastic_roles():
            if not job.absent(role) or all(one.is_done or one.incarnation < 0 for one in job.ranks(role.name)):
                continue  # a role that is done needs no place, even after a lost node
            if job.roles[role.name].waits_until is not None:
                _fill(step, job, role, "the next round waits for it")
            else:
                _grow_later(step, job, role)


def may_change(job: JobRecord, role: RoleSpec) -> bool:
    """Return True if the role is in an intact round, so that its workers can leave it at a point of their own."""
    old = [worker for worker in job.members(role) if worker.run is not None]
    return (
        job.stage is Stage.RUNNING
        and bool(old)
        and all(worker.is_desired and worker.state is WorkerState.RUNNING and not worker.is_joining for worker in old)
        and all(worker.notice is None or worker.notice.kind == "planned" for worker in old)
    )


def announce(step: MasterStep, job: JobRecord, role: RoleSpec, reason: str, within_s: float) -> None:
    """Notify the workers of the round in progress that its members will change."""
    record = job.roles[role.name]
    notice = RoundNotice(round=record.round, kind="planned", reason=reason, within_s=within_s)
    for worker in job.members(role):
        if worker.run is not None and worker.is_desired and worker.notice is None:
            worker.notice = notice
            step.touch_worker(job, worker)
            step.touch_node(worker.node)
    due_at = step.now + within_s
    if record.change_due_at is None or due_at < record.change_due_at:
        record.change_due_at = due_at
        step.cluster.timers.arm(("change", job.job_id, role.name), due_at)
    text = f"{reason}; its workers have {within_s:g} s to leave round {record.round}"
    step.decide("round-changes", text, job, role.name)


def growth_due(step: MasterStep, job: JobRecord, name: str) -> None:
    """Let a role grow if it runs undisturbed and no job waits for room; a disturbed role grows later."""
    role = job.spec.role(name)
    if job.stage is not Stage.RUNNING or not job.absent(role) or waiting.blocker(step.cluster) is not None:
        return
    if _is_steady(job, role):
        job.roles[name].grown_at = step.now
        _fill(step, job, role, f"role {name} grows")
    else:
        _grow_later(step, job, role)


def is_newcomer(job: JobRecord, worker: WorkerRecord) -> bool:
    """Return True if the worker starts for a later round while others of its role are in an intact one."""
    role = job.spec.role(worker.role)
    if not has_range(role) or worker.run is not None or worker.incarnation < 0:
        return False
    others = [peer for peer in job.members(role) if peer.run is not None and peer.state is WorkerState.RUNNING]
    return bool(others) and not any(peer.notice is not None and peer.notice.kind == "broken" for peer in others)


def retire(step: MasterStep, job: JobRecord, worker: WorkerRecord, reason: str) -> None:
    """Take the place of a worker's group back; the role goes on without the group."""
    role = job.spec.role(worker.role)
    group = worker.rank // role.per_group
    for peer in job.ranks(role.name)[group * role.per_group : (group + 1) * role.per_group]:
        peer.reason = f"role {role.name} goes on without it: {reason}"
        incarnations.end(step, job, peer)
        incarnations.release(step, job, peer)
        peer.is_held, peer.node_rank = False, -1
        step.touch_worker(job, peer)
        directory.publish(step, job, peer)
    step.report("role-does-not-grow", reason, job, role.name, worker.name, worker.node)


def _is_left_behind(worker: WorkerRecord) -> bool:
    """Return True if the next round needs a restart of the worker: it is done, or runs and cannot rejoin."""
    is_over = worker.is_done and worker.is_desired
    return is_over or (worker.is_desired and worker.state is WorkerState.RUNNING and not worker.can_rejoin)


def _change(
    step: MasterStep, job: JobRecord, role: RoleSpec, workers: list[WorkerRecord], *, is_notified: bool
) -> None:
    """Take the next step of a planned change."""
    new = [worker for worker in workers if worker.run is None]
    old = [worker for worker in workers if worker.run is not None and worker.is_desired]
    if not old or not (new or is_notified):
        return
    if has_range(role) and any(worker.is_done for worker in old):
        for worker in new:
            if worker.rank % role.per_group == 0:
                retire(step, job, worker, f"role {role.name} is nearly done")
    if any(worker.state is not WorkerState.RUNNING for worker in old if not worker.is_done):
        return
    if all(worker.is_done for worker in old) and (has_range(role) or not new):
        return
    if is_notified:
        _end_round(step, job, role, workers, old)
    elif all(map(rendezvous.is_ready, new)) and not any(worker.is_done for worker in old):
        groups = count(len(workers) // role.per_group, "node")
        reason = f"the next round of role {role.name} has {groups} instead of {len(old) // role.per_group}"
        announce(step, job, role, reason, step.cluster.intervals.change_s)


def _end_round(
    step: MasterStep, job: JobRecord, role: RoleSpec, workers: list[WorkerRecord], old: list[WorkerRecord]
) -> None:
    """End a round whose workers have been notified: when all have left it, or their time is over.

    Workers and a store on nodes out of service then move; workers that cannot rejoin restart.
    """
    due_at = job.roles[role.name].change_due_at
    moves_store = is_store_leaving(step, job)
    leaving = [worker for other in job.elastic_roles() for worker in job.members(other)] if moves_store else old
    is_due = due_at is not None and step.now >= due_at
    if not is_due and not all(_has_said_left(worker) for worker in leaving if worker.notice is not None):
        return
    moving = [worker for worker in workers if not incarnations.has_good_place(step, job, worker)]
    behind = [worker for worker in old if not worker.rejoins and incarnations.has_good_place(step, job, worker)]
    if moves_store:
        leave_store(step, job)
    if moving or behind or moves_store:
        why = f"restarts for a round of role {role.name} with {count(len(workers) // role.per_group, 'node')}"
        if moving or moves_store:
            why = next(worker.notice.reason for worker in old if worker.notice is not None)
        names = [worker.name for worker in [*moving, *behind]]
        event = "role-restarts" if behind else "workers-move"
        restart(step, job, names, Cause(event, f"{why}; nothing is charged", role.name))
    if not all(map(rendezvous.has_left, (worker for worker in old if worker.rejoins))):
        begin_anew(step, job, role.name, f"round {job.roles[role.name].round} is broken off: not all left it in time")


def _has_said_left(worker: WorkerRecord) -> bool:
    return worker.notice is not None and worker.left_round >= worker.notice.round


def _is_steady(job: JobRecord, role: RoleSpec) -> bool:
    """Return True if all members of the role are in one undisturbed round."""
    members = job.members(role)
    return all(one.state is WorkerState.RUNNING and one.notice is None and not one.is_joining for one in members)


def _grow_later(step: MasterStep, job: JobRecord, role: RoleSpec) -> None:
    """Arm the timer of a role's growth, if there is room for it now."""
    key, times, grown_at = ("grow", job.job_id, role.name), step.cluster.intervals, job.roles[role.name].grown_at
    if key in step.cluster.timers or not _placement(step, job, role, is_growth=True).assignments:
        return
    earliest = grown_at + times.grow_every_s if grown_at is not None else step.now
    step.cluster.timers.arm(key, max(step.now + times.grow_settle_s, earliest))


def _fill(step: MasterStep, job: JobRecord, role: RoleSpec, reason: str) -> None:
    """Place groups that have no place, and begin their workers."""
    found = _placement(step, job, role, is_growth=job.roles[role.name].waits_until is None)
    if not found.fits or not found.assignments:
        return
    workers = [job.workers[one.worker] for one in found.assignments]
    for one, worker in zip(found.assignments, workers, strict=True):
        incarnations.allocate(step, job, worker, step.cluster.nodes[one.node], one.allocation)
    nodes = ", ".join(sorted({worker.node for worker in workers}))
    text = f"{count(len(workers), 'worker')} of role {role.name} on {nodes}: {reason}"
    step.decide("role-grows", text, job, role.name)
    for worker in workers:
        incarnations.begin(step, job, worker, reason)


def _placement(step: MasterStep, job: JobRecord, role: RoleSpec, *, is_growth: bool) -> PlacementPlan:
    """Plan places for as many groups of a role without a place as there is room for."""
    absent = {worker.name for worker in job.absent(role)}
    units = [unit for unit in units_of(job.spec) if unit.members[0].worker in absent]
    return place_within_ranges(step.cluster, job, units, is_growth=is_growth)
