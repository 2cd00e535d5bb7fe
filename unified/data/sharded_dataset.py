"""`ShardedDataset`: this worker's samples, for torch's data loaders."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

from torch.utils.data import IterableDataset, get_worker_info

from unified.config.runtime import RuntimeSettings
from unified.data.formats import open_format
from unified.data.position import Reading, ReadingPosition
from unified.data.prefetch import ShardPrefetcher
from unified.data.reading import ShardReader
from unified.errors import CoordinatorError, EpochTimeoutError, UsageError
from unified.protocol.coordinator import DatasetStatus, ShardAssignment

_SHORTEST_S, _LONGEST_S = 0.05, 2.0
"""Seconds between two polls."""
_log = logging.getLogger("unified.data")


class WaitPolicy:
    """The wait for the end of an epoch: when to poll again, and when to give up.

    Args:
        limit_s: seconds to wait while no shard is finished; ``math.inf``: for ever.
        now: seconds, on any clock.
    """

    def __init__(self, limit_s: float, now: float) -> None:
        self._limit_s = limit_s
        self._began_at = self._moved_at = now
        self._num_left: int | None = None

    def next_poll_s(self, now: float, num_left: int) -> float | None:
        """Return seconds until the next poll, if `num_left` shards are left now; None: nobody has finished a shard for
        too long. The time between polls grows with the wait."""
        if num_left != self._num_left:
            self._num_left, self._moved_at = num_left, now
        spare_s = self._moved_at + self._limit_s - now
        if spare_s <= 0:
            return None
        return min(max((now - self._began_at) / 10, _SHORTEST_S), _LONGEST_S, spare_s)


@runtime_checkable
class ShardSource(Protocol):
    """The shards of one dataset that this worker has."""

    @property
    def format(self) -> str:
        """The format of the dataset's files."""

    def shards(self, epoch: int) -> list[ShardAssignment]:
        """Return this worker's unfinished shards, in the order of reading; if there are many, only the first ones.

        A request for an epoch after the current one begins that epoch.
        """

    def mark_done(self, epoch: int, shard_ids: Sequence[int]) -> None:
        """Report shards as read to the end. A second report does nothing."""


@runtime_checkable
class RestorableSource(ShardSource, Protocol):
    """A shard source that can go back to a position and knows how far others are, like a coordinator."""

    @property
    def incarnation(self) -> int:
        """In a job, the incarnation of the worker that reads, from 0; else -1."""

    @property
    def is_elastic(self) -> bool:
        """True if all workers that read are started again together."""

    @property
    def num_left(self) -> int:
        """Unfinished shards of the epoch, of all workers; by the last answer to `shards`."""

    def restore(self, position: Mapping[str, Any], *, is_first: bool = False) -> None:
        """Go back to a position: exactly its shards are done.

        Args:
            is_first: do nothing if this process has restored a position before.
        """

    def status(self) -> DatasetStatus:
        """Return how far the dataset was read."""


@runtime_checkable
class ShardRegistry(Protocol):
    """A source of datasets by name, such as `unified.data.DatasetRegistry`."""

    def shard_source(self, dataset_id: str) -> ShardSource:
        """Return this worker's part of a dataset."""


