"""`ShardedDataset`: the samples that are this worker's, as torch's data loaders take them."""

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
    """The wait for the end of an epoch: when to look again whether it is over, and when to give it up.

    Args:
        limit_s: so long it waits without any shard being finished; ``math.inf``: for ever.
        now: seconds, on any clock.
    """

    def __init__(self, limit_s: float, now: float) -> None:
        self._limit_s = limit_s
        self._began_at = self._moved_at = now
        self._num_left: int | None = None

    def next_poll_s(self, now: float, num_left: int) -> float | None:
        """Return seconds until the next poll, if at this one so many shards were left; None: nobody has finished one
        for too long. The longer it waits, the more seldom it looks."""
        if num_left != self._num_left:
            self._num_left, self._moved_at = num_left, now
        spare_s = self._moved_at + self._limit_s - now
        if spare_s <= 0:
            return None
        return min(max((now - self._began_at) / 10, _SHORTEST_S), _LONGEST_S, spare_s)


@runtime_checkable
class ShardSource(Protocol):
    """The shards of one dataset that are this worker's."""

    @property
    def format(self) -> str:
        """The format of the dataset's files."""

    def shards(self, epoch: int) -> list[ShardAssignment]:
        """Return the shards that are this worker's now and not done, in the order in which they are to be read; of
        many, the first.

        An epoch after the current one is begun by asking for it.
        """

    def mark_done(self, epoch: int, shard_ids: Sequence[int]) -> None:
        """Report shards as read to the end. To say so twice does nothing."""


@runtime_checkable
class RestorableSource(ShardSource, Protocol):
    """A shard source that can go back to a position and knows how far others are, as a coordinator does."""

    @property
    def incarnation(self) -> int:
        """In a job, the incarnation of the worker that reads, from 0; else -1."""

    @property
    def is_elastic(self) -> bool:
        """True if all who read are started again together."""

    @property
    def num_left(self) -> int:
        """Unfinished shards of the epoch, whoever has them; by the last answer to `shards`."""

    def restore(self, position: Mapping[str, Any], *, is_first: bool = False) -> None:
        """Go back to a position: what is done is exactly what is done there.

        Args:
            is_first: nothing happens if this process has restored one before.
        """

    def status(self) -> DatasetStatus:
        """Return how far the dataset was read."""


@runtime_checkable
class ShardRegistry(Protocol):
    """A source of datasets by name, such as `unified.data.DatasetRegistry`."""

    def shard_source(self, dataset_id: str) -> ShardSource:
        """Return this worker's part of a dataset."""


