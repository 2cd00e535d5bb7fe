"""Workers: registration, incarnations that replace each other, silence, and orderly leave."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from unified.coordinator.core import barriers, datasets
from unified.coordinator.core.messages import CoordinatorStep
from unified.coordinator.core.records import (
    MAX_GONE,
    MAX_PAST_SESSIONS,
    WORKER,
    Presence,
    RegisteredWorker,
    row_key,
)
from unified.coordinator.core.state import Space, heard, replaced
from unified.errors import RefusedError, UsageError, listed
from unified.protocol.client_master import Done
from unified.protocol.coordinator import DeregisterWorker, RegisterWorker, WorkerRegistration

End = Literal["worker-lost", "worker-replaced", "worker-left"]
"""End of an incarnation: the name of its event in the log."""


class HeartbeatTimes(NamedTuple):
    """Heartbeat times of workers that give none."""

    interval_s: float = 1.0
    """Time from one heartbeat to the next; less for workers whose time-out is short."""
    timeout_s: float = 30.0
    """Silence after which a worker is lost."""


HEARTBEAT_TIMES = HeartbeatTimes()


def register(
    step: CoordinatorStep, space: Space, request: RegisterWorker, heartbeats: HeartbeatTimes
) -> WorkerRegistration:
    """Register an incarnation, which may repeat its registration."""
    timeout_s = heartbeats.timeout_s if request.timeout_s is None else request.timeout_s
    presence = space.present.get(request.worker_id)
    known = presence.worker if presence is not None else space.gone.get(request.worker_id)
    _check(step, space, request, known, presence)
    if presence is None or presence.session != request.session:
        if presence is not None:
            remove(step, space, presence, "a new incarnation of it registered", "worker-replaced")
        presence = _begin(step, space, request, known, timeout_s)
    elif presence.worker.info != request:
        _free_rank_slot(space, presence.worker)
        presence.worker.info = request
        presence.worker.timeout_s = timeout_s
        _take_rank_slot(space, presence.worker)
        step.save(WORKER, row_key(space.name, request.worker_id), presence.worker)
    heard(space, presence, step.now)
    return WorkerRegistration(
        assigned_id=request.worker_id,
        heartbeat_interval_s=min(heartbeats.interval_s, presence.worker.timeout_s / 3),
        incarnation=presence.worker.incarnation,
        timeout_s=presence.worker.timeout_s,
    )


def silent(step: CoordinatorStep, space: Space, presence: Presence, *, is_late: bool) -> None:
    """Handle a lease that ran out.

    With `is_late` the coordinator did not listen (its process was stopped, its disk hung). The worker's messages may
    still be on their way in, so it gets one more lease, once in each silence (lease grace).
    """
    if is_late and presence.grace_at != presence.seen_at:
        presence.grace_at = presence.seen_at
        space.timers.leases.renew(presence, step.now, lease_s=presence.worker.timeout_s)
        return
    remove(step, space, presence, f"nothing was heard from it for {step.now - presence.seen_at:.1f} s", "worker-lost")


def deregister(step: CoordinatorStep, space: Space, request: DeregisterWorker) -> Done:
    """Deregister an incarnation; if it is over already, nothing happens."""
    presence = space.present.get(request.worker_id)
    if presence is None or presence.session != request.session:
        return Done(note="this incarnation of the worker was not registered any more")
    remove(step, space, presence, "it deregistered", "worker-left")
    return Done()


def remove(step: CoordinatorStep, space: Space, presence: Presence, reason: str, end: End) -> None:
    """End an incarnation: nobody waits for it, and its unfinished shards go to others, or to the next incarnation."""
    worker = presence.worker
    space.timers.leases.drop(presence)
    del space.present[worker.worker_id]
    _free_rank_slot(space, worker)
    space.revision += 1
    worker.gone_at, worker.reason, worker.end = space.revision, reason, end
    space.gone[worker.worker_id] = worker
    if end != "worker-replaced" and space.ids.get(worker.member) == worker.worker_id:
        # A replacement instead reads on where this incarnation was.
        left = datasets.drop_worker(step, space, worker.member)
        worker.datasets = left if end == "worker-lost" else []
        if end == "worker-left":
            del space.ids[worker.member]
    step.save(WORKER, row_key(space.name, worker.worker_id), worker)
    if len(space.gone) > MAX_GONE:
        oldest = next(iter(space.gone))
        forgotten = space.gone.pop(oldest)
        if space.ids.get(forgotten.member) == oldest:
            del space.ids[forgotten.member]
        step.save(WORKER, row_key(space.name, oldest), None)
    step.report(end, reason, space.name, worker.worker_id)
    barriers.drop_worker(step, space, presence, "closed" if end == "worker-left" else "lost")


def _check(
    step: CoordinatorStep,
    space: Space,
    request: RegisterWorker,
    known: RegisteredWorker | None,
    presence: Presence | None,
) -> None:
    worker_id, rank, world = request.worker_id, request.rank, request.world_size
    if not worker_id or not request.session:
        raise UsageError("a worker needs a worker_id and a session that are not empty.")
    if request.timeout_s is not None and not 0 < request.timeout_s < math.inf:
        raise UsageError(f"worker {worker_id} has timeout_s={request.timeout_s}: give seconds above 0.")
    if world < 0 or rank < -1:
        raise UsageError(f"worker {worker_id} has rank {rank} of world size {world}: neither can be negative.")
    if 0 < world <= rank:
        raise UsageError(f"worker {worker_id} has rank {rank}, and the ranks of {world} workers are below {world}.")
    if known is not None and request.session in known.past_sessions:
        raise replaced(worker_id)
    is_same = presence is not None and presence.session == request.session
    if is_same and presence is not None and presence.waits_at and presence.worker.rank_slot != (world, rank):
        at = listed(sorted(presence.waits_at))
        raise UsageError(f"worker {worker_id} waits at barrier {at}: its rank and world cannot change now.")
    holder = space.rank_slots.get((world, rank), worker_id)
    if holder != worker_id:
        silent_s = step.now - space.present[holder].seen_at
        raise RefusedError(
            "name-taken",
            f"rank {rank} of {world} is held by worker {holder}, heard from {silent_s:.1f} s ago: deregister that one, "
            "wait until it is taken for lost, or give another training outside a job a UNIFIED_SPACE of its own.",
        )


def _begin(
    step: CoordinatorStep, space: Space, request: RegisterWorker, last: RegisteredWorker | None, timeout_s: float
) -> Presence:
    space.revision += 1
    worker = RegisteredWorker(info=request, incarnation=0, came_at=space.revision, timeout_s=timeout_s)
    if last is not None:
        worker.incarnation = last.incarnation + 1
        worker.past_sessions = last.past_sessions
        if last.info.session != request.session:
            worker.past_sessions = [*last.past_sessions, last.info.session][-MAX_PAST_SESSIONS:]
        space.gone.pop(request.worker_id, None)
        for dataset_id in last.datasets:
            datasets.rejoin(step, space, dataset_id, worker.member)
    presence = space.present[request.worker_id] = Presence(worker, request.session, step.now)
    _take_rank_slot(space, worker)
    for dataset in space.datasets.values():
        datasets.hear(step, space, dataset, worker.member)
    step.save(WORKER, row_key(space.name, request.worker_id), worker)
    step.report("worker-registered", f"incarnation {worker.incarnation} of it has begun", space.name, request.worker_id)
    return presence


def _take_rank_slot(space: Space, worker: RegisteredWorker) -> None:
    space.ids[worker.member] = worker.worker_id
    world, rank = worker.rank_slot
    if world > 0 and rank >= 0:
        space.rank_slots[worker.rank_slot] = worker.worker_id


def _free_rank_slot(space: Space, worker: RegisteredWorker) -> None:
    if space.rank_slots.get(worker.rank_slot) == worker.worker_id:
        del space.rank_slots[worker.rank_slot]
