"""The streams in a process that fetches, each with its own copy of a dataset and its own random numbers."""

from __future__ import annotations

import itertools
import random
import reprlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader, IterableDataset, _utils

from unified.bus.calls import remote_errors
from unified.job.by_value import dumps
from unified.loader.messages import (
    FetchBatch,
    FetchedBatch,
    FetchFailure,
    FetchReply,
    OpenStream,
    StreamEnd,
    StreamLostError,
)

_SHORT = reprlib.Repr()
_SHORT.maxlist, _SHORT.maxstring, _SHORT.maxother = 6, 200, 200
"""Limits on the text of keys in a message: keys may be whole items."""


@dataclass(frozen=True, eq=False)
class LoaderParts:
    """A dataset, and how to make batches of it.

    Attributes:
        dataset: map-style (`dataset[key]`) or iterable.
        collate_fn: makes a batch of a list of samples, or converts one sample if there are no batches.
        worker_init_fn: called with the stream's id in each process that fetches, or None.
        is_iterable: the dataset is iterated over; tasks are ignored.
        has_batches: a task is a list of keys; else one key.
        batch_size, drop_last: the loader's, for an iterable dataset.
        name: the dataset's, for messages.
    """

    dataset: Any
    collate_fn: Callable[[Any], Any]
    worker_init_fn: Callable[[int], Any] | None = None
    is_iterable: bool = False
    has_batches: bool = False
    batch_size: int | None = None
    drop_last: bool = False
    name: str = "the dataset"

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> LoaderParts:
        return cls(
            dataset=loader.dataset,
            collate_fn=loader.collate_fn,
            worker_init_fn=loader.worker_init_fn,
            is_iterable=isinstance(loader.dataset, IterableDataset),
            has_batches=loader.batch_sampler is not None,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            name=f"dataset {type(loader.dataset).__name__}",
        )

    def pack(self) -> bytes:
        """Return bytes that any process of the job can read; a script's classes, functions and lambdas go by value."""
        return dumps(self)


