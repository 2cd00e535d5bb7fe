"""Datasets: the shards of an epoch that each worker reads, and the shards that were read. `Ledger` spreads them."""

from __future__ import annotations

from unified.coordinator.core.dataset import MAX_MARKS, DatasetState, mark_key
from unified.coordinator.core.messages import CoordinatorStep
from unified.coordinator.core.records import AWAITED, DATASET, LEDGER, MARK, WORKER, AwaitedMembers, row_key
from unified.coordinator.core.state import Space, absent, check_session
from unified.errors import RefusedError, UsageError, listed, nearest
from unified.protocol import coordinator as protocol
from unified.protocol.client_master import Done


def register(step: CoordinatorStep, space: Space, request: protocol.RegisterDataset) -> protocol.DatasetRegistration:
    """Register a dataset; a repeat with the same values does nothing."""
    dataset = space.datasets.get(request.dataset_id)
    if dataset is None:
        dataset = DatasetState.begin(request)
        space.datasets[request.dataset_id] = dataset
        step.save(DATASET, row_key(space.name, request.dataset_id), request)
        _save(step, space, dataset)
        shards = f"{dataset.plan.num_shards} shards of {request.shard_size} samples at most"
        step.report("dataset-registered", f"{request.dataset_id!r} of {request.path}: {shards}", space.name)
    elif differences := dataset.differences(request):
        raise RefusedError(
            "name-taken",
            f"dataset {request.dataset_id!r} is registered already, with other values: {'; '.join(differences)}. "
            "Register it as it was, or under another name.",
        )
    num_shards, epoch = dataset.plan.num_shards, dataset.ledger.epoch
    return protocol.DatasetRegistration(dataset_id=request.dataset_id, num_shards=num_shards, epoch=epoch)


def shards(step: CoordinatorStep, space: Space, request: protocol.GetDataShard) -> protocol.DataShards:
    """Return a worker's unread shards of an epoch."""
    dataset = asked(space, request)
    hear(step, space, dataset, request.worker_id)
    limit = request.limit
    ready = None if limit else dataset.ready.get((request.worker_id, request.epoch))
    if ready is not None and ready.revision == space.revision:
        return ready
    ledger, worker_id, epoch = dataset.ledger, request.worker_id, request.epoch
    if worker_id not in ledger.workers:
        gone = space.gone.get(space.id_of(worker_id))
        if gone is not None and request.dataset_id in gone.datasets:
            raise absent(space, gone.worker_id)
        raise RefusedError(
            "not-found",
            f"dataset {request.dataset_id!r} is not spread over worker {space.id_of(worker_id)}, but over "
            f"{listed(map(space.id_of, ledger.workers)) or 'nobody'}: let it join first.",
        )
    _check_epoch(dataset, epoch)
    if limit < 0:
        raise UsageError(f"{limit} shards cannot be asked for: give 1 or more, or 0 for all.")
    revision, is_open = ledger.revision, ledger.is_open(epoch)
    shard_ids = ledger.shards_of(worker_id, epoch, limit)
    save_changed(step, space, dataset, revision)
    if not is_open:  # first shards are read from now on: after a restart, workers that join must not get them
        _save(step, space, dataset)
    answer = dataset.shards(epoch, shard_ids, space.revision)
    if not limit:
        dataset.ready[worker_id, epoch] = answer
    return answer


def mark_done(step: CoordinatorStep, space: Space, request: protocol.MarkDone) -> protocol.ShardsDone:
    """Count shards that a worker has read to their end."""
    dataset = asked(space, request)
    if not request.session and space.id_of(request.worker_id) in space.present:
        raise UsageError(
            f"worker {space.id_of(request.worker_id)} is registered, and only that incarnation says what it has read. "
            "This call came from another process, or after the worker deregistered: call it where it registered."
        )
    hear(step, space, dataset, request.worker_id)
    revision = dataset.ledger.revision
    counted = dataset.ledger.mark_done(request.epoch, request.worker_id, request.shard_ids)
    if counted:
        if request.incarnation >= 0:
            dataset.marked[request.worker_id] = request.incarnation
        dataset.ready.pop((request.worker_id, request.epoch), None)
        if dataset.ledger.revision == revision and dataset.num_marks < MAX_MARKS:
            mark = dataset.mark(space.name, request.epoch, counted)
            step.save(MARK, mark_key(space.name, request.dataset_id, mark.number), mark)
        else:
            space.revision += dataset.ledger.revision != revision
            _save(step, space, dataset)
    return protocol.ShardsDone(shard_ids=counted, revision=space.revision)


