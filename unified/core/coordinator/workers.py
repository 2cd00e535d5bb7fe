"""Who is there: registration, lives that replace each other, silence, and orderly leave."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from unified.core.coordinator import barriers, datasets
from unified.core.coordinator.messages import Token, Turn
from unified.core.coordinator.records import MAX_GONE, MAX_PAST_SESSIONS, WORKER, Presence, Worker, names, row_key
from unified.core.coordinator.state import REPLACED, Space, heard
from unified.protocol.client_master import Done
from unified.protocol.coordinator import DeregisterWorker, RegisterWorker, WorkerRegistration

End = Literal["worker-lost", "worker-replaced", "worker-left"]
"""How a life ended: as the event is called in the log."""


class HeartbeatTimes(NamedTuple):
    """What workers are told that do not say it themselves."""

    interval_s: float = 1.0
    """From one to the next; less for those whose time-out is short."""
    timeout_s: float = 30.0
    """After so much silence a worker is lost."""


HEARTBEAT_TIMES = HeartbeatTimes()


def register(turn: Turn, space: Space, token: Token, request: RegisterWorker, heartbeats: HeartbeatTimes) -> None:
    """A life begins, or says again that it has begun."""
    timeout_s = heartbeats.timeout_s if request.timeout_s is None else request.timeout_s
    presence = space.present.get(request.worker_id)
    known = presence.worker if presence is not None else space.gone.get(request.worker_id)
    refusal = _refusal(turn, space, request, known, presence)
    if refusal is not None:
        turn.refuse(token, *refusal)
        return
    if presence is None or presence.session != request.session:
        if presence is not None:
            remove(turn, space, presence, "a new life of it registered", "worker-replaced")
        presence = _begin(turn, space, request, known, timeout_s)
    elif presence.worker.info != request:
        _stand_up(space, presence.worker)
        presence.worker.info = request
        presence.worker.timeout_s = timeout_s
        _sit_down(space, presence.worker)
        turn.save(WORKER, row_key(space.name, request.worker_id), presence.worker)
    heard(space, presence, turn.now)
    answer = WorkerRegistration(
        assigned_id=request.worker_id,
        heartbeat_interval_s=min(heartbeats.interval_s, presence.worker.timeout_s / 3),
        incarnation=presence.worker.incarnation,
        timeout_s=presence.worker.timeout_s,
    )
    turn.answer(token, answer)


def silent(turn: Turn, space: Space, presence: Presence, *, is_late: bool) -> None:
    """Its lease ran out.

    With `is_late` we were not there to listen (the process was stopped, its disk hung): what the worker said may still
    be on its way in, so it is given one more lease, once in each silence.
    """
    if is_late and presence.spared_at != presence.seen_at:
        presence.spared_at = presence.seen_at
        space.clocks.leases.renew(presence, turn.now, lease_s=presence.worker.timeout_s)
        return
    remove(turn, space, presence, f"nothing was heard from it for {turn.now - presence.seen_at:.1f} s", "worker-lost")


def deregister(turn: Turn, space: Space, token: Token, request: DeregisterWorker) -> None:
    """Asked again, or by a life that is over already: done."""
    presence = space.present.get(request.worker_id)
    if presence is None or presence.session != request.session:
        turn.answer(token, Done(note="this life of the worker was not registered any more"))
        return
    turn.answer(token, Done())
    remove(turn, space, presence, "it deregistered", "worker-left")


def remove(turn: Turn, space: Space, presence: Presence, reason: str, end: End) -> None:
    """A life is over: nobody waits for it, and its unfinished shards go to others, or to its next life.

    Args:
        reason: a clause, such as ``it deregistered``.
    """
    worker = presence.worker
    space.clocks.leases.drop(presence)
    del space.present[worker.worker_id]
    _stand_up(space, worker)
    space.revision += 1
    worker.gone_at, worker.reason, worker.end = space.revision, reason, end
    space.gone[worker.worker_id] = worker
    if end != "worker-replaced" and space.ids.get(worker.member) == worker.worker_id:
        # What replaces it reads on where it was.
        left = datasets.drop_worker(turn, space, worker.member)
        worker.datasets = left if end == "worker-lost" else []
        if end == "worker-left":
            del space.ids[worker.member]
    turn.save(WORKER, row_key(space.name, worker.worker_id), worker)
    if len(space.gone) > MAX_GONE:
        oldest = next(iter(space.gone))
        forgotten = space.gone.pop(oldest)
        if space.ids.get(forgotten.member) == oldest:
            del space.ids[forgotten.member]
        turn.save(WORKER, row_key(space.name, oldest), None)
    turn.report(end, reason, space.name, worker.worker_id)
    barriers.drop_worker(turn, space, presence, "closed" if end == "worker-left" else "lost")


def _refusal(
    turn: Turn, space: Space, request: RegisterWorker, known: Worker | None, presence: Presence | None
) -> tuple[str, str] | None:
    worker_id, rank, world = request.worker_id, request.rank, request.world_size
    if not worker_id or not request.session:
        return "bad-request", "a worker needs a worker_id and a session that are not empty."
    if request.timeout_s is not None and not 0 < request.timeout_s < math.inf:
        return "bad-request", f"worker {worker_id} has timeout_s={request.timeout_s}: give seconds above 0."
    if world < 0 or rank < -1:
        return "bad-request", f"worker {worker_id} has rank {rank} of world size {world}: neither can be negative."
    if 0 < world <= rank:
        return "bad-request", f"worker {worker_id} has rank {rank}, and the ranks of {world} workers are below {world}."
    if known is not None and request.session in known.past_sessions:
        return "replaced", f"worker {worker_id} {REPLACED}"
    is_same = presence is not None and presence.session == request.session
    if is_same and presence is not None and presence.waits_at and presence.worker.seat != (world, rank):
        at = names(sorted(presence.waits_at))
        return "bad-request", f"worker {worker_id} waits at barrier {at}: its rank and world cannot change now."
    holder = space.seats.get((world, rank), worker_id)
    if holder != worker_id:
        silent_s = turn.now - space.present[holder].seen_at
        return (
            "name-taken",
            f"rank {rank} of {world} is held by worker {holder}, heard from {silent_s:.1f} s ago: deregister that one, "
            "wait until it is taken for lost, or give another training outside a job a UNIFIED_SPACE of its own.",
        )
    return None


def _begin(turn: Turn, space: Space, request: RegisterWorker, last: Worker | None, timeout_s: float) -> Presence:
    space.revision += 1
    worker = Worker(info=request, incarnation=0, came_at=space.revision, timeout_s=timeout_s)
    if last is not None:
        worker.incarnation = last.incarnation + 1
        worker.past_sessions = last.past_sessions
        if last.info.session != request.session:
            worker.past_sessions = [*last.past_sessions, last.info.session][-MAX_PAST_SESSIONS:]
        space.gone.pop(request.worker_id, None)
        for dataset_id in last.datasets:
            datasets.rejoin(turn, space, dataset_id, worker.member)
    presence = space.present[request.worker_id] = Presence(worker, request.session, turn.now)
    _sit_down(space, worker)
    datasets.hear_everywhere(turn, space, worker.member)
    turn.save(WORKER, row_key(space.name, request.worker_id), worker)
    turn.report("worker-registered", f"life {worker.incarnation} of it has begun", space.name, request.worker_id)
    return presence


def _sit_down(space: Space, worker: Worker) -> None:
    space.ids[worker.member] = worker.worker_id
    world, rank = worker.seat
    if world > 0 and rank >= 0:
        space.seats[worker.seat] = worker.worker_id


def _stand_up(space: Space, worker: Worker) -> None:
    if space.seats.get(worker.seat) == worker.worker_id:
        del space.seats[worker.seat]
