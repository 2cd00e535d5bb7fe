"""Orders to run: the store host of a job, rounds of elastic roles, and orders for the other workers.

When a round breaks, workers that can rejoin stay: they are notified at once, and ordered into the next round when all
its members and the store are there. The others of the role restart.
"""

from __future__ import annotations

from collections.abc import Iterable

from unified.job.spec import LOOPBACK, RoleSpec, is_on_one_host
from unified.protocol.agent_master import RoundNotice, RunOrder
from unified.protocol.records import JobWorkerIncarnation, WorkerState
from unified_master.core import copy_nodes, directory
from unified_master.core.node_capacity import Allocation
from unified_master.core.rounds import incarnations, node_checks
from unified_master.core.scheduling.placement import control_unit
from unified_master.core.state import STORE, JobRecord, WorkerRecord
from unified_master.core.step import MasterStep, count

JOIN_S = 60.0
"""Time that a staying worker may take to leave one round and join the next, unless its role has a timeout."""


def settle_store(step: MasterStep, job: JobRecord, reason: str) -> None:
    """Give a job with elastic roles a store host: in a place of its own if the job says what the store needs, else on
    the node of the job's first elastic worker.

    A running store stays where it is: moving it would cost every elastic role a round. Only the store of a job on one
    host moves with the ranks, because no other host can reach it.
    """
    elastic = job.elastic_roles()
    if not elastic:
        return
    store = store_of(job)
    placed = [worker for role in elastic for worker in job.ranks(role.name) if worker.allocation is not None]
    is_left_behind = is_on_one_host(job.spec) and any(worker.node != store.node for worker in placed)
    if store.is_desired and store.state is not WorkerState.EXITED and not is_left_behind:
        return
    if control_unit(job.spec) is None:
        if not placed:
            return
        incarnations.end(step, job, store)
        incarnations.allocate(step, job, store, step.cluster.nodes[placed[0].node], Allocation())
    elif store.allocation is None:
        return
    incarnations.begin(step, job, store, reason)
    where = store.node
    step.report("store-starts", f"the torch store starts on {where}: {reason}", job, worker=STORE, node=where)


def store_of(job: JobRecord) -> WorkerRecord:
    """Return the record of the job's store host, made when it is first needed."""
    if STORE not in job.workers:
        job.workers[STORE] = WorkerRecord(job_id=job.job_id, name=STORE, kind="store")
    return job.workers[STORE]


def is_store_ready(job: JobRecord) -> bool:
    return job.store is None or (is_ready(job.store) and job.store.store_port > 0)


def give_orders(step: MasterStep, job: JobRecord) -> None:
    """Order workers to run: a simple worker when it is READY, an elastic role when its store is ready and each of its
    workers is READY or has left the last round.
    """
    for role in job.spec.roles:
        workers = job.members(role)
        if role.kind == "elastic":
            is_complete = bool(workers) and all(_is_gathered(step, worker) for worker in workers)
            if is_complete and is_store_ready(job) and not _waits_for_nodes(step, job, role):
                _seal(step, job, role, workers)
        else:
            for worker in workers:
                if _awaits_order(step, worker):
                    _order_simple(step, job, role, worker)


def is_ready(worker: WorkerRecord) -> bool:
    return worker.is_desired and worker.state is WorkerState.READY


def _awaits_order(step: MasterStep, worker: WorkerRecord) -> bool:
    return is_ready(worker) and worker.run is None and not _is_leaving_elsewhere(step, worker)


def _is_leaving_elsewhere(step: MasterStep, worker: WorkerRecord) -> bool:
    """Return True if an earlier incarnation may still run on another node: no rank ever runs twice at once.

    On the same node, the agent starts no incarnation before the process of the last one is gone.
    """
    nodes = step.cluster.nodes
    return any(
        JobWorkerIncarnation(worker.job_id, worker.name, past.incarnation) in nodes[past.node].leaving
        for past in worker.past
        if past.node != worker.node and past.node in nodes
    )


def staying(step: MasterStep, job: JobRecord, role: str, restarting: Iterable[str] = ()) -> set[str]:
    """Return the workers of an elastic role that go on if its round breaks and the workers `restarting` restart.

    Workers stay if they can rejoin. If one can, or a change is planned, workers without a round stay, too.
    """
    gone = set(restarting)
    there = [
        worker
        for worker in job.ranks(role)
        if worker.name not in gone and worker.is_desired and incarnations.has_good_place(step, job, worker)
    ]
    if not is_planned(job, role) and not any(worker.rejoins for worker in there):
        return set()
    is_new = (WorkerState.STARTING, WorkerState.READY)
    return {worker.name for worker in there if worker.rejoins or (worker.run is None and worker.state in is_new)}


def is_planned(job: JobRecord, role: str) -> bool:
    """Return True if workers of a role have been notified that the members of their round will change."""
    desired = [worker for worker in job.ranks(role) if worker.is_desired]
    return any(worker.notice is not None and worker.notice.kind == "planned" for worker in desired)


