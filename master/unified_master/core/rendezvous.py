"""Orders to run: the store host of a job, rounds of elastic roles, and orders for the other workers."""

from __future__ import annotations

from unified.job.spec import RoleSpec
from unified.protocol.agent_master import RunOrder
from unified.protocol.records import WorkerState
from unified_master.core import incarnations
from unified_master.core.scheduling.placement import control_unit
from unified_master.core.state import STORE, Allocation, JobRecord, WorkerRecord
from unified_master.core.step import MasterStep, count


def settle_store(step: MasterStep, job: JobRecord, reason: str) -> None:
    """Give a job with elastic roles a store host: in the place that was found for it if the job says what it needs,
    else on the node of the job's first elastic worker.

    One that lives stays where it is: moving it would cost every elastic role a round.
    """
    elastic = job.elastic_roles()
    if not elastic:
        return
    store = store_of(job)
    if store.is_desired and store.state is not WorkerState.EXITED:
        return
    if control_unit(job.spec) is None:
        placed = [worker for role in elastic for worker in job.ranks(role.name) if worker.allocation is not None]
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
    """Order workers to run: a simple worker when it is READY, an elastic role when all of it and the store are."""
    for role in job.spec.roles:
        workers = job.ranks(role.name)
        if role.kind == "elastic":
            if workers and all(_awaits_order(worker) for worker in workers) and is_store_ready(job):
                _seal(step, job, role, workers)
        else:
            for worker in workers:
                if _awaits_order(worker):
                    _order_simple(step, job, role, worker)


def is_ready(worker: WorkerRecord) -> bool:
    return worker.is_desired and worker.state is WorkerState.READY


def _awaits_order(worker: WorkerRecord) -> bool:
    return is_ready(worker) and worker.run is None


def _seal(step: MasterStep, job: JobRecord, role: RoleSpec, workers: list[WorkerRecord]) -> None:
    """Fix the members of the next round and tell each its place in it."""
    store = job.workers[STORE]
    record = job.roles[role.name]
    record.round += 1
    address = step.cluster.nodes[store.node].info.address
    for worker in workers:
        worker.run = RunOrder(
            round=record.round,
            rank=worker.rank,
            world_size=role.total,
            store_host=address,
            store_port=store.store_port,
            store_prefix=f"{job.job_id}/{role.name}/{record.round}",
        )
        step.touch_worker(job, worker)
        step.touch_node(worker.node)
    step.touch_job(job)
    nodes = len({worker.node for worker in workers})
    step.report(
        "round-sealed",
        f"round {record.round} of role {role.name}: {count(role.total, 'rank')} on {count(nodes, 'node')}, "
        f"store {address}:{store.store_port}",
        job,
        role.name,
    )


def _order_simple(step: MasterStep, job: JobRecord, role: RoleSpec, worker: WorkerRecord) -> None:
    """Order a simple worker to run on its own; its round is the number of its incarnation, counted from 1."""
    worker.run = RunOrder(round=worker.incarnation + 1, rank=worker.rank, world_size=role.total)
    step.touch_worker(job, worker)
    step.touch_node(worker.node)
