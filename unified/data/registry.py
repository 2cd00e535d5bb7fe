"""`DatasetRegistry`: datasets by name, their shards, and the workers that have these shards."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from unified.config.runtime import RuntimeSettings
from unified.coordinator import worker_identity
from unified.coordinator.client import Coordinator
from unified.data.files import absolute
from unified.data.position import restore_request
from unified.data.reading import dataset_files
from unified.data.shard_cache import DatasetShards
from unified.errors import CoordinatorError, UsageError, listed, nearest
from unified.protocol import coordinator
from unified.protocol.client_master import Done
from unified.values import ClosedOnExit

_log = logging.getLogger("unified.data")

A = TypeVar("A")


class _QueriedWorker(NamedTuple):
    name: str
    """The name of the worker's rank (see `member_of_rank`), or with `is_id` the worker's own id."""
    rank: int | None
    """None: not known here."""
    is_id: bool = False
    is_mine: bool = False


class DatasetRegistry(ClosedOnExit):
    """Datasets that a coordinator knows, and the shards of each worker.

    A worker is named by its rank, or by the id that it has as a `TrainingOrchestrator`. A rank is one worker, even if
    its id changes. When a worker is lost, its shards are given to others.

    Args:
        coordinator_url: ``tcp://HOST:PORT``, ``http://HOST:PORT`` or ``HOST:PORT`` of a master; ``local`` for a
            coordinator in this process. Default: inside a job its master, else ``COORDINATOR_URL``, else ``local``.
        rank: the rank of this process. Default: as in the job, else ``RANK``, else as this process has registered as a
            `TrainingOrchestrator`; it may be unknown.
        world_size: the number of workers over which datasets are spread from the beginning. Default: as in the job,
            else ``WORLD_SIZE``, else as this process has registered. If unknown: the workers that ask.

    A registry can be used from any thread, pickled, and closed; it is a context manager.

    Raises:
        UsageError: the address is not valid; or the rank is not in the world.
    """

    def __init__(
        self,
        coordinator_url: str | Coordinator | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._given: dict[str, Any] = {"coordinator_url": coordinator_url, "rank": rank, "world_size": world_size}
        identity = worker_identity.discover()
        self.rank = identity.rank if rank is None else rank
        self.world_size = identity.world_size if world_size is None else world_size
        worker_identity.check_rank(self.rank, self.world_size)
        self._identity = identity
        self._coordinator, self._is_mine = worker_identity.open_coordinator(coordinator_url)
        self._joined: set[tuple[str, str]] = set()
        self._warned: set[tuple[str, int]] = set()
        self._epochs: dict[str, int] = {}

    def register(
        self,
        dataset_id: str,
        path: str | os.PathLike[str],
        format: str,  # noqa: A002  the reference document's word
        *,
        total_samples: int | None = None,
        shard_size: int | None = None,
        shuffle: bool = False,
        seed: int | None = None,
        metadata: Mapping[str, object] | None = None,
    ) -> None:
        """Register a dataset. All workers may do it: a repeat with the same values does nothing.

        Args:
            path: a file, a directory or a glob; of this host, or ``s3://bucket/…``.
            format: ``parquet``, ``csv``, ``tfrecord``, ``jsonl``, ``arrow`` or ``orc``.
            total_samples: the number of samples in all files together. Default: they are counted. A given number is
                compared with the count. Exception: a single csv, jsonl or tfrecord file is not read through then, and
                its samples beyond `total_samples` are never served.
            shard_size: samples per shard; the last one may have fewer. Default: ``default_shard_size`` of the settings,
                which is 10 000.
            shuffle: read the shards in another order in each epoch.
            seed: the seed of that order; default 0.
            metadata: anything else, kept as text.

        Raises:
            DataFileNotFoundError: there is no file.
            DatasetError: a file is empty, unreadable, or of another format.
            UsageError: there is no such format; or the files do not hold `total_samples`.
            CoordinatorError: the dataset is known already, with other values; names them.
        """
        where = absolute(os.fspath(path))
        if shard_size is None:
            shard_size = RuntimeSettings.load_shared().dataset.default_shard_size
        known = next((each for each in self.datasets() if each.dataset_id == dataset_id), None)
        epoch = known.epoch if known is not None else 0
        said = {name: str(value) for name, value in (metadata or {}).items()}
        asked = (where, format, shard_size, shuffle, seed or 0, said)
        if known is None or not is_registered_as(known, asked, total_samples):
            files = dataset_files(where, format, total_samples)
            request = coordinator.RegisterDataset(
                dataset_id=dataset_id,
                path=where,
                format=format,
                total_samples=sum(file.num_samples for file in files),
                shard_size=shard_size,
                shuffle=shuffle,
                seed=seed or 0,
                metadata=said,
                files=files,
                space=self._identity.space,
            )
            epoch = self._ask(request, coordinator.DatasetRegistration).epoch
        self._epochs.setdefault(dataset_id, epoch)
        self._join_world(dataset_id, known.workers if known is not None else [])

    def get_shard(self, dataset_id: str, worker_rank: int | str | None = None, epoch: int | None = None) -> list[str]:
        """Return the whole files that a worker reads in this epoch, in the order of reading.

        The lists of all ranks are disjoint, and together name each file once. They depend only on the files, the size
        of the world, the epoch and the seed, not on what was read or on lost workers. Ranks have about equal numbers of
        rows. With fewer files than ranks some ranks have none; a warning names them. `get_assignment` and
        `ShardedDataset` spread rows more finely, and give those of a lost worker to others.

        Args:
            worker_rank: the worker's rank, or its id. Default: this process's own.
            epoch: the epoch; default: the current one.

        Raises:
            CoordinatorError: there is no such dataset, the epoch is past, or the size of the world is not known.
            WorkerUnknownError: this process is a lost incarnation of the worker, or a newer one replaced it.
            UsageError: the rank is not in the world.
        """
        worker = self._worker(worker_rank)
        if epoch is None:
            epoch = self.current_epoch(dataset_id)
        rank = -1 if worker.rank is None else worker.rank
        request = coordinator.GetRankFiles(
            dataset_id=dataset_id, epoch=epoch, rank=rank, world_size=self._world() or 0, **self._of(worker)
        )
        answer = self._ask(request, coordinator.RankFiles)
        self._epochs[dataset_id] = max(epoch, self._epochs.get(dataset_id, 0))
        if answer.idle and (dataset_id, len(answer.idle)) not in self._warned:
            self._warned.add((dataset_id, len(answer.idle)))
            _log.warning(
                "dataset %r has %d files, too few for the ranks: get_shard gives none to rank %s. Write it as more "
                "files, or spread its rows: get_assignment with iter_samples, or ShardedDataset.",
                dataset_id,
                answer.num_files,
                listed(answer.idle, 20),
            )
        return answer.file_paths

    def get_assignment(
        self,
        dataset_id: str,
        worker_rank: int | str | None = None,
        epoch: int | None = None,
        *,
        limit: int | None = None,
    ) -> list[coordinator.ShardAssignment]:
        """Return a worker's unfinished shards, in the order of reading.

        Args:
            worker_rank: the worker's rank, or its id. Default: this process's own.
            epoch: the epoch; default: the current one.
            limit: return only so many first shards. Use it for a request before each shard: there may be a million
                shards. Default: all.

        Raises:
            CoordinatorError: there is no such dataset, the epoch is past, or the dataset is not spread over the worker.
            WorkerUnknownError: this process is a lost incarnation of the worker, or a newer one replaced it.
            UsageError: the rank is not in the world; or `limit` is below 1.
        """
        if limit is not None and limit < 1:
            raise UsageError(f"limit={limit} shards cannot be asked for: give 1 or more, or none to have all.")
        if epoch is None:
            epoch = self.current_epoch(dataset_id)
        return self.look_up(dataset_id, worker_rank, epoch, limit=limit or 0).shards

    def look_up(
        self, dataset_id: str, worker_rank: int | str | None, epoch: int, *, limit: int
    ) -> coordinator.DataShards:
        """Look up the shards for `get_assignment`, with the revision for which they hold; with `limit` 0 all."""
        worker = self._worker(worker_rank)
        request = coordinator.GetDataShard(dataset_id=dataset_id, epoch=epoch, limit=limit, **self._of(worker))
        self._join_once(dataset_id, worker)
        answer = self._ask(request, coordinator.DataShards)
        self._epochs[dataset_id] = max(epoch, self._epochs.get(dataset_id, 0))
        return answer

    def mark_done(
        self, dataset_id: str, shard_ids: int | Sequence[int], epoch: int, worker_rank: int | str | None = None
    ) -> list[int]:
        """Report shards as read to the end: in this epoch they are not served again.

        A worker reports each shard before it begins the next one of its assignment.

        Returns:
            The shards that count: not shards that were done before, or that another worker has by now.

        Raises:
            CoordinatorError: there is no such dataset or shard; or another process registered the worker: only that
                process knows what the worker has read.
            WorkerUnknownError: this process is a lost incarnation of the worker, or a newer one replaced it.
        """
        ids = [shard_ids] if isinstance(shard_ids, int) else shard_ids
        return self.report_done(dataset_id, worker_rank, epoch, ids).shard_ids

    def report_done(
        self, dataset_id: str, worker_rank: int | str | None, epoch: int, shard_ids: Sequence[int]
    ) -> coordinator.ShardsDone:
        """Report shards like `mark_done`; return also the revision that holds now."""
        worker = self._worker(worker_rank)
        request = coordinator.MarkDone(
            dataset_id=dataset_id, epoch=epoch, shard_ids=list(shard_ids), **self._of(worker)
        )
        return self._ask(request, coordinator.ShardsDone)

    def restore_position(
        self,
        dataset_id: str,
        position: Mapping[str, Any],
        worker_rank: int | str | None = None,
        *,
        is_first: bool = False,
    ) -> None:
        """Go on from exactly this position: its shards are done, and everything that was read since comes again.

        All workers that read together do it, before any of them reads: the first one sets the dataset back, the others
        join it. `ShardedDataset.load_state_dict` does it.

        Args:
            position: the result of `ShardedDataset.state_dict` or `merge_positions`.
            is_first: do nothing if this process has restored a position of this dataset for that worker before.

        Raises:
            CoordinatorError: there is no such dataset or shard; or others have restored another position, or read on.
            WorkerUnknownError: this process is a lost incarnation of the worker, or a newer one replaced it.
            UsageError: `position` is not a position.
        """
        worker = self._worker(worker_rank)
        world = [self._worker(rank).name for rank in range(self._world() or 0)]
        request = restore_request(dataset_id, position, self._of(worker), world=world, is_first=is_first)
        self._join_once(dataset_id, worker)
        self._ask(request, Done)
        self._epochs[dataset_id] = request.epoch

    def register_worker(self, dataset_id: str, worker_rank: int | str | None = None) -> None:
        """Spread the unfinished shards of a dataset over this worker, too. A worker that is not this process leaves
        again if the coordinator hears nothing of it for the heartbeat time-out.

        Raises:
            CoordinatorError: there is no such dataset.
        """
        self._set_member(dataset_id, self._worker(worker_rank), True)

    def remove_worker(self, dataset_id: str, worker_rank: int | str | None = None) -> None:
        """Give a worker's unfinished shards to the others; without an error if the dataset is not spread over it.

        Raises:
            CoordinatorError: there is no such dataset.
        """
        self._set_member(dataset_id, self._worker(worker_rank), False)

    def advance_epoch(self, dataset_id: str, epoch: int | None = None) -> int:
        """Make an epoch the current one; unfinished shards of earlier epochs are given up. Going back does nothing.

        Args:
            epoch: the epoch; default: the one after the last that this registry asked for or knew as current. So
                workers that each call this once mean the same epoch.

        Returns:
            The epoch that is current now.

        Raises:
            CoordinatorError: there is no such dataset.
        """
        if epoch is None:
            if dataset_id not in self._epochs:
                self._epochs[dataset_id] = self.current_epoch(dataset_id)
            epoch = self._epochs[dataset_id] + 1
        self._ask(coordinator.AdvanceEpoch(dataset_id=dataset_id, epoch=epoch, space=self._identity.space), Done)
        current = self._epochs[dataset_id] = self.current_epoch(dataset_id)
        return current

    def current_epoch(self, dataset_id: str) -> int:
        """Return the current epoch of a dataset.

        Raises:
            CoordinatorError: there is no such dataset.
        """
        return self.status(dataset_id).epoch

    def status(self, dataset_id: str) -> coordinator.DatasetStatus:
        """Return the values, workers and progress of a dataset.

        Raises:
            CoordinatorError: there is no such dataset.
        """
        every = {each.dataset_id: each for each in self.datasets()}
        if dataset_id not in every:
            hint = nearest(dataset_id, every)
            raise CoordinatorError(
                f"no dataset {dataset_id!r} is registered here: register it first.{hint}", code="not-found"
            )
        return every[dataset_id]

    def datasets(self) -> list[coordinator.DatasetStatus]:
        """Return all datasets, each with its values, its workers and its progress."""
        return self._all().datasets

    def active_workers(self, dataset_id: str | None = None) -> list[str]:
        """Return ids of the workers that a dataset is spread over; by default of all registered, not lost workers.

        Raises:
            CoordinatorError: there is no such dataset.
        """
        return self._all().workers if dataset_id is None else list(self.status(dataset_id).workers)

    def shard_source(self, dataset_id: str, worker_rank: int | str | None = None) -> DatasetShards:
        """Return a worker's part of a dataset, for `ShardedDataset`.

        Raises:
            CoordinatorError: there is no such dataset.
        """
        is_mine = self._worker(worker_rank).name == self._identity.worker_id
        return DatasetShards(
            self,
            dataset_id,
            worker_rank,
            self.status(dataset_id).format,
            incarnation=self._identity.incarnation if is_mine else -1,
            is_elastic=is_mine and self._identity.is_elastic,
        )

    def close(self) -> None:
        """End the connection. A coordinator in this process goes on for others that use it."""
        if self._is_mine:
            self._coordinator.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(DatasetRegistry, **self._given), ()

    def _world(self) -> int | None:
        if self.world_size is not None:
            return self.world_size
        worlds = {each.world_size for each in worker_identity.registered(self._identity.space)}
        return worlds.pop() if len(worlds) == 1 else None

    def _rank(self) -> int | None:
        if self.rank is not None:
            return self.rank
        mine = worker_identity.registered(self._identity.space)
        return mine[0].rank if len(mine) == 1 else None

    def _worker(self, worker_rank: int | str | None) -> _QueriedWorker:
        """Find out which worker is meant, for each request: this process may register, under any id, after its first
        request for data."""
        identity, mine = self._identity, self._rank()
        if isinstance(worker_rank, str):
            known = [each for each in worker_identity.registered(identity.space) if each.worker_id == worker_rank]
            if known:
                return _QueriedWorker(known[-1].member, known[-1].rank, is_mine=True)
            if worker_rank in identity.workers:
                worker_rank = identity.workers.index(worker_rank)
            elif worker_rank == identity.worker_id and mine is not None:
                worker_rank = mine
            else:
                return _QueriedWorker(worker_rank, None, is_id=True)
        rank = mine if worker_rank is None else worker_rank
        if rank is None:
            raise UsageError("the rank of this process is not known: give worker_rank, or set RANK.")
        return _QueriedWorker(worker_identity.member_of_rank(identity, rank, self._world()), rank, is_mine=rank == mine)

    def _of(self, worker: _QueriedWorker) -> dict[str, Any]:
        """Return the fields of a request that name the worker, and its incarnation if this process is one."""
        identity = self._identity
        return {
            "space": identity.space,
            "worker_id": worker.name,
            "is_id": worker.is_id,
            "session": worker_identity.session_of(identity.space, worker.name),
            "incarnation": identity.incarnation if worker.name == identity.worker_id else -1,
        }

    def _join_world(self, dataset_id: str, members: Sequence[str]) -> None:
        """Spread a dataset from the beginning over all its readers, so that no worker is given shards of another one.

        Once there are members each worker joins by itself: a restarted worker must not bring back lost ones.
        """
        if self._rank() is not None:
            self._join_once(dataset_id, self._worker(None))
        if not members:
            for rank in range(self._world() or 0):
                self._join_once(dataset_id, self._worker(rank))

    def _join_once(self, dataset_id: str, worker: _QueriedWorker) -> None:
        """Join a dataset at the first request only: a worker that was removed does not join again by asking."""
        if (dataset_id, worker.name) not in self._joined:
            self._set_member(dataset_id, worker, True)

    def _set_member(self, dataset_id: str, worker: _QueriedWorker, is_member: bool) -> None:
        request = coordinator.SetDataWorker(
            dataset_id=dataset_id, is_member=is_member, is_awaited=not worker.is_mine, **self._of(worker)
        )
        self._ask(request, Done)
        self._joined.add((dataset_id, worker.name))

    def _all(self) -> coordinator.Datasets:
        return self._ask(coordinator.GetDatasets(space=self._identity.space), coordinator.Datasets)

    def _ask(self, request: coordinator.CoordinatorRequest, expected: type[A]) -> A:
        return self._coordinator.ask(request, expected)


def is_registered_as(
    known: coordinator.DatasetStatus, asked: tuple[str, str, int, bool, int, dict[str, str]], total_samples: int | None
) -> bool:
    """Return whether a known dataset has these values: path, format, shard size, shuffle, seed, metadata."""
    there = (known.path, known.format, known.shard_size, known.shuffle, known.seed, known.metadata)
    return there == asked and total_samples in (None, known.total_samples)
