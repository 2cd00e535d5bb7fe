"""Restores the coordinator's state from its persisted rows, and drops the rows of a space."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import msgspec

from unified.coordinator.core import records
from unified.coordinator.core.dataset import DatasetProgress, DatasetState, Mark
from unified.coordinator.core.messages import CoordinatorStep, Row
from unified.coordinator.core.shards.ledger import Ledger
from unified.coordinator.core.state import CoordinatorTimers, Space, heard
from unified.errors import CoordinatorError, UnifiedError
from unified.protocol.coordinator import RegisterDataset

R = TypeVar("R")


def restore(
    spaces: dict[str, Space], timers: CoordinatorTimers, now: float, rows: Iterable[Row], *, await_s: float
) -> None:
    """Fill `spaces`; the order of the rows does not matter. Awaited members get `await_s` seconds more.

    CoordinatorError: a row is not readable, or a row that belongs to it is missing.
    """
    by_kind: dict[str, list[bytes]] = {}
    for kind, _, data in rows:
        by_kind.setdefault(kind, []).append(data)

    def read(kind: str, record: type[R]) -> list[R]:
        return [msgspec.msgpack.decode(data, type=record) for data in by_kind.get(kind, ())]

    def space_of(name: str) -> Space:
        if name not in spaces:
            spaces[name] = Space(name, timers)
        return spaces[name]

    revisions: dict[str, int] = {}
    try:
        workers = read(records.WORKER, records.RegisteredWorker)
        for worker in sorted(workers, key=lambda worker: (worker.gone_at, worker.came_at)):
            name = worker.info.space
            revisions[name] = max(revisions.get(name, 0), worker.came_at, worker.gone_at)
            _worker(space_of(name), now, worker)
        for worker in sorted(workers, key=lambda worker: worker.came_at):
            if worker.end != "worker-left":
                space_of(worker.info.space).ids[worker.member] = worker.worker_id
        for past in sorted(read(records.BARRIER, records.PastReleases), key=lambda past: past.number):
            space = space_of(past.space)
            space.barriers[past.barrier_id] = records.Barrier(past=past)
            space.num_releases = past.number
        infos = {(info.space, info.dataset_id): info for info in read(records.DATASET, RegisterDataset)}
        for progress in read(records.LEDGER, DatasetProgress):
            name = progress.space
            revisions[name] = max(revisions.get(name, 0), progress.space_revision)
            dataset = DatasetState(infos[name, progress.dataset_id], Ledger.restore(progress.ledger))
            space_of(name).datasets[progress.dataset_id] = dataset
        for position in read(records.POSITION, records.LoadedPosition):
            space_of(position.space).datasets[position.dataset_id].position = position
        for awaited in read(records.AWAITED, records.AwaitedMembers):
            space_of(awaited.space).datasets[awaited.dataset_id].awaited.update(awaited.members)
            for member in awaited.members:
                timers.awaited.arm((awaited.space, awaited.dataset_id, member), now + await_s)
        _marks(spaces, read(records.MARK, Mark))
        for checkpoint in read(records.CHECKPOINT, records.Checkpoint):
            space_of(checkpoint.notice.space).checkpoints[checkpoint.notice.name] = checkpoint
    except (msgspec.DecodeError, UnifiedError, KeyError, ValueError) as error:
        raise CoordinatorError(
            f"a record of the coordinator cannot be read ({error}): it was written by another version, or is damaged. "
            "Move the state directory away to start with an empty one; the progress of the datasets is lost then."
        ) from error
    for name, revision in revisions.items():
        spaces[name].revision = revision + 1  # so that all workers ask for their shards again


def forget(step: CoordinatorStep, space: Space) -> None:
    for presence in space.present.values():
        space.timers.leases.drop(presence)
    for worker_id in (*space.present, *space.gone):
        step.save(records.WORKER, records.row_key(space.name, worker_id), None)
    for barrier_id, barrier in space.barriers.items():
        if barrier.past.generation:  # it was released, and so persisted
            step.save(records.BARRIER, records.row_key(space.name, barrier_id), None)
    for name in space.checkpoints:
        step.save(records.CHECKPOINT, records.row_key(space.name, name), None)
    for dataset_id, dataset in space.datasets.items():
        step.save(records.DATASET, records.row_key(space.name, dataset_id), None)
        step.save(records.LEDGER, records.row_key(space.name, dataset_id), None)
        if dataset.position is not None:
            step.save(records.POSITION, records.row_key(space.name, dataset_id), None)
        if dataset.awaited:
            step.save(records.AWAITED, records.row_key(space.name, dataset_id), None)
            for member in dataset.awaited:
                space.timers.awaited.cancel((space.name, dataset_id, member))
        for key in dataset.mark_keys(space.name):
            step.save(records.MARK, key, None)


def _worker(space: Space, now: float, worker: records.RegisteredWorker) -> None:
    if worker.gone_at:
        space.gone[worker.worker_id] = worker
        return
    presence = space.present[worker.worker_id] = records.Presence(worker, worker.info.session, now)
    world, rank = worker.rank_slot
    if world > 0 and rank >= 0:
        space.rank_slots[worker.rank_slot] = worker.worker_id
    heard(space, presence, now)


def _marks(spaces: dict[str, Space], marks: list[Mark]) -> None:
    """Count the marks again. Marks that are part of a whole progress were dropped in the step that persisted it."""
    done: dict[tuple[str, str], dict[int, list[int]]] = {}
    for mark in marks:
        done.setdefault((mark.space, mark.dataset_id), {}).setdefault(mark.epoch, []).extend(mark.shard_ids)
        dataset = spaces[mark.space].datasets[mark.dataset_id]
        dataset.num_marks = max(dataset.num_marks, mark.number)
    for (space, dataset_id), epochs in done.items():
        for epoch, shard_ids in epochs.items():
            spaces[space].datasets[dataset_id].ledger.redo(epoch, shard_ids)
