"""Datasets that go on from a position in a checkpoint: samples read after it come again, for all readers."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

import msgspec

from unified.coordinator.core.dataset import DatasetState
from unified.coordinator.core.datasets import asked, hear, save_changed
from unified.coordinator.core.messages import CoordinatorStep
from unified.coordinator.core.records import POSITION, Load, LoadedPosition, row_key
from unified.coordinator.core.state import Space
from unified.errors import UsageError, listed
from unified.protocol.client_master import Done
from unified.protocol.coordinator import RestorePosition

Incarnations = Mapping[str, int] | None
"""Incarnation of each running worker of a job; None: not known."""


def restore(step: CoordinatorStep, space: Space, request: RestorePosition, incarnations: Incarnations) -> Done:
    """Set a dataset back; or, if several workers go back together, let this worker join those that have done so."""
    dataset = asked(space, request)
    hear(step, space, dataset, request.worker_id)
    mine = dataset.position.loads.get(request.worker_id) if dataset.position is not None else None
    if mine is not None and mine.process == request.process and request.number <= mine.number:
        return Done(note="this process has loaded it already")
    position = _joined(space, dataset, request, mine, incarnations)
    loaded = (request.epoch, sorted(set(request.done)), sorted(request.begun))
    digest = blake2b(msgspec.msgpack.encode(loaded), digest_size=16).hexdigest()
    if position is None:
        if reading := _reading(dataset, request, incarnations):
            raise UsageError(
                f"worker {request.worker_id} cannot set dataset {request.dataset_id!r} back alone: {listed(reading)} "
                "read on. All who read it together load the position before any of them reads, and are started again "
                "together (an elastic role is); or each has a dataset of its own name, or loads none and goes on with "
                "what is left."
            )
        position = LoadedPosition(space=space.name, dataset_id=request.dataset_id, digest=digest, loads={})
        _set_back(step, space, dataset, request, incarnations)
    elif position.digest != digest:
        others = listed(sorted(name for name in position.loads if name != request.worker_id))
        raise UsageError(
            f"{others} loaded another position of dataset {request.dataset_id!r} than worker {request.worker_id}: all "
            "who read it together load the same one (merge_positions makes one of all ranks'), or none does."
        )
    position.loads[request.worker_id] = Load(
        process=request.process, number=request.number, incarnation=request.incarnation, session=request.session
    )
    dataset.position = position
    step.save(POSITION, row_key(space.name, request.dataset_id), position)
    return Done()


def _joined(
    space: Space, dataset: DatasetState, request: RestorePosition, mine: Load | None, incarnations: Incarnations
) -> LoadedPosition | None:
    """Return the position that others have loaded, if they are still there; None: this request sets the dataset back.

    A worker that loads again sets it back: the worker has gone back once more. A new incarnation of a worker that had
    loaded joins only workers that are there for certain. If that is not known, as outside a job, all workers are taken
    to have begun again.
    """
    position = dataset.position
    if position is None or (mine is not None and mine.process == request.process):
        return None
    is_there = [_is_there(space, name, load, incarnations) for name, load in position.loads.items() if load is not mine]
    return position if True in is_there or (mine is None and None in is_there) else None


def _is_there(space: Space, worker_id: str, load: Load, incarnations: Incarnations) -> bool | None:
    """Return True if the incarnation that loaded still runs; None: it is not known."""
    if load.incarnation >= 0 and incarnations is not None:
        return incarnations.get(worker_id) == load.incarnation
    if load.session:
        presence = space.present.get(space.id_of(worker_id))
        return presence is not None and presence.session == load.session
    return None


def _reading(dataset: DatasetState, request: RestorePosition, incarnations: Incarnations) -> list[str]:
    """Return the workers that did not go back: they have read on without a position, and this worker did not read."""
    me = request.worker_id
    if incarnations is None or request.incarnation < 0 or dataset.marked.get(me) == request.incarnation:
        return []
    loads = dataset.position.loads if dataset.position is not None else {}
    running = [name for name, incarnation in dataset.marked.items() if incarnations.get(name) == incarnation]
    return sorted(name for name in running if name != me and name not in loads)


def _set_back(
    step: CoordinatorStep, space: Space, dataset: DatasetState, request: RestorePosition, incarnations: Incarnations
) -> None:
    revision = dataset.ledger.revision
    for shard_id, _ in request.begun:
        dataset.plan.bounds(shard_id)
    dataset.ledger.rewind(request.epoch, request.done)
    if request.world:
        there = (
            [presence.worker.member for presence in space.present.values()] if incarnations is None else incarnations
        )
        known = {*request.world, *there}
        dataset.ledger.set_workers(name for name in dataset.ledger.workers if name in known)
        for member in dataset.awaited.difference(dataset.ledger.workers):
            hear(step, space, dataset, member)
    dataset.marked.clear()
    save_changed(step, space, dataset, revision)
    where = f"epoch {request.epoch}, with {len(set(request.done))} of {dataset.plan.num_shards} shards done"
    step.report("dataset-restored", f"{request.dataset_id!r} goes on from {where}", space.name, request.worker_id)
