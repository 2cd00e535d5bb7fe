"""One epoch of a loader: carries out a schedule, asks workers for batches, and hands them to the consumer."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

from unified.errors import LoaderError, LoaderTimeoutError
from unified.loader.messages import FetchBatch, FetchFailure, FetchReply, LoaderWorkers, OpenStream, StreamEnd
from unified.loader.schedule import Action, Fetch, Fetched, GiveUp, Lost, Open, Schedule, StreamFinished, Taken


class _Answer(NamedTuple):
    fetch: Fetch
    future: Future[FetchReply]


class EpochSettings(NamedTuple):
    """The options of an epoch; see `Schedule`."""

    num_streams: int
    depth: int = 2
    in_order: bool = True
    max_retries: int = 3
    timeout_s: float | None = None
    """Seconds for the next batch; None: no limit."""


@dataclass(eq=False)
class Epoch:
    """One pass over the data. Made, used and closed by one thread at a time."""

    workers: LoaderWorkers
    key: str
    """The loader's name at the workers."""
    tasks: Iterator[Any]
    """One task for each batch."""
    settings: EpochSettings
    _: KW_ONLY
    base_seed: int
    number: int
    """The number of the epoch, from 0."""
    unwrap: Callable[[Any], Any]
    """Turns a received value into the batch that the consumer gets."""
    thread: ThreadPoolExecutor | None = None
    """Runs `unwrap` as soon as a batch is here; None: the consumer's thread does, when it takes the batch."""

    def __post_init__(self) -> None:
        self._schedule = Schedule(
            self.tasks,
            initial_workers=self.workers.initial_workers(self.settings.num_streams),
            num_workers=len(self.workers),
            depth=self.settings.depth,
            in_order=self.settings.in_order,
            max_retries=self.settings.max_retries,
            is_restarted=self.workers.is_restarted,
        )
        self._answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        self._asked: set[Future[FetchReply]] = set()
        self._values: dict[int, Any] = {}
        self._failures: dict[int, BaseException] = {}
        self._broken: BaseException | None = None
        self._perform(self._schedule.start())

    @property
    def is_broken(self) -> bool:
        """True if no more batches will come."""
        return self._broken is not None

    def take(self) -> Any:
        """Return the next batch.

        Raises:
            StopIteration: the epoch is over.
            RemoteError: the dataset, `collate_fn` or `worker_init_fn` raised; also an instance of the raised class. The
                batches after it can still be taken.
            LoaderTimeoutError: it did not come in time; another call waits for it again.
            LoaderError: it was lost too often.
        """
        if self._broken is not None:
            raise self._broken
        deadline = None if self.settings.timeout_s is None else time.monotonic() + self.settings.timeout_s
        while (ready := self._schedule.ready) is None:
            if self._schedule.is_done:
                if (failure := self._schedule.failure) is not None:  # an error of the sampler
                    self._schedule.failure = None
                    raise failure
                raise StopIteration
            self._take_in(self._next_answer(deadline))
        while not self._answers.empty():  # so that idle streams get new requests
            self._take_in(self._answers.get())
        self._perform(self._schedule.step(Taken(ready)))
        if (error := self._failures.pop(ready, None)) is not None:
            raise error
        value = self._values.pop(ready)
        return value.result() if isinstance(value, Future) else self.unwrap(value)

    def close(self) -> None:
        """Cancel all requests."""
        for future in list(self._asked):
            future.cancel()
        self._values.clear()

    def _next_answer(self, deadline: float | None) -> _Answer:
        try:
            return self._answers.get(timeout=None if deadline is None else max(deadline - time.monotonic(), 0.0))
        except queue.Empty:
            raise LoaderTimeoutError(
                f"the next batch did not come within {self.settings.timeout_s:g} s, the loader's timeout: is the "
                "dataset stuck, or the timeout too short?"
            ) from None

    def _take_in(self, answer: _Answer) -> None:
        fetch, future = answer
        self._asked.discard(future)
        if not self._schedule.is_current(fetch.batch, fetch.attempt):
            return
        try:
            reply = future.result()
        except Exception as error:
            if reason := self.workers.lost(fetch.worker, error):
                self._perform(self._schedule.step(Lost(fetch.batch, fetch.attempt, reason)))
                return
            error.add_note(f"This error ended batch {fetch.batch} of a data loader.")
            self._failures[fetch.batch] = error
        else:
            if isinstance(reply, StreamEnd):
                self._perform(self._schedule.step(StreamFinished(fetch.batch, fetch.attempt)))
                return
            if isinstance(reply, FetchFailure):
                self._failures[fetch.batch] = reply.error()
            else:
                value = reply.value
                self._values[fetch.batch] = self.thread.submit(self.unwrap, value) if self.thread else value
        self._perform(self._schedule.step(Fetched(fetch.batch, fetch.attempt)))

    def _perform(self, actions: list[Action]) -> None:
        try:
            for action in actions:
                self._perform_one(action)
        except BaseException as error:  # a batch that was not requested will not come
            self._broken = error
            raise

    def _perform_one(self, action: Action) -> None:
        match action:
            case Open(worker=worker, stream=stream, skip=skip):
                message = OpenStream(self.key, stream, self.settings.num_streams, self.base_seed, self.number, skip)
                self.workers.open(worker, message)
            case Fetch(worker=worker, stream=stream, batch=batch, task=task):
                future = self.workers.fetch(worker, FetchBatch(self.key, stream, batch, task))
                self._asked.add(future)
                future.add_done_callback(lambda done: self._answers.put(_Answer(action, done)))
            case GiveUp(batch=batch, losses=losses, reason=reason):
                raise LoaderError(
                    f"batch {batch} was lost {losses} times, each time because the process that made it was lost; "
                    f"last reason: {reason}"
                )