class ShardedDataset(IterableDataset[Any]):
    """Iterates over the samples of one epoch that are this worker's: dicts, or bytes of ``tfrecord``.

    Before each shard it is settled anew which are this worker's, so that what is taken over from a lost worker is
    read too, and what was given to a new one is not. A shard is reported as done when its last sample was handed out
    and the next one is asked for. Each ``for`` over it is the next epoch: the end of an iteration is the end of the
    epoch for this worker. What another worker leaves behind when it is lost after that is read by nobody, unless
    somebody waits for it: see `wait_for_others`. An iteration that was left before its end is gone on with by the next.

    What is done in an epoch is not served again, also to the next incarnation of a worker. So one that goes on with an
    earlier model has to take the data back, too, with `load_state_dict`; if it finds no checkpoint, see `restart`.

    Reading ahead is done by a thread of this process, which ends with its iterator. Use it with
    ``DataLoader(…, num_workers=0)``: with more, torch's worker processes would each read all that is this worker's.

    Args:
        registry: a `DatasetRegistry`; or the source of the shards itself, without `dataset_id`.
        dataset_id: name of a registered dataset.
        epoch: the first to be read.
        columns: names of those to read, in this order; None: all. Not for ``tfrecord``.
        transform: a function of each sample; called on the thread that reads ahead. None: none.
        prefetch_shards: shards that are read ahead of the one that is handed out; so many and one more are in memory.
            0: none, and no thread. Default: the settings' ``prefetch_shards``, which is 2.
        verify: check the checksums of ``tfrecord`` samples, too.
        restart: what to do at the first iteration if no position was loaded and samples were read before. ``"anew"``:
            read `epoch` from its beginning, as if all who read together had loaded that position. ``"resume"``: read
            what is left. Default: ``"anew"`` in an elastic role that was started again, as all of its ranks begin again
            then; else ``"resume"``, with a warning in the log.
        wait_for_others: seconds. Above 0, an iteration ends when all shards of the epoch are done, by whomever: until
            then it waits, and reads what it is given of those that are lost or leave. The error comes when so long
            nobody has finished a shard; with ``math.inf`` never. Default 0: it ends when this worker has no more, as it
            must where workers take their steps together (collectives, as in an elastic role): one that waits here takes
            no step, and so none of the others would.

    Raises:
        UsageError: an argument that cannot be.
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
            raise UsageError("wait_for_others needs a source that knows how far others are, as a DatasetRegistry's do.")
        self._source: ShardSource = source
        self._dataset_id = dataset_id or ""
        self._columns = columns
        self._transform = transform
        self._prefetch_shards = prefetch_shards
        self._verify = verify
        self._wait_for_others = wait_for_others
        open_format(source.format, columns)  # so that what cannot be is refused now
        self._position = ReadingPosition(_checked(epoch))
        self._restart = restart
        self._is_placed = False
        """True once the beginning is settled: a position was loaded, or an iteration begun."""
        self._turn: object = None
        self._reader: ShardReader | None = None
        """The reader, kept from one iteration for the next, as it knows its way about the files by then."""

    @property
    def epoch(self) -> int:
        """The epoch that is being read, or will be."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Read this epoch next, from its begin; if it is the present one, nothing changes."""
        self._position.go_to(_checked(epoch))
        self._turn = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last sample that was handed out; plain values, for a checkpoint."""
        return {"dataset_id": self._dataset_id, **self._position.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was asked for: the data go on from exactly this position.

        Everything that was read after it comes again, in that epoch and in later ones, to whomever it is assigned. So
        all who read together load the same position (`merge_positions` makes one of all ranks' states), before any of
        them reads: the first one sets the dataset back, the others join it. To load again later sets it back once more.

        Raises:
            UsageError: it is the state of another dataset, or none.
            CoordinatorError: others who read it loaded another position, or read on without one.
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
        """Iterate over the samples of an epoch, as the class says.

        Raises:
            DatasetError: a file cannot be read; names it.
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
        """Begin anew, or with what is left, where no position was loaded; the log says so."""
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
            assignments = source.shards(position.epoch)  # only who asks after that has the first for sure
        return position.plan(assignments)

    def _next(self, turn: object) -> list[Reading]:
        """Return what is to be read now, once there is something; nothing if this was the end of the epoch."""
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
            return []  # another one that waited has seen the end of the epoch, and gone on to the next
        return readings

    def _waited_for(self, source: RestorableSource, epoch: int) -> str:
        status = source.status()
        return (
            f"{source.num_left} of {status.num_shards} shards of epoch {epoch} of dataset {status.dataset_id!r} are "
            f"other workers', of {', '.join(status.workers)}, and none was finished in {self._wait_for_others:g} s. Do "
            "they all read? Those that do not are taken out by DatasetRegistry.remove_worker, and what they have left "
            "is read by others; or give a longer wait_for_others."
        )

    def _check(self, turn: object) -> None:
        if self._turn is not turn:
            raise UsageError("this iteration is over: another one was begun, or set_epoch or load_state_dict called.")


def _checked(epoch: int) -> int:
    if epoch < 0:
        raise UsageError(f"epochs count from 0 up: there is no epoch {epoch}.")
    return epoch