def rank_files(space: Space, request: protocol.GetRankFiles) -> protocol.RankFiles:
    """Return the whole files of a rank. They do not depend on the caller, or on what was read."""
    dataset = asked(space, request)
    _check_epoch(dataset, request.epoch)
    presence = space.present.get(space.id_of(request.worker_id))
    world_size, rank = request.world_size, request.rank
    if rank < 0 and presence is not None:
        world_size, rank = presence.worker.rank_slot
    if world_size < 1:
        worlds = sorted({world for world, _ in space.rank_slots})
        if len(worlds) != 1:
            said = f"workers have registered with world sizes {listed(worlds)}" if worlds else "nobody has yet"
            raise RefusedError(
                "world-unknown",
                f"over how many ranks are the files of dataset {request.dataset_id!r} spread? Set WORLD_SIZE for each "
                f"of them, give DatasetRegistry(…, world_size=N), or register a TrainingOrchestrator first: {said}.",
            )
        world_size = worlds[0]
    if not 0 <= rank < world_size:
        who = f"rank {rank}" if rank >= 0 else f"worker {request.worker_id}, which has registered no rank,"
        raise UsageError(f"{who} is not in a world of {world_size}: its ranks are 0 to {world_size - 1}.")
    by_rank = dataset.files_by_rank(request.epoch, world_size)
    files = dataset.info.files
    return protocol.RankFiles(
        file_paths=[files[number].path if files else dataset.info.path for number in by_rank[rank]],
        num_files=sum(map(len, by_rank)),
        idle=[each for each, mine in enumerate(by_rank) if not mine],
    )


def set_worker(step: CoordinatorStep, space: Space, request: protocol.SetDataWorker, await_s: float) -> Done:
    """Let a worker join or leave, by its own request or another's. A worker that others name is awaited `await_s`."""
    dataset = asked(space, request)
    worker_id = request.worker_id
    if not worker_id:
        raise UsageError(f"a worker of dataset {request.dataset_id!r} needs a worker_id.")
    gone = space.gone.get(space.id_of(worker_id))
    if gone is not None and gone.end == "worker-lost":
        # If a present worker saw the loss, the lost worker joins later: nobody would read its shards now. If all others
        # are newer, this is another run, and its worker may never register. A worker that asks for itself may never
        # register either, if the lost worker had an id of its own.
        is_missed = any(presence.worker.came_at < gone.gone_at for presence in space.present.values())
        may_be_it = request.is_awaited or gone.worker_id == worker_id
        joins_later = request.is_member and is_missed and may_be_it
        if (request.dataset_id in gone.datasets) != joins_later:
            others = [dataset_id for dataset_id in gone.datasets if dataset_id != request.dataset_id]
            gone.datasets = [*others, request.dataset_id] if joins_later else others
            step.save(WORKER, row_key(space.name, gone.worker_id), gone)
        if joins_later:
            return Done(note=f"worker {gone.worker_id} is lost, and joins when it registers again")
    is_heard = not request.is_awaited or space.id_of(worker_id) in space.present
    if is_heard or not request.is_member:
        hear(step, space, dataset, worker_id)
    elif worker_id not in dataset.ledger.workers:
        dataset.awaited.add(worker_id)
        space.timers.awaited.arm((space.name, request.dataset_id, worker_id), step.now + await_s)
        _save_awaited(step, space, dataset)
    _set_member(step, space, dataset, worker_id, is_member=request.is_member)
    return Done()


def advance(step: CoordinatorStep, space: Space, request: protocol.AdvanceEpoch) -> Done:
    """Go on to an epoch; the current epoch or a past one changes nothing."""
    dataset = _find(space, request.dataset_id)
    revision = dataset.ledger.revision
    if request.epoch < 0:
        _check_epoch(dataset, request.epoch)
    if not dataset.ledger.advance(request.epoch):
        return Done(note=f"dataset {request.dataset_id!r} is in epoch {dataset.ledger.epoch}")
    step.report("epoch-advanced", f"dataset {request.dataset_id!r} is in epoch {request.epoch} now", space.name)
    save_changed(step, space, dataset, revision)
    return Done()


def listing(space: Space) -> protocol.Datasets:
    """Return all datasets, for people and programs."""
    ids = {presence.worker.member: worker_id for worker_id, presence in space.present.items()}
    datasets = [space.datasets[dataset_id].status(ids) for dataset_id in sorted(space.datasets)]
    return protocol.Datasets(datasets=datasets, workers=sorted(space.present))


def drop_worker(step: CoordinatorStep, space: Space, worker_id: str) -> list[str]:
    """Give the unread shards of a worker that is gone to others. Return its datasets."""
    left = [dataset_id for dataset_id, dataset in space.datasets.items() if worker_id in dataset.ledger.workers]
    for dataset_id in left:
        _set_member(step, space, space.datasets[dataset_id], worker_id, is_member=False)
    return left


