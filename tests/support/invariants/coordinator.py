"""Invariants of a coordinator between two steps, which tests check."""

from unified.coordinator.core.coordinator import CoordinatorCore
from unified.coordinator.core.records import MAX_BARRIERS, MAX_GONE, MAX_RELEASES
from unified.coordinator.core.state import Space


def check(core: CoordinatorCore) -> list[str]:
    return [broken for space in core.spaces.values() for broken in _space(space)]


def _space(space: Space) -> list[str]:
    broken = [*_workers(space), *_barriers(space)]
    for dataset_id, dataset in space.datasets.items():
        broken += [f"dataset {dataset_id}: {each}" for each in dataset.ledger.check()]
        timers = {member for member in dataset.awaited if (space.name, dataset_id, member) in space.timers.awaited}
        if not dataset.awaited == timers <= set(dataset.ledger.workers):
            broken.append(f"dataset {dataset_id}: members {dataset.awaited} are awaited, with timers for {timers}.")
        for worker_id in dataset.ledger.workers:
            gone = space.gone.get(space.id_of(worker_id))
            if gone is not None and dataset_id in gone.datasets:
                broken.append(f"worker {worker_id} is lost, to be back in dataset {dataset_id}, and is in it.")
    return broken


def _workers(space: Space) -> list[str]:
    broken: list[str] = []
    both = space.present.keys() & space.gone.keys()
    if both:
        broken.append(f"workers {sorted(both)} are there and gone.")
    gone_at = [worker.gone_at for worker in space.gone.values()]
    if gone_at != sorted(gone_at) or len(gone_at) > MAX_GONE:
        broken.append(f"the gone are not kept in the order of their going, or too many: {gone_at}.")
    if any(revision > space.revision for revision in gone_at):
        broken.append(f"somebody went at a revision after {space.revision}, which is the newest.")
    for worker_id, presence in space.present.items():
        if presence.worker.member not in space.ids:
            broken.append(f"nobody knows which rank worker {worker_id} has.")
    rank_slots = {
        presence.worker.rank_slot: worker_id
        for worker_id, presence in space.present.items()
        if presence.worker.info.world_size > 0 and presence.worker.info.rank >= 0
    }
    if rank_slots != space.rank_slots:
        broken.append(f"ranks are taken by {space.rank_slots}, and should be by {rank_slots}.")
    for worker_id, presence in space.present.items():
        if space.timers.leases.deadline(presence) is None:
            broken.append(f"worker {worker_id} is there for ever: it has no lease.")
        if presence.worker.gone_at or presence.worker.worker_id != worker_id:
            broken.append(f"worker {worker_id} is there as {presence.worker}.")
        if presence.session in presence.worker.past_sessions:
            broken.append(f"worker {worker_id} is there with a session that was replaced.")
    if (space.alive.revision, space.unknown.revision) != (space.revision, space.revision):
        broken.append("heartbeats are answered with an old revision.")
    return broken


def _barriers(space: Space) -> list[str]:
    broken: list[str] = []
    idle = [barrier.past.number for barrier in space.barriers.values() if not barrier.waiting]
    if len(idle) > MAX_BARRIERS:
        broken.append(f"{len(idle)} barriers are kept at which nobody waits.")
    waits = {worker_id: presence.waits_at for worker_id, presence in space.present.items()}
    for barrier_id, barrier in space.barriers.items():
        key = (space.name, barrier_id)
        if (barrier.deadline is not None) != (key in space.timers.barriers):
            broken.append(f"barrier {barrier_id} has the deadline {barrier.deadline}, and its timer says otherwise.")
        deadlines = [deadline for each in barrier.waiting.values() for deadline in each.deadlines.values()]
        if barrier.deadline != min(deadlines, default=None):
            broken.append(f"barrier {barrier_id} has the deadline {barrier.deadline} of the deadlines {deadlines}.")
        if any(not each.tokens or each.deadlines.keys() - each.tokens.keys() for each in barrier.waiting.values()):
            broken.append(f"barrier {barrier_id} waits for an arrival behind which there is nobody.")
        if not barrier.waiting and (barrier.deadline is not None or not barrier.past.generation):
            broken.append(f"barrier {barrier_id} is kept, and nobody waits or ever waited there.")
        if barrier.waiting and len(barrier.waiting) >= barrier.world_size:
            broken.append(
                f"barrier {barrier_id} of {barrier.world_size} is not released: {list(barrier.waiting)} wait."
            )
        for worker_id, waiting in barrier.waiting.items():
            if space.present.get(worker_id) is not waiting.presence:
                broken.append(f"worker {worker_id} waits at barrier {barrier_id} and is not there.")
            elif barrier_id not in waits[worker_id]:
                broken.append(f"worker {worker_id} waits at barrier {barrier_id} and does not know it.")
        seen = [worker_id for release in barrier.past.releases for worker_id in release.arrivals]
        if len(seen) != len(set(seen)) or len(barrier.past.releases) > MAX_RELEASES:
            broken.append(f"barrier {barrier_id} remembers more than one answer of a worker: {seen}.")
    broken += [
        f"worker {worker_id} would wait at barrier {barrier_id}, which does not know it."
        for worker_id, at in waits.items()
        for barrier_id in at
        if barrier_id not in space.barriers or worker_id not in space.barriers[barrier_id].waiting
    ]
    return broken