def tasks_of(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield the tasks of one epoch: the sampler's keys, batch by batch; no end for an iterable dataset."""
    if isinstance(loader.dataset, IterableDataset):
        return itertools.repeat(None)
    keys: Iterable[Any] = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return iter(keys)


class RandomState:
    """The state of every global source of random numbers that torch seeds for its own data loader workers."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._torch = torch.get_rng_state()
        self._numpy = numpy.random.get_state() if (numpy := _numpy()) is not None else None

    def restore(self) -> None:
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        if (numpy := _numpy()) is not None and self._numpy is not None:
            numpy.random.set_state(self._numpy)


def seed_as_torch_does(base_seed: int, stream: int) -> int:
    """Seed this process as torch seeds its data loader worker of this id; return the seed."""
    seed = base_seed + stream
    random.seed(seed)
    torch.manual_seed(seed)
    if (numpy := _numpy()) is not None:
        numpy.random.seed(_utils.worker._generate_state(base_seed, stream))  # type: ignore[no-untyped-call]
    return seed


@dataclass(eq=False)
class StreamHost:
    """The streams of one loader in this process."""

    load: Callable[[], LoaderParts]
    """Returns a copy of the loader's parts; each stream asks for one."""
    where: str
    """Name of this process, for messages."""
    node: str = ""
    is_sent_on: bool = False
    """Batches leave this process through the bus, and not through torch's shared memory."""
    _streams: dict[int, _HostedStream | FetchFailure] = field(default_factory=dict)
    _on_stage: ClassVar[_HostedStream | None] = None
    """The stream, of any host, whose random numbers and worker info this process uses now."""

    def open(self, message: OpenStream) -> None:
        """Begin an epoch. An error of the user's code is the answer to the first fetch."""
        StreamHost._leave_stage()
        try:
            stream = self._streams.get(message.stream)
            if not isinstance(stream, _HostedStream):
                stream = self._streams[message.stream] = _HostedStream(self.load(), self.is_sent_on)
            StreamHost._on_stage = stream
            stream.begin(message)
        except Exception as error:
            what = f"the start of stream {message.stream} of a data loader"
            self._streams[message.stream] = self._failure(error, what)
            StreamHost._leave_stage()

    def fetch(self, message: FetchBatch) -> FetchReply:
        """Make a batch.

        Raises:
            StreamLostError: the stream was never opened here.
        """
        stream = self._streams.get(message.stream)
        if stream is None:
            raise StreamLostError(f"stream {message.stream} of loader {message.key} is not open in {self.where}.")
        if isinstance(stream, FetchFailure):
            return stream
        if StreamHost._on_stage is not stream:
            StreamHost._leave_stage()
            stream.enter_stage()
            StreamHost._on_stage = stream
        try:
            return FetchedBatch(stream.fetch(message.task))
        except _EndOfStream:
            return StreamEnd()
        except Exception as error:
            return self._failure(error, f"batch {message.batch}, {stream.doing}, of {stream.parts.name}")

    def close(self) -> None:
        """Release the datasets."""
        if StreamHost._on_stage in self._streams.values():
            StreamHost._leave_stage()
        self._streams.clear()

    @staticmethod
    def _leave_stage() -> None:
        if StreamHost._on_stage is not None:
            StreamHost._on_stage.leave_stage()
            StreamHost._on_stage = None

    def _failure(self, error: Exception, what: str) -> FetchFailure:
        return FetchFailure(what, remote_errors.describe(error, worker=self.where, node=self.node, ours=globals()))


class _EndOfStream(Exception):
    pass


class _HostedStream:
    """One of torch's "workers": an id, a dataset, a state."""

    def __init__(self, parts: LoaderParts, is_sent_on: bool) -> None:
        self.parts = parts
        self.doing = ""
        """The work on the current batch, for the message of an error of the user's code."""
        self._is_sent_on = is_sent_on
        self._is_fresh = True
        self._random: RandomState | None = None
        self._info: Any = None
        self._items: Iterator[Any] = iter(())
        self._num_read = 0
        self._has_ended = False

    def begin(self, message: OpenStream) -> None:
        seed = seed_as_torch_does(message.base_seed, message.stream)
        self._info = _utils.worker.WorkerInfo(
            id=message.stream, num_workers=message.num_streams, seed=seed, dataset=self.parts.dataset
        )
        _utils.worker._worker_info = self._info
        if self._is_fresh and self.parts.worker_init_fn is not None:
            self.parts.worker_init_fn(message.stream)
            if message.epoch > 0:  # as if the stream had existed since epoch 0
                seed_as_torch_does(message.base_seed, message.stream)
        self._is_fresh = False
        if self.parts.is_iterable:
            self._items, self._num_read, self._has_ended = iter(self.parts.dataset), 0, False
            self._skip(message.skip)

    def fetch(self, task: Any) -> Any:
        samples = self._read() if self.parts.is_iterable else self._look_up(task)
        self.doing = "in its collate_fn"
        if self._is_sent_on and self.parts.collate_fn is _utils.collate.default_collate:
            # With worker info it makes the batch in torch's shared memory, which the bus would copy into its own.
            _utils.worker._worker_info = None
        try:
            return self.parts.collate_fn(samples)
        finally:
            _utils.worker._worker_info = self._info

    def enter_stage(self) -> None:
        _utils.worker._worker_info = self._info
        if self._random is not None:
            self._random.restore()

    def leave_stage(self) -> None:
        self._random = RandomState()
        _utils.worker._worker_info = None

    def _look_up(self, task: Any) -> Any:
        dataset = self.parts.dataset
        if not self.parts.has_batches:
            self.doing = f"sample {_SHORT.repr(task)}"
            return dataset[task]
        if getattr(dataset, "__getitems__", None):
            keys = list(task)
            self.doing = f"samples {_SHORT.repr(keys)}"
            return dataset.__getitems__(keys)
        samples = []
        for key in task:
            self.doing = f"sample {_SHORT.repr(key)}"
            samples.append(dataset[key])
        return samples

    def _read(self) -> Any:
        if self._has_ended:
            raise _EndOfStream
        if not self.parts.has_batches:
            return self._next()
        samples: list[Any] = []
        try:
            for _ in range(self.parts.batch_size or 1):
                samples.append(self._next())  # noqa: PERF401  # those before the end are kept
        except _EndOfStream:
            if not samples or self.parts.drop_last:
                raise
        return samples

    def _next(self) -> Any:
        self.doing = f"item {self._num_read} of stream {self._info.id}"
        try:
            item = next(self._items)
        except StopIteration:
            self._has_ended = True
            raise _EndOfStream from None
        self._num_read += 1
        return item

    def _skip(self, count: int) -> None:
        """Make and drop batches, so that the dataset and `collate_fn` reach the state that they had elsewhere."""
        for _ in range(count):
            try:
                self.fetch(None)
            except Exception:  # the consumer got it when it happened first
                continue


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy
