"""The schedule of an epoch: which batch is fetched where, and which the consumer gets next; decisions only, no I/O.

Terms: a *batch* is numbered from 0 in the order in which the consumer gets it. A *stream* is what torch calls a worker:
it has an id, its own copy of the dataset and its own random numbers, and answers requests in order. A *worker* here is
a process that runs streams; if it is lost, the unanswered requests of its streams are lost, too.

Batches go to streams in turn (0, 1, …, n-1, 0, …), and the end of a stream takes effect when its turn comes. So the
consumer's batches depend on neither timing nor losses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple


class Open(NamedTuple):
    """Make a stream at a worker; it has answered `skip` batches of this epoch before, elsewhere."""

    worker: int
    stream: int
    skip: int


class Fetch(NamedTuple):
    """Ask a stream for a batch. The same batch asked for again is another attempt."""

    worker: int
    stream: int
    batch: int
    attempt: int
    task: Any


class GiveUp(NamedTuple):
    """A batch was lost too often; nothing more will come."""

    batch: int
    losses: int
    reason: str


class Fetched(NamedTuple):
    """A batch is here, or an error in its making, which the consumer gets."""

    batch: int
    attempt: int


class StreamFinished(NamedTuple):
    """A stream has no more batches: its answer in place of one."""

    batch: int
    attempt: int


class Lost(NamedTuple):
    """The worker that was to fetch this batch is gone."""

    batch: int
    attempt: int
    reason: str


class Taken(NamedTuple):
    """The consumer took the batch that was `ready`."""

    batch: int


Action = Open | Fetch | GiveUp
Event = Fetched | StreamFinished | Lost | Taken


@dataclass
class _StreamState:
    worker: int
    is_open: bool = False
    is_over: bool = False
    is_tested: bool = False
    """True while the stream is asked for a single batch, after its worker was lost: if that batch is lost, too, it is
    to blame."""
    num_answered: int = 0
    asked: deque[int] = field(default_factory=deque)
    """Batches that it has not answered yet."""
    num_untaken: int = 0
    """Batches of this stream, answered or not, that the consumer does not have yet."""


@dataclass
class _BatchState:
    stream: int
    task: Any
    attempt: int = 0
    losses: int = 0
    is_here: bool = False
    is_end: bool = False


@dataclass(eq=False)
class Schedule:
    """The bookkeeping of one epoch."""

    tasks: Iterator[Any]
    """One for each batch; drawn only while there is room. An error of the iterator ends it; `failure` keeps the error
    until the batches before it were taken."""
    _: KW_ONLY
    initial_workers: Sequence[int]
    """The worker at which each stream begins."""
    num_workers: int
    depth: int = 2
    """Batches of one stream that may be on their way or waiting to be taken, from 1."""
    in_order: bool = True
    """Batches are handed out in the order of `tasks`; else as they come."""
    max_retries: int = 3
    """Number of times that one batch may be lost; above that the epoch ends in `GiveUp`."""
    is_restarted: bool = False
    """A lost worker is replaced at once; else its streams move to other workers, if there are any."""
    failure: BaseException | None = None

    def __post_init__(self) -> None:
        self._streams = [_StreamState(worker) for worker in self.initial_workers]
        self._times_lost = [0] * self.num_workers
        self._batches: dict[int, _BatchState] = {}
        """Batches that the consumer does not have yet, in order."""
        self._arrived: deque[int] = deque()
        self._next_batch = 0
        self._turn = 0
        self._is_drained = False
        self._has_given_up = False

    @property
    def ready(self) -> int | None:
        """The batch that the consumer can take now."""
        if not self.in_order:
            return self._arrived[0] if self._arrived else None
        first = next(iter(self._batches), None)
        return first if first is not None and self._batches[first].is_here else None

    @property
    def is_done(self) -> bool:
        """True if nothing is left to take, and nothing will come."""
        return self._has_given_up or not self._batches

    def is_current(self, batch: int, attempt: int) -> bool:
        """Return whether an answer to this attempt is still waited for."""
        return self._current(batch, attempt) is not None

    def start(self) -> list[Action]:
        """Ask for the first batches."""
        return self._fill()

    def step(self, event: Event) -> list[Action]:
        """Handle an event. An event of an outdated attempt changes nothing."""
        if self._has_given_up:
            return []
        if isinstance(event, Taken):
            return self._on_taken(event.batch)
        batch = self._current(event.batch, event.attempt)
        if batch is None:
            return []
        match event:
            case Fetched():
                return self._on_fetched(event.batch, batch)
            case StreamFinished():
                return self._on_ended(event.batch, batch)
            case Lost():
                return self._on_lost(self._streams[batch.stream].worker, event.reason)

    def _current(self, number: int, attempt: int) -> _BatchState | None:
        batch = self._batches.get(number)
        return batch if batch is not None and batch.attempt == attempt and not batch.is_here else None

    def _on_fetched(self, number: int, batch: _BatchState) -> list[Action]:
        stream = self._streams[batch.stream]
        stream.asked.remove(number)
        stream.num_answered += 1
        batch.is_here = True
        self._arrived.append(number)
        if not stream.is_tested:
            return []
        stream.is_tested = False
        return [action for waiting in stream.asked for action in self._ask(waiting)]

    def _on_ended(self, number: int, batch: _BatchState) -> list[Action]:
        batch.is_end = True
        self._streams[batch.stream].asked.remove(number)
        if not self.in_order:
            self._end_stream(batch.stream)
        return self._fill()

    def _on_taken(self, number: int) -> list[Action]:
        batch = self._batches.pop(number)
        self._arrived.remove(number)
        self._streams[batch.stream].num_untaken -= 1
        return self._fill()

    def _on_lost(self, worker: int, reason: str) -> list[Action]:
        self._times_lost[worker] += 1
        again: list[int] = []
        for stream in self._streams:
            if stream.worker != worker:
                continue
            stream.is_open = False
            if stream.asked:
                first = self._batches[stream.asked[0]]
                first.losses += 1
                if first.losses > self.max_retries:
                    self._has_given_up = True
                    return [GiveUp(stream.asked[0], first.losses, reason)]
                stream.is_tested = True
                again.append(stream.asked[0])
            for number in stream.asked:
                self._batches[number].attempt += 1
        for stream in self._streams:
            if stream.worker == worker:
                stream.worker = self._other_worker(worker)
        actions: list[Action] = []
        for number in sorted(again):
            actions += self._ask(number)
        return actions

    def _other_worker(self, lost: int) -> int:
        """Return, among the workers that were lost least often, the one with the fewest streams."""
        others = [worker for worker in range(len(self._times_lost)) if worker != lost]
        if self.is_restarted or not others:
            return lost
        load = [sum(stream.worker == worker for stream in self._streams) for worker in range(len(self._times_lost))]
        return min(others, key=lambda worker: (self._times_lost[worker], load[worker], (worker - lost) % len(load)))

    def _fill(self) -> list[Action]:
        self._pass_ends()
        actions: list[Action] = []
        while not self._is_drained and (turn := self._find_turn()) is not None:
            try:
                task = next(self.tasks)
            except StopIteration:
                self._is_drained = True
                break
            except BaseException as error:  # the user's code
                self._is_drained, self.failure = True, error
                break
            number, self._next_batch, self._turn = self._next_batch, self._next_batch + 1, turn + 1
            self._batches[number] = _BatchState(turn, task)
            self._streams[turn].asked.append(number)
            self._streams[turn].num_untaken += 1
            if not self._streams[turn].is_tested:
                actions += self._ask(number)
        return actions

    def _find_turn(self) -> int | None:
        """Return the stream that gets the next batch; None while there is no room."""
        for i in range(len(self._streams)):
            turn = (self._turn + i) % len(self._streams)
            stream = self._streams[turn]
            if stream.is_over:
                continue
            if stream.num_untaken < self.depth:
                return turn
            if self.in_order:  # no stream overtakes another
                return None
        return None

    def _ask(self, number: int) -> list[Action]:
        batch = self._batches[number]
        stream = self._streams[batch.stream]
        actions: list[Action] = []
        if not stream.is_open:
            stream.is_open = True
            actions.append(Open(stream.worker, batch.stream, stream.num_answered))
        return [*actions, Fetch(stream.worker, batch.stream, number, batch.attempt, batch.task)]

    def _pass_ends(self) -> None:
        """End each stream whose end is next in turn."""
        while self.in_order and (first := next(iter(self._batches), None)) is not None:
            if not self._batches[first].is_end:
                return
            self._end_stream(self._batches[first].stream)

    def _end_stream(self, index: int) -> None:
        """End a stream: its other requests are not waited for."""
        stream = self._streams[index]
        stream.is_over = True
        for number in [number for number, batch in self._batches.items() if batch.stream == index]:
            if not self._batches[number].is_here:
                del self._batches[number]
                stream.num_untaken -= 1
        stream.asked.clear()
