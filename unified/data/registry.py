"""`DatasetRegistry`: datasets by name, their shards, and the workers that these are assigned to."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from unified.config.runtime import RuntimeSettings
from unified.coordinator.client import Coordinator
from unified.coordinator.worker_identity import (
    check_rank,
    discover,
    member_of_rank,
    open_coordinator,
    registered,
    session_of,
)
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
    """A worker that is asked about."""

    name: str
    """The name of the worker's rank (see `member_of_rank`), or with `is_id` what the worker calls itself."""
    rank: int | None
    """None: not known here."""
    is_id: bool = False
    is_mine: bool = False
    """True if the worker is this process."""


class DatasetRegistry(ClosedOnExit):
    """Datasets that a coordinator knows, and the shards of each worker.

    A worker is named by its rank, or by the id that it has as a `TrainingOrchestrator`: a rank is one worker, whatever
    it calls itself, and its shards are given to others when it is lost.

    Args:
        coordinator_url: ``tcp://HOST:PORT``, ``http://HOST:PORT`` or ``HOST:PORT`` of a master; ``local`` for a
            coordinator in this process. Default: inside a job its master, else ``COORDINATOR_URL``, else ``local``.
        rank: this process's. Default: as in the job, else ``RANK``, else as this process has registered as a
            `TrainingOrchestrator`; it may be unknown.
        world_size: over how many workers datasets are spread from the beginning. Default: as in the job, else
            ``WORLD_SIZE``, else as this process has registered. Unknown: over those that ask.

    It can be used from any thread, pickled, and closed; it is a context manager.

    Raises:
        UsageError: no such address; or the rank is not in the world.
    """

    def __init__(
        self,
        coordinator_url: str | Coordinator | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._given: dict[str, Any] = {"coordinator_url": coordinator_url, "rank": rank, "world_size": world_size}
        identity = discover()
        self.rank = identity.rank if rank is None else rank
        self.world_size = identity.world_size if world_size is None else world_size
        check_rank(self.rank, self.world_size)
        self._identity = identity
        self._coordinator, self._is_mine = open_coordinator(coordinator_url)
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
        """Make a dataset known. All workers may do it: again with the same values does nothing.

        Args:
            path: a file, a directory or a glob; of this host, or ``s3://bucket/…``.
            format: ``parquet``, ``csv``, ``tfrecord``, ``jsonl``, ``arrow`` or ``orc``.
            total_samples: the number of samples in all files together. Default: they are counted. It is compared with
                their count, but for one csv, jsonl or tfrecord file alone, which is not read through then: what that
                has beyond `total_samples` is never served.
            shard_size: samples per shard; the last one may have fewer. Default: ``default_shard_size`` of the settings,
                which is 10 000.
            shuffle: read the shards in another order in each epoch.
            seed: the seed of that order; default 0.
            metadata: anything else, kept as text.

        Raises:
            DataFileNotFoundError: nothing is there.
            DatasetError: a file is empty, unreadable, or of another format.
            UsageError: no such format; or the files do not hold `total_samples`.
            CoordinatorError: it is known already, with other values; says which.
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
        """Return the files that a worker reads whole in this epoch, in the order of reading.

        The lists of all ranks are disjoint, and name each file once together. They depend on the files, the size of the
        world, the epoch and the seed alone: what was read, and who was lost, changes nothing. Ranks have about as many
        rows as each other; with fewer files than ranks some have none, which a warning names. Spread finer, and given
        to others when a worker is lost, are the rows of `get_assignment` and `ShardedDataset`.

        Args:
            worker_rank: the worker's rank, or its id. Default: this process's own.
            epoch: which; default: the current one.

        Raises:
            CoordinatorError: there is no such dataset, the epoch is past, or nobody has said how large the world is.
            WorkerUnknownError: this process is an incarnation of the worker that was lost, or that a newer one
                replaced.
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
        """Return a worker's unfinished shards, in the order in which they are to be read.

        Args:
            worker_rank: the worker's rank, or its id. Default: this process's own.
            epoch: which; default: the current one.
            limit: so many at most, the first ones; what is asked before each shard should not be all of a million.
                Default: all.

        Raises:
            CoordinatorError: there is no such dataset, the epoch is past, or the worker is none of the dataset's.
            WorkerUnknownError: this process is an incarnation of the worker that was lost, or that a newer one
                replaced.
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
        """Look up what `get_assignment` returns, with the revision for which it holds; with `limit` 0 all."""
        worker = self._worker(worker_rank)
        request = coordinator.GetDataShard(dataset_id=dataset_id, epoch=epoch, limit=limit, **self._of(worker))
        self._join_once(dataset_id, worker)
        answer = self._ask(request, coordinator.DataShards)
        self._epochs[dataset_id] = max(epoch, self._epochs.get(dataset_id, 0))
        return answer

    def mark_done(
        self, dataset_id: str, shard_ids: int | Sequence[int], epoch: int, worker_rank: int | str | None = None
    ) -> list[int]:
        """Say that shards were read to their end: in this epoch they are served to nobody again.

        A worker reports each shard before it begins the next one of its assignment.

        Returns:
            Those that count: not those that were done before, or that are another worker's by now.

        Raises:
            CoordinatorError: there is no such dataset or shard; or the worker is registered by another process, which
                alone knows what it has read.
            WorkerUnknownError: this process is an incarnation of the worker that was lost, or that a newer one
                replaced.
        """
        ids = [shard_ids] if isinstance(shard_ids, int) else shard_ids
        return self.report_done(dataset_id, worker_rank, epoch, ids).shard_ids

    def report_done(
        self, dataset_id: str, worker_rank: int | str | None, epoch: int, shard_ids: Sequence[int]
    ) -> coordinator.ShardsDone:
        """Report shards as `mark_done` does; return also the revision that holds now."""
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
        """Go on from exactly this position: its shards are done, and all else that was read since comes again.

        Workers that read together all do it, before any of them reads: the first sets the dataset back, the others
        join it. `ShardedDataset.load_state_dict` does it.

        Args:
            position: what `ShardedDataset.state_dict` or `merge_positions` gave.
            is_first: only if this process has restored none of this dataset for that worker yet.

        Raises:
            CoordinatorError: there is no such dataset or shard; or others have restored another position, or read on.
            WorkerUnknownError: this process is an incarnation of the worker that was lost, or that a newer one
                replaced.
            UsageError: it is no position.
        """
        worker = self._worker(worker_rank)
        world = [self._worker(rank).name for rank in range(self._world() or 0)]
        request = restore_request(dataset_id, position, self._of(worker), world=world, is_first=is_first)
        self._join_once(dataset_id, worker)
        self._ask(request, Done)
        self._epochs[dataset_id] = request.epoch

    def register_worker(self, dataset_id: str, worker_rank: int | str | None = None) -> None:
        """Spread the unfinished shards of a dataset over this worker, too. One that is not this process leaves again if
        the coordinator hears nothing of it for its heartbeat time-out.

        Raises:
            CoordinatorError: there is no such dataset.
        """
        self._set_member(dataset_id, self._worker(worker_rank), True)

    def remove_worker(self, dataset_id: str, worker_rank: int | str | None = None) -> None:
        """Give a worker's unfinished shards to the others. One that is none of the dataset's is no error.

        Raises:
            CoordinatorError: there is no such dataset.
        """
        self._set_member(dataset_id, self._worker(worker_rank), False)

    def advance_epoch(self, dataset_id: str, epoch: int | None = None) -> int:
        """Make an epoch the current one; what is unfinished of those before it is given up. Going back does nothing.

        Args:
            epoch: which; default: the one after the last that this registry asked for or knew as current, so that
                workers that all say it once mean the same one.

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
        """Return ids of the workers that a dataset is spread over; or of all that are registered and not lost.

        Raises:
            CoordinatorError: there is no such dataset.
        """
        return self._all().workers if dataset_id is None else list(self.status(dataset_id).workers)

    def shard_source(self, dataset_id: str, worker_rank: int | str | None = None) -> DatasetShards:
        """Return a worker's part of a dataset, as `ShardedDataset` reads it.

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
        worlds = {each.world_size for each in registered(self._identity.space)}
        return worlds.pop() if len(worlds) == 1 else None

    def _rank(self) -> int | None:
        if self.rank is not None:
            return self.rank
        mine = registered(self._identity.space)
        return mine[0].rank if len(mine) == 1 else None

    def _worker(self, worker_rank: int | str | None) -> _QueriedWorker:
        """Find out which worker is meant, each time: this process may register, under whatever id, after it has asked
        for its data."""
        identity, mine = self._identity, self._rank()
        if isinstance(worker_rank, str):
            known = [each for each in registered(identity.space) if each.worker_id == worker_rank]
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
            raise UsageError("which worker? Give worker_rank, or set RANK for this process.")
        return _QueriedWorker(member_of_rank(identity, rank, self._world()), rank, is_mine=rank == mine)

    def _of(self, worker: _QueriedWorker) -> dict[str, Any]:
        """Return the fields of a request that say which worker it is of; and which incarnation, if this process is
        one."""
        identity = self._identity
        return {
            "space": identity.space,
            "worker_id": worker.name,
            "is_id": worker.is_id,
            "session": session_of(identity.space, worker.name),
            "incarnation": identity.incarnation if worker.name == identity.worker_id else -1,
        }

    def _join_world(self, dataset_id: str, members: Sequence[str]) -> None:
        """Spread it from the beginning over all that will read it, so that nobody is given what another one's is.

        Once there are members each worker joins by itself: one that was started again must not bring back others that
        are lost.
        """
        if self._rank() is not None:
            self._join_once(dataset_id, self._worker(None))
        if not members:
            for rank in range(self._world() or 0):
                self._join_once(dataset_id, self._worker(rank))

    def _join_once(self, dataset_id: str, worker: _QueriedWorker) -> None:
        """Join a dataset at the first request: a worker that was taken out is not put in again just by asking."""
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
