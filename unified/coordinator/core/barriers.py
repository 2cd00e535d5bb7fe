"""Barriers: all workers of a world meet and go on together, or learn why not.

A barrier has an id and can be used again and again; each use is a *generation*. A generation ends for all its waiting
workers at once: because all arrived, because a worker was lost without which the barrier fails, or because the time of
one of them is over. The next arrival is the first of the next generation.

A loss counts for workers that were registered when it happened: they may have relied on the lost worker. The loss
counts no more when that worker, or another with its rank, has registered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from unified.coordinator.core import records
from unified.coordinator.core.messages import CoordinatorStep, Token
from unified.coordinator.core.state import Space, current, heard
from unified.errors import UsageError, listed
from unified.protocol.coordinator import BarrierResponse, BarrierStatus, LeaveBarrier, ReleasedBy, WaitBarrier

MAX_VACANT = 10_000
"""Most ranks without a registered worker that are searched one by one."""


def wait(step: CoordinatorStep, space: Space, token: Token, request: WaitBarrier) -> BarrierResponse | None:
    """Handle an arrival, or a repeated request for its answer. None: the answer comes with a release."""
    presence = current(space, request.worker_id, request.session)
    heard(space, presence, step.now)
    barrier = space.barriers.get(request.barrier_id)
    if barrier is not None and (answer := _answered(barrier, request)) is not None:
        return answer
    _check(presence, barrier, request)
    if barrier is None:
        past = records.PastReleases(space=space.name, barrier_id=request.barrier_id, number=0, generation=0)
        barrier = space.barriers[request.barrier_id] = records.Barrier(past=past)
    _arrive(step, space, barrier, presence, token, request)
    _settle(step, space, barrier)
    return None


def leave(step: CoordinatorStep, space: Space, request: LeaveBarrier) -> None:
    """End the wait of an arrival. If it does not wait here, nothing happens."""
    barrier = space.barriers.get(request.barrier_id)
    waiting = barrier.waiting.get(request.worker_id) if barrier is not None else None
    if barrier is None or waiting is None or waiting.presence.session != request.session:
        return
    asked = waiting.tokens.pop(request.arrival, None)
    if asked is None:
        return
    waiting.deadlines.pop(request.arrival, None)
    reason = f"worker {request.worker_id} itself left barrier {request.barrier_id!r}."
    step.answer(asked, BarrierResponse(released_by="closed", generation=barrier.past.generation, reason=reason))
    if not waiting.tokens:
        del barrier.waiting[request.worker_id]
        waiting.presence.waits_at.discard(request.barrier_id)
    _go_on_without(space, barrier)


def drop_worker(step: CoordinatorStep, space: Space, presence: records.Presence, released_by: ReleasedBy) -> None:
    """Answer the requests of an incarnation that is over, and settle barriers that waited for it. The incarnation is in
    `space.gone` already."""
    worker = presence.worker
    for barrier_id in sorted(presence.waits_at):
        barrier = space.barriers[barrier_id]
        waiting = barrier.waiting.pop(worker.worker_id)
        answer = BarrierResponse(
            released_by=released_by,
            generation=barrier.past.generation,
            arrived=list(barrier.waiting),
            lost=[worker.worker_id] if released_by == "lost" else [],
            reason=f"worker {worker.worker_id} itself is gone: {worker.reason}.",
        )
        for token in waiting.tokens.values():
            step.answer(token, answer)
        _go_on_without(space, barrier)
    presence.waits_at = set()
    for barrier in _open(space):
        _settle(step, space, barrier)


def overdue(step: CoordinatorStep, space: Space, barrier: records.Barrier) -> None:
    """End a generation whose deadline has passed."""
    lost = _lost(space, barrier)
    missing = _missing(space, barrier)
    who = [*missing, *(f"{each.worker_id} (gone, as {each.reason})" for each in lost)]
    rank_slots = {rank for world, rank in space.rank_slots if world == barrier.world_size} | {
        each.info.rank for each in lost
    }
    num_unknown = barrier.world_size - len(barrier.waiting) - len(who)
    # A worker may give any world size, so the number of ranks in the loop is limited.
    is_countable = barrier.world_size <= len(rank_slots) + MAX_VACANT
    vacant = [rank for rank in range(barrier.world_size) if rank not in rank_slots] if is_countable else []
    if 0 < num_unknown == len(vacant):
        who += [f"rank {rank} (nobody registered for it)" for rank in vacant]
    elif num_unknown > 0:
        who.append(f"{num_unknown} workers that never registered")
    absent, came = listed(who), listed(_by_rank(space, barrier.waiting))
    reason = f"barrier {barrier.barrier_id!r} of {barrier.world_size} timed out: missing {absent}; arrived: {came}."
    step.report("barrier-broken", reason, space.name)
    _release(step, space, barrier, "timeout", lost, reason)


def close(step: CoordinatorStep, space: Space) -> None:
    """Answer all waiting workers: nobody will ask in this space again."""
    for barrier in _open(space):
        answer = BarrierResponse(
            released_by="closed", generation=barrier.past.generation, reason=f"the space {space.name!r} was closed."
        )
        for waiting in barrier.waiting.values():
            for token in waiting.tokens.values():
                step.answer(token, answer)
        space.timers.barriers.cancel((space.name, barrier.barrier_id))


def _answered(barrier: records.Barrier, request: WaitBarrier) -> BarrierResponse | None:
    """Return the answer that this arrival has had already, if any."""
    for release in reversed(barrier.past.releases):
        session, arrival = release.arrivals.get(request.worker_id, ("", -1))
        if session == request.session:
            return release.response if request.arrival <= arrival else None
    return None


def _check(presence: records.Presence, barrier: records.Barrier | None, request: WaitBarrier) -> None:
    who, world = f"worker {request.worker_id}", request.world_size
    registered = presence.worker.info.world_size
    if not request.barrier_id:
        raise UsageError(f"{who} waits at a barrier without an id.")
    if world < 1 or world != registered:
        raise UsageError(
            f"{who} waits at barrier {request.barrier_id!r} of {world}, and is registered with world_size={registered}:"
            " both must be the number of workers that meet there, at least 1."
        )
    if request.timeout_s is not None and not request.timeout_s >= 0:
        raise UsageError(f"{who} would wait {request.timeout_s} s: give 0 or more, or nothing to wait without an end.")
    if barrier is None or not barrier.waiting:
        return
    if world != barrier.world_size:
        raise UsageError(
            f"{who} waits at barrier {barrier.barrier_id!r} of {world}, where {barrier.opened_by} waits for "
            f"{barrier.world_size}: all must say the same world_size."
        )
    if request.on_loss != barrier.on_loss:
        raise UsageError(
            f"{who} waits at barrier {barrier.barrier_id!r} with on_loss={request.on_loss!r}, where "
            f"{barrier.opened_by} has {barrier.on_loss!r}: all must say the same."
        )


def _arrive(
    step: CoordinatorStep,
    space: Space,
    barrier: records.Barrier,
    presence: records.Presence,
    token: Token,
    request: WaitBarrier,
) -> None:
    came_at = presence.worker.came_at
    if not barrier.waiting:
        barrier.world_size, barrier.on_loss, barrier.opened_by = request.world_size, request.on_loss, request.worker_id
        barrier.oldest_came_at, barrier.deadline = came_at, None
    barrier.oldest_came_at = min(barrier.oldest_came_at, came_at)
    waiting = barrier.waiting.get(request.worker_id)
    if waiting is None:
        waiting = barrier.waiting[request.worker_id] = records.Waiting(presence, {})
        presence.waits_at.add(request.barrier_id)
    is_new = request.arrival not in waiting.tokens
    waiting.tokens[request.arrival] = token
    if is_new and request.timeout_s is not None and request.timeout_s < math.inf:
        deadline = waiting.deadlines[request.arrival] = step.now + request.timeout_s
        if barrier.deadline is None or deadline < barrier.deadline:
            barrier.deadline = deadline
            space.timers.barriers.arm((space.name, barrier.barrier_id), deadline)


def _go_on_without(space: Space, barrier: records.Barrier) -> None:
    """Drop the options of a worker that waits here no more."""
    if not barrier.waiting:
        _close(space, barrier)
        return
    barrier.opened_by = next(iter(barrier.waiting))
    barrier.oldest_came_at = min(each.presence.worker.came_at for each in barrier.waiting.values())
    deadlines = [deadline for each in barrier.waiting.values() for deadline in each.deadlines.values()]
    barrier.deadline = min(deadlines, default=None)
    if barrier.deadline is None:
        space.timers.barriers.cancel((space.name, barrier.barrier_id))
    else:
        space.timers.barriers.arm((space.name, barrier.barrier_id), barrier.deadline)


def _settle(step: CoordinatorStep, space: Space, barrier: records.Barrier) -> None:
    """Release the barrier if there is nothing to wait for."""
    lost = _lost(space, barrier)
    needed = barrier.world_size - (len(lost) if barrier.on_loss == "shrink" else 0)
    who = ", ".join(f"{each.worker_id} (gone, as {each.reason})" for each in lost)
    if len(barrier.waiting) >= needed:
        is_shrunk = len(barrier.waiting) < barrier.world_size
        _release(step, space, barrier, "arrived", lost if is_shrunk else [], f"without {who}." if is_shrunk else "")
    elif lost and barrier.on_loss == "fail":
        reason = f"barrier {barrier.barrier_id!r} of {barrier.world_size} cannot be reached without {who}."
        step.report("barrier-broken", reason, space.name)
        _release(step, space, barrier, "lost", lost, reason)
    elif barrier.deadline is not None and barrier.deadline <= step.now:
        overdue(step, space, barrier)


def _release(
    step: CoordinatorStep,
    space: Space,
    barrier: records.Barrier,
    released_by: ReleasedBy,
    lost: list[records.RegisteredWorker],
    reason: str,
) -> None:
    """End a generation; its answer is remembered for workers that do not receive it."""
    past = barrier.past
    response = BarrierResponse(
        released_by=released_by,
        generation=past.generation,
        arrived=_by_rank(space, barrier.waiting),
        missing=[] if released_by == "arrived" else _missing(space, barrier),
        lost=[each.worker_id for each in lost],
        reason=reason,
    )
    arrivals: dict[str, tuple[str, int]] = {}
    for worker_id, waiting in barrier.waiting.items():
        arrivals[worker_id] = (waiting.presence.session, max(waiting.tokens))
        for token in waiting.tokens.values():
            step.answer(token, response)
    for release in past.releases:
        for worker_id in arrivals:
            release.arrivals.pop(worker_id, None)
    earlier = [release for release in past.releases if release.arrivals]
    past.releases = [*earlier, records.Release(response=response, arrivals=arrivals)][-records.MAX_RELEASES :]
    past.generation += 1
    space.num_releases += 1
    past.number = space.num_releases
    step.save(records.BARRIER, records.row_key(space.name, barrier.barrier_id), past)
    _close(space, barrier)
    _forget_idle(step, space)


def _close(space: Space, barrier: records.Barrier) -> None:
    """Remove the waiting workers and the timer of a barrier."""
    for waiting in barrier.waiting.values():
        waiting.presence.waits_at.discard(barrier.barrier_id)
    barrier.waiting = {}
    barrier.deadline = None
    space.timers.barriers.cancel((space.name, barrier.barrier_id))
    del space.barriers[barrier.barrier_id]
    if barrier.past.generation:
        space.barriers[barrier.barrier_id] = barrier  # at the end, as the most recently used


def _forget_idle(step: CoordinatorStep, space: Space) -> None:
    while len(space.barriers) > records.MAX_BARRIERS:
        oldest = next((each for each in space.barriers.values() if not each.waiting), None)
        if oldest is None:
            return
        del space.barriers[oldest.barrier_id]
        step.save(records.BARRIER, records.row_key(space.name, oldest.barrier_id), None)


def listing(space: Space) -> list[BarrierStatus]:
    """Return the barriers at which somebody waits, for people."""
    return [
        BarrierStatus(
            barrier_id=barrier.barrier_id,
            generation=barrier.past.generation,
            world_size=barrier.world_size,
            arrived=list(barrier.waiting),
            missing=_missing(space, barrier),
        )
        for barrier in _open(space)
    ]


def _open(space: Space) -> list[records.Barrier]:
    at = {barrier_id for presence in space.present.values() for barrier_id in presence.waits_at}
    return [space.barriers[barrier_id] for barrier_id in sorted(at)]


def _lost(space: Space, barrier: records.Barrier) -> list[records.RegisteredWorker]:
    """Return workers of this world that went after the oldest waiting worker came, and whose rank nobody has taken."""
    lost: list[records.RegisteredWorker] = []
    for worker in reversed(space.gone.values()):
        if worker.gone_at <= barrier.oldest_came_at:
            break
        world, rank = worker.rank_slot
        if world != barrier.world_size:
            continue
        if rank >= 0:
            is_replaced = worker.rank_slot in space.rank_slots
        else:
            is_replaced = sum(each.worker.info.world_size == world for each in space.present.values()) >= world
        if not is_replaced:
            lost.append(worker)
    return sorted(lost, key=lambda worker: (worker.info.rank, worker.worker_id))


def _missing(space: Space, barrier: records.Barrier) -> list[str]:
    """Return the registered workers of this world that have not arrived."""
    missing = [
        worker_id
        for worker_id, presence in space.present.items()
        if presence.worker.info.world_size == barrier.world_size and worker_id not in barrier.waiting
    ]
    return _by_rank(space, missing)


def _by_rank(space: Space, worker_ids: Iterable[str]) -> list[str]:
    return sorted(worker_ids, key=lambda worker_id: (space.present[worker_id].worker.info.rank, worker_id))