def break_round(step: MasterStep, job: JobRecord, role: str, reason: str) -> None:
    """Notify the staying workers of a role that their round is broken; the next round is for all of them."""
    notice = RoundNotice(round=job.roles[role].round, kind="broken", reason=reason)
    for worker in job.ranks(role):
        known = worker.notice
        is_notified = known is not None and known.round == notice.round and (known.kind == "broken" or has_left(worker))
        if worker.rejoins and not is_notified:
            worker.notice = notice
            step.cluster.timers.cancel(incarnations.join_timer(worker))
            step.touch_worker(job, worker)
            step.touch_node(worker.node)


def _is_gathered(step: MasterStep, worker: WorkerRecord) -> bool:
    """Return True if the worker may be ordered into the next round."""
    return _awaits_order(step, worker) or has_left(worker)


def has_left(worker: WorkerRecord) -> bool:
    """Return True if the worker waits for the next round: it can rejoin, and has left the last one or will at once."""
    notice = worker.notice
    return worker.rejoins and notice is not None and (notice.kind == "broken" or worker.left_round >= notice.round)


def missed(job: JobRecord, role: RoleSpec) -> list[WorkerRecord]:
    """Return the lost ranks of the last round, still undecided, of a role with a range of nodes."""
    return [worker for worker in job.absent(role) if worker.has_failed and worker.node_rank >= 0]


def await_absent(step: MasterStep, job: JobRecord, role: RoleSpec, *, is_planned: bool) -> None:
    """Let the next round of a role wait a while for another node after a loss, unless the change was planned."""
    record = job.roles[role.name]
    is_fewer = any(worker.node_rank >= 0 for worker in job.absent(role))
    for worker in job.absent(role):
        if worker.node_rank >= 0 or worker.is_held:
            worker.node_rank, worker.is_held = -1, False
            worker.reason = f"role {role.name} goes on without it: no node has room for it"
            step.touch_worker(job, worker)
            directory.publish(step, job, worker)
    if is_fewer and not is_planned and record.waits_until is None:
        record.waits_until = step.now + step.cluster.intervals.replace_s
        step.cluster.timers.arm(("replace", job.job_id, role.name), record.waits_until)
        step.touch_job(job)


def _waits_for_nodes(step: MasterStep, job: JobRecord, role: RoleSpec) -> bool:
    until = job.roles[role.name].waits_until
    return until is not None and step.now < until and bool(job.absent(role))


def arm_join(step: MasterStep, job: JobRecord, worker: WorkerRecord) -> None:
    """Give a staying worker its time to join the round that it was ordered into."""
    within_s = job.spec.role(worker.role).communication.timeout_s or JOIN_S
    step.cluster.timers.arm(incarnations.join_timer(worker), step.now + within_s)


def _seal(step: MasterStep, job: JobRecord, role: RoleSpec, workers: list[WorkerRecord]) -> None:
    """Fix the members of the next round, and order each of them into it."""
    store = job.workers[STORE]
    record = job.roles[role.name]
    record.round += 1
    record.waits_until = record.change_due_at = None
    step.cluster.timers.cancel(("replace", job.job_id, role.name))
    step.cluster.timers.cancel(("change", job.job_id, role.name))
    _assign_ranks(role, workers)
    address = LOOPBACK if is_on_one_host(job.spec) else step.cluster.nodes[store.node].info.address
    checks_nodes = node_checks.is_due(record, role, workers)
    for worker in workers:
        worker.run = RunOrder(
            round=record.round,
            rank=worker.node_rank * role.per_group + worker.rank % role.per_group,
            world_size=len(workers),
            store_host=address,
            store_port=store.store_port,
            store_prefix=f"{job.job_id}/{role.name}/{record.round}",
            node_rank=worker.node_rank,
            checks_nodes=checks_nodes,
        )
        worker.notice = None
        copy_nodes.note_run(step, job, worker, worker.run)
        if worker.is_joining:
            arm_join(step, job, worker)
        step.touch_worker(job, worker)
        step.touch_node(worker.node)
    step.touch_job(job)
    nodes = len({worker.node for worker in workers})
    step.report(
        "round-sealed",
        f"round {record.round} of role {role.name}: {count(len(workers), 'rank')} on {count(nodes, 'node')}, "
        f"store {address}:{store.store_port}",
        job,
        role.name,
    )


def _assign_ranks(role: RoleSpec, workers: list[WorkerRecord]) -> None:
    """Give each group its rank in the round: its last rank if the round still has it, else a free one."""
    groups: dict[int, list[WorkerRecord]] = {}
    for worker in workers:
        groups.setdefault(worker.rank // role.per_group, []).append(worker)
    kept = {group: members[0].node_rank for group, members in groups.items() if 0 <= members[0].node_rank < len(groups)}
    taken = set(kept.values())
    free = iter(rank for rank in range(len(groups)) if rank not in taken)
    for group, members in groups.items():
        rank = kept[group] if group in kept else next(free)
        for worker in members:
            worker.node_rank = rank


def _order_simple(step: MasterStep, job: JobRecord, role: RoleSpec, worker: WorkerRecord) -> None:
    """Order a simple worker to run on its own; its round is the number of its incarnation, counted from 1."""
    worker.run = RunOrder(
        round=worker.incarnation + 1,
        rank=worker.rank,
        world_size=role.total,
        node_rank=worker.rank // role.per_group,
    )
    copy_nodes.note_run(step, job, worker, worker.run)
    step.touch_worker(job, worker)
    step.touch_node(worker.node)