def give_up(step: CoordinatorStep, space: Space, dataset_id: str, members: list[str], await_s: float) -> None:
    """Give the shards of members that were not heard in time to others, if there are any."""
    dataset = space.datasets[dataset_id]
    if dataset.awaited.issuperset(dataset.ledger.workers):
        for member in members:
            space.timers.awaited.arm((space.name, dataset_id, member), step.now + await_s)
        return
    epoch = dataset.ledger.epoch
    for member in members:
        dataset.awaited.discard(member)
        num_shards = len(dataset.ledger.shards_of(member, epoch))
        _set_member(step, space, dataset, member, is_member=False)
        reason = (
            f"dataset {dataset_id!r} was spread over it, and for {await_s:g} s it neither registered nor asked for its "
            f"data: its {num_shards} shards of epoch {epoch} go to others. It receives shards again when it joins"
        )
        step.report("data-worker-absent", reason, space.name, member)
    _save_awaited(step, space, dataset)


def rejoin(step: CoordinatorStep, space: Space, dataset_id: str, worker_id: str) -> None:
    """Let a worker that is back join a dataset again."""
    if dataset_id in space.datasets:
        _set_member(step, space, space.datasets[dataset_id], worker_id, is_member=True)


def spread(step: CoordinatorStep, space: Space, dataset_id: str, members: set[str]) -> None:
    """Spread a dataset's unfinished shards over the members that it has at the end of the step."""
    dataset = space.datasets[dataset_id]
    revision = dataset.ledger.revision
    dataset.ledger.set_workers(members)
    save_changed(step, space, dataset, revision)


def asked(space: Space, request: protocol.DataRequest) -> DatasetState:
    """Return the dataset that a worker asks about; RefusedError: there is none, or the worker may not ask."""
    if request.session:
        check_session(space, request.worker_id, request.session)
    return _find(space, request.dataset_id)


def _find(space: Space, dataset_id: str) -> DatasetState:
    dataset = space.datasets.get(dataset_id)
    if dataset is None:
        hint = nearest(dataset_id, space.datasets)
        raise RefusedError("not-found", f"no dataset {dataset_id!r} is registered here: register it first.{hint}")
    return dataset


def hear(step: CoordinatorStep, space: Space, dataset: DatasetState, member: str) -> None:
    """Stop waiting to hear from the member, if it was awaited."""
    if member in dataset.awaited:
        dataset.awaited.remove(member)
        space.timers.awaited.cancel((space.name, dataset.plan.dataset_id, member))
        _save_awaited(step, space, dataset)


def _save_awaited(step: CoordinatorStep, space: Space, dataset: DatasetState) -> None:
    dataset_id = dataset.plan.dataset_id
    record = AwaitedMembers(space=space.name, dataset_id=dataset_id, members=sorted(dataset.awaited))
    step.save(AWAITED, row_key(space.name, dataset_id), record if dataset.awaited else None)


def _check_epoch(dataset: DatasetState, epoch: int) -> None:
    if epoch < 0:
        raise UsageError(f"dataset {dataset.plan.dataset_id!r} has no epoch {epoch}: they are counted from 0.")
    if epoch < dataset.ledger.epoch:
        raise RefusedError(
            "ended",
            f"epoch {epoch} of dataset {dataset.plan.dataset_id!r} is past, and nothing of it is handed out again: the "
            f"current one is {dataset.ledger.epoch}.",
        )


def _set_member(step: CoordinatorStep, space: Space, dataset: DatasetState, worker_id: str, *, is_member: bool) -> None:
    key = (space.name, dataset.plan.dataset_id)
    members = step.members.get(key)
    if members is None:
        members = step.members[key] = set(dataset.ledger.workers)
    if is_member:
        members.add(worker_id)
    else:
        members.discard(worker_id)


def save_changed(step: CoordinatorStep, space: Space, dataset: DatasetState, revision: int) -> None:
    """Persist a ledger that has moved shards since `revision`, and have all workers ask for their shards again."""
    if dataset.ledger.revision != revision:
        space.revision += 1
        _save(step, space, dataset)


def _save(step: CoordinatorStep, space: Space, dataset: DatasetState) -> None:
    """Persist the whole progress, in the place of the marks so far."""
    dataset.ready.clear()
    for key in dataset.mark_keys(space.name):
        step.save(MARK, key, None)
    dataset.num_marks = 0
    step.save(LEDGER, row_key(space.name, dataset.plan.dataset_id), dataset.progress(space.name, space.revision))