class ShardedDataset(IterableDataset[Any]):
    """Iterates over this worker's samples of one epoch: dicts, or bytes of ``tfrecord``.

    Before each shard the worker asks again which shards it has. So it reads shards that it takes over from a lost
    worker, but not shards that were given to a new one. A shard is reported as done when its last sample was handed out
    and the next sample is requested. Each ``for`` over the dataset is the next epoch: the end of an iteration is the
    end of the epoch for this worker. If another worker is lost after that, nobody reads its shards, unless somebody
    waits for them: see `wait_for_others`. If an iteration was left before its end, the next one continues it.

    Shards that are done in an epoch are not served again, not even to the next incarnation of a worker. So a worker
    that goes on with an earlier model has to take the data back, too, with `load_state_dict`; if it finds no
    checkpoint, see `restart`.

    A thread of this process reads ahead, and ends with its iterator. Use ``DataLoader(…, num_workers=0)``: with more,
    each of torch's worker processes would read all samples of this worker.

    Args:
        registry: a `DatasetRegistry`; or the source of the shards itself, without `dataset_id`.
        dataset_id: name of a registered dataset.
        epoch: the first epoch to read.
        columns: names of the columns to read, in this order; None: all. Not for ``tfrecord``.
        transform: a function of each sample; called on the thread that reads ahead. None: none.
        prefetch_shards: the number of shards to read ahead; so many and one more are in memory. 0: none, and no
            thread. Default: the settings' ``prefetch_shards``, which is 2.
        verify: check the checksums of ``tfrecord`` samples, too.
        restart: what to do at the first iteration if no position was loaded and samples were read before. ``"anew"``:
            read `epoch` from its beginning, as if all readers had loaded that position. ``"resume"``: read what is
            left. Default: ``"anew"`` in an elastic role that was started again, because all its ranks begin again;
            else ``"resume"``, with a warning in the log.
        wait_for_others: seconds. Above 0, an iteration ends when all shards of the epoch are done, by all workers.
            Until then it waits, and reads shards that it receives from lost or leaving workers. `EpochTimeoutError` is
            raised if nobody finishes a shard for so long; with ``math.inf`` never. Default 0: the iteration ends when
            this worker has no more shards. Workers that take their steps together need this (collectives, as in an
            elastic role): a worker that waits here takes no step, so the others could take none.

    Raises:
        UsageError: an argument is not valid.
    """

    def __init__(
        self,
        registry: ShardRegistry | ShardSource,
        dataset_id: str | None = None,
        *,
        epoch: int = 0,
        columns: Sequence[str] | None = None,
        transform: Callable[[Any], Any] | None = None,
        prefetch_shards: int | None = None,
        verify: bool = False,
        restart: Literal["anew", "resume"] | None = None,
        wait_for_others: float = 0.0,
    ) -> None:
        if restart not in ("anew", "resume", None):
            raise UsageError(f'restart must be "anew" or "resume", not {restart!r}.')
        if prefetch_shards is None:
            prefetch_shards = RuntimeSettings.load_shared().dataset.prefetch_shards
        if prefetch_shards < 0:
            raise UsageError(f"prefetch_shards must be 0 or more, not {prefetch_shards}.")
        if dataset_id is not None and isinstance(registry, ShardRegistry):
            source = registry.shard_source(dataset_id)
        elif dataset_id is None and isinstance(registry, ShardSource):
            source = registry
        else:
            raise UsageError("ShardedDataset takes a registry and the id of a dataset, or a source of shards alone.")
        if not wait_for_others >= 0:
            raise UsageError(f"wait_for_others must be seconds from 0 on, not {wait_for_others}.")
        if wait_for_others and not isinstance(source, RestorableSource):
            raise UsageError("wait_for_others needs a source that knows how far others are, like a DatasetRegistry's.")
        self._source: ShardSource = source
        self._dataset_id = dataset_id or ""
        self._columns = columns
        self._transform = transform
        self._prefetch_shards = prefetch_shards
        self._verify = verify
        self._wait_for_others = wait_for_others
        open_format(source.format, columns)  # raises for wrong columns now
        self._position = ReadingPosition(_checked(epoch))
        self._restart = restart
        self._is_placed = False
        """True once the beginning is settled: a position was loaded, or an iteration begun."""
        self._turn: object = None
        self._reader: ShardReader | None = None
        """Kept for the next iteration, because it has an index of the files."""

    @property
    def epoch(self) -> int:
        """The epoch that is being read, or is read next."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Read this epoch next, from its begin; if it is the current one, the position stays."""
        self._position.go_to(_checked(epoch))
        self._turn = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last sample that was handed out; plain values, for a checkpoint."""
        return {"dataset_id": self._dataset_id, **self._position.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from exactly the position of a `state_dict`.

        Everything that was read after it comes again, in that epoch and in later ones, to the workers that have it now.
        So all readers load the same position (`merge_positions` makes one of all ranks' states), before any of them
        reads: the first one sets the dataset back, the others join it. A later load sets it back once more.

        Raises:
            UsageError: it is the state of another dataset, or not a state.
            CoordinatorError: other readers loaded another position, or read on without one.
        """
        if state.get("dataset_id", self._dataset_id) != self._dataset_id:
            raise UsageError(f"this is the position in {state.get('dataset_id')!r}, not in {self._dataset_id!r}.")
        if isinstance(self._source, RestorableSource):
            self._source.restore(state)
        self._position.load(state)
        self._is_placed = True
        self._turn = None
        if self._position.done and not isinstance(self._source, RestorableSource):
            self._source.mark_done(self._position.epoch, self._position.done)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this worker's samples of an epoch.

        Raises:
            DatasetError: a file cannot be read; names the file.
            EpochTimeoutError: others did not go on; see `wait_for_others`. The next iteration waits again.
            UsageError: in a worker process of torch; or another iteration was begun after this one.
        """
        if (info := get_worker_info()) is not None:
            raise UsageError(
                f"this is one of the {info.num_workers} worker processes of a torch DataLoader, each of which would "
                "read the same shards: use DataLoader(…, num_workers=0); ShardedDataset reads ahead by itself "
                "(prefetch_shards)."
            )
        self._turn = turn = object()
        return self._samples(turn)

    def _samples(self, turn: object) -> Iterator[Any]:
        position, source = self._position, self._source
        reader, self._reader = self._reader, None  # so that no other iteration uses it at the same time
        if reader is None:
            reader = ShardReader(source.format, columns=self._columns, verify=self._verify)
        prefetcher = ShardPrefetcher(partial(self._read, reader))
        try:
            if not self._is_placed:
                self._place()
                self._is_placed = True
            readings = self._plan() or self._next(turn)
            while readings:
                reading = readings[0]
                shard_id = reading.assignment.shard_id
                if self._prefetch_shards:
                    prefetcher.want(readings[: 1 + self._prefetch_shards])
                    samples: Iterator[Any] = prefetcher.take(shard_id)
                else:
                    samples = self._read(reader, reading)
                position.begin(reading)
                for sample in samples:
                    position.offset += 1
                    yield sample
                    self._check(turn)
                position.finish()
                source.mark_done(position.epoch, [shard_id])
                readings = self._next(turn)
            position.go_to(position.epoch + 1)
        finally:
            is_free = prefetcher.close()
            reader.close()
            if is_free:
                self._reader = reader

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}

    def _read(self, reader: ShardReader, reading: Reading) -> Generator[Any, None, None]:
        transform = self._transform
        for sample in reader.iter_samples(reading.assignment, reading.skip):
            yield sample if transform is None else transform(sample)

    def _place(self) -> None:
        """Begin anew, or with what is left, if no position was loaded; log a warning for the latter."""
        source, epoch = self._source, self._position.epoch
        if not isinstance(source, RestorableSource):
            return
        is_again = source.is_elastic and source.incarnation > 0
        if self._restart == "anew" or (self._restart is None and is_again):
            source.restore(self._position.state(), is_first=True)
            return
        is_empty = not source.shards(epoch)
        if not is_empty and source.incarnation <= 0:
            return
        status = source.status()
        num_done = status.num_done if status.epoch == epoch else status.num_shards * is_empty
        if num_done and self._restart is None:
            _log.warning(
                "dataset %r: %d of %d shards of epoch %d were read before, and are not served again; this worker gets "
                "%s. If its model has not learnt from them, take the data back: load_state_dict(…) with the state_dict "
                'of the model\'s checkpoint, or ShardedDataset(…, restart="anew") to begin anew. If that is as it '
                'should be: restart="resume".',
                status.dataset_id,
                num_done,
                status.num_shards,
                epoch,
                "none of them" if is_empty else "what is left",
            )

    def _plan(self) -> list[Reading]:
        position, source = self._position, self._source
        assignments = source.shards(position.epoch)
        if unheard := position.already_done(assignments):
            source.mark_done(position.epoch, unheard)
            assignments = source.shards(position.epoch)  # only now the first is certain
        return position.plan(assignments)

    def _next(self, turn: object) -> list[Reading]:
        """Return the next readings, once there are any; an empty list at the end of the epoch."""
        source, epoch = self._source, self._position.epoch
        if not self._wait_for_others or not isinstance(source, RestorableSource):
            return self._plan()
        policy = WaitPolicy(self._wait_for_others, time.monotonic())
        try:
            while not (readings := self._plan()) and source.num_left:
                wait_s = policy.next_poll_s(time.monotonic(), source.num_left)
                if wait_s is None:
                    raise EpochTimeoutError(self._waited_for(source, epoch))
                time.sleep(wait_s)
                self._check(turn)
        except CoordinatorError as error:
            if error.code != "ended":
                raise
            return []  # another waiting worker saw the end of the epoch, and went on to the next
        return readings

    def _waited_for(self, source: RestorableSource, epoch: int) -> str:
        status = source.status()
        return (
            f"{source.num_left} of {status.num_shards} shards of epoch {epoch} of dataset {status.dataset_id!r} "
            f"belong to other workers ({', '.join(status.workers)}), and no shard was finished in "
            f"{self._wait_for_others:g} s. Do they all read? Take out the others with DatasetRegistry.remove_worker: "
            "then other workers read what is left of theirs. Or give a longer wait_for_others."
        )

    def _check(self, turn: object) -> None:
        if self._turn is not turn:
            raise UsageError("this iteration is over: another one was begun, or set_epoch or load_state_dict called.")


def _checked(epoch: int) -> int:
    if epoch < 0:
        raise UsageError(f"epochs count from 0 up: there is no epoch {epoch}.")
    return epoch
