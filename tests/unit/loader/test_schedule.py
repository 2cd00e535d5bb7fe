"""Order, exactly-once, bounds and progress of the loader's bookkeeping, whatever comes when, and whatever is lost."""

import itertools
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unified.loader.schedule import Action, Fetch, Fetched, GiveUp, Lost, Open, Schedule, StreamFinished, Taken


class FakeWorkers:
    """Streams as they are at places: orders in line, all forgotten when the place is lost. An iterable stream has
    `lengths[stream]` batches."""

    def __init__(self, num_workers: int, lengths: list[int] | None) -> None:
        self.lengths = lengths
        self.work: list[deque[Open | Fetch]] = [deque() for _ in range(num_workers)]
        self.open: list[dict[int, int]] = [{} for _ in range(num_workers)]
        """For each place: stream to number of the next item in it."""
        self.failed: deque[Fetch] = deque()
        """Fetches that were lost, whose news is on its way."""
        self.given_up: GiveUp | None = None
        self.num_losses = 0

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, GiveUp):
                self.given_up = action
            else:
                self.work[action.worker].append(action)

    def answer(self, worker: int) -> tuple[Fetched | StreamFinished | Lost, object]:
        """Carry out orders up to the next fetch, and that."""
        while isinstance(message := self.work[worker].popleft(), Open):
            self.open[worker][message.stream] = message.skip
        position = self.open[worker].get(message.stream)
        if position is None:  # sent to a process that is younger than the schedule knows
            assert self.num_losses, "a fetch before its stream was opened there"
            return Lost(message.batch, message.attempt, "it does not know that stream"), None
        if self.lengths is not None and position >= self.lengths[message.stream]:
            return StreamFinished(message.batch, message.attempt), None
        self.open[worker][message.stream] += 1
        value = message.task if self.lengths is None else (message.stream, position)
        return Fetched(message.batch, message.attempt), value

    def lose(self, worker: int) -> None:
        self.num_losses += 1
        self.failed.extend(message for message in self.work[worker] if isinstance(message, Fetch))
        self.work[worker].clear()
        self.open[worker].clear()


def drive(
    schedule: Schedule, workers: FakeWorkers, draw: Iterator[int], *, depth: int, num_streams: int, max_losses: int = 0
) -> list[object]:
    """Let things happen in the order that `draw` says, until nothing can; what the consumer took."""
    taken: list[object] = []
    values: dict[int, object] = {}
    workers.perform(schedule.start())
    while not schedule.is_done and workers.given_up is None:
        busy = [worker for worker in range(len(workers.work)) if workers.work[worker]]
        orders = itertools.chain.from_iterable(workers.work)
        fetches = [message for message in orders if isinstance(message, Fetch)]
        waited_for = [fetch for fetch in fetches if schedule.is_current(fetch.batch, fetch.attempt)]
        assert len(waited_for) + len(values) <= depth * num_streams, "more at once than there is room for"
        moves = [("answer", worker) for worker in busy]
        moves += [("lose", worker) for worker in busy if workers.num_losses < max_losses]
        moves += [("news", 0)] if workers.failed else []
        moves += [("take", 0)] if schedule.ready is not None else []
        assert moves, "nothing can happen, and it is not done"
        kind, worker = moves[next(draw) % len(moves)]
        if kind == "answer":
            event, value = workers.answer(worker)
            if schedule.is_current(event.batch, event.attempt) and isinstance(event, Fetched):
                assert event.batch not in values
                values[event.batch] = value
            workers.perform(schedule.step(event))
        elif kind == "lose":
            workers.lose(worker)
        elif kind == "news":
            lost = workers.failed.popleft()
            workers.perform(schedule.step(Lost(lost.batch, lost.attempt, "it was killed")))
        else:
            ready = schedule.ready
            assert ready is not None
            taken.append(values.pop(ready))
            workers.perform(schedule.step(Taken(ready)))
    return taken


def choices(data: st.DataObject) -> Iterator[int]:
    """Endless; what hypothesis does not say is pseudo-random."""
    said = data.draw(st.lists(st.integers(0, 11), max_size=80))
    return itertools.chain(said, (n * 2654435761 >> 7 for n in itertools.count()))


SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
"""Streams, workers, depth."""


def made(
    tasks: Iterator[object], shape: tuple[int, int, int], *, in_order: bool, is_restarted: bool, retries: int
) -> Schedule:
    num_streams, num_workers, depth = shape
    initial_workers = [stream % num_workers for stream in range(num_streams)]
    return Schedule(
        tasks,
        initial_workers=initial_workers,
        num_workers=num_workers,
        depth=depth,
        in_order=in_order,
        max_retries=retries,
        is_restarted=is_restarted,
    )


@settings(max_examples=150)
@given(st.data(), SHAPES, st.integers(0, 15), st.booleans(), st.booleans())
def test_every_task_once_whatever_is_lost(
    data: st.DataObject, shape: tuple[int, int, int], size: int, in_order: bool, is_restarted: bool
) -> None:
    losses = 3
    schedule = made(iter(range(size)), shape, in_order=in_order, is_restarted=is_restarted, retries=losses)
    workers = FakeWorkers(shape[1], None)
    taken = drive(schedule, workers, choices(data), depth=shape[2], num_streams=shape[0], max_losses=losses)
    assert workers.given_up is None
    assert (taken if in_order else sorted(taken)) == list(range(size))  # type: ignore[type-var]


@settings(max_examples=150)
@given(st.data(), SHAPES, st.booleans())
def test_streams_of_an_iterable_dataset_each_to_its_end(
    data: st.DataObject, shape: tuple[int, int, int], is_restarted: bool
) -> None:
    """And in an order that depends on neither timing nor losses."""
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=shape[0], max_size=shape[0]))
    orders = []
    for losses in (0, 3):
        schedule = made(itertools.repeat(None), shape, in_order=True, is_restarted=is_restarted, retries=3)
        workers = FakeWorkers(shape[1], lengths)
        orders.append(drive(schedule, workers, choices(data), depth=shape[2], num_streams=shape[0], max_losses=losses))
    assert orders[0] == orders[1]
    for stream, length in enumerate(lengths):
        assert [item for item in orders[0] if item[0] == stream] == [(stream, i) for i in range(length)]  # type: ignore[index]
    assert len(orders[0]) == sum(lengths)


@settings(max_examples=150)
@given(st.data(), SHAPES)
def test_streams_out_of_order_lose_nothing_either(data: st.DataObject, shape: tuple[int, int, int]) -> None:
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=shape[0], max_size=shape[0]))
    schedule = made(itertools.repeat(None), shape, in_order=False, is_restarted=False, retries=3)
    workers = FakeWorkers(shape[1], lengths)
    taken = drive(schedule, workers, choices(data), depth=shape[2], num_streams=shape[0], max_losses=3)
    assert sorted(taken) == [(stream, i) for stream, length in enumerate(lengths) for i in range(length)]  # type: ignore[type-var]


def test_batches_go_to_streams_in_turn() -> None:
    """As with torch's workers, so that their random numbers are the same."""
    schedule = Schedule(iter("abcdefgh"), initial_workers=[0, 1, 2], num_workers=3, depth=2)
    fetches = [action for action in schedule.start() if isinstance(action, Fetch)]
    assert [(fetch.stream, fetch.task) for fetch in fetches] == list(zip([0, 1, 2, 0, 1, 2], "abcdef", strict=True))


def test_a_batch_that_kills_whoever_makes_it_is_given_up() -> None:
    schedule = Schedule(iter(["poison"]), initial_workers=[0], num_workers=3, max_retries=2)
    actions = schedule.start()
    for _ in range(2):
        *_, fetch = actions
        assert isinstance(fetch, Fetch)
        actions = schedule.step(Lost(fetch.batch, fetch.attempt, "signal 9"))
        assert [type(action) for action in actions] == [Open, Fetch]
    *_, fetch = actions
    assert isinstance(fetch, Fetch)
    assert schedule.step(Lost(fetch.batch, fetch.attempt, "signal 9")) == [GiveUp(0, 3, "signal 9")]
    assert schedule.is_done


def test_the_batch_before_the_one_that_kills_is_not_blamed() -> None:
    """An answer can be lost with the process that gave it: torch's tensors are fetched from where they were made."""
    schedule = Schedule(iter(["fine", "poison", "after"]), initial_workers=[0], num_workers=2, depth=3, max_retries=2)
    queue = deque(action for action in schedule.start() if isinstance(action, Fetch))
    while queue:
        fetch = queue.popleft()
        is_poisoned = fetch.task == "poison" or any(other.task == "poison" for other in queue)
        event = Lost(fetch.batch, fetch.attempt, "signal 9") if is_poisoned else Fetched(fetch.batch, fetch.attempt)
        actions = schedule.step(event)
        if is_poisoned:
            queue.clear()
        queue.extend(action for action in actions if isinstance(action, Fetch))
    assert actions == [GiveUp(1, 3, "signal 9")]


def test_streams_of_a_lost_place_spread_over_those_that_were_lost_least() -> None:
    schedule = Schedule(itertools.repeat(None), initial_workers=[0, 1, 0, 2], num_workers=3, depth=1)
    first = next(action for action in schedule.start() if isinstance(action, Fetch))
    actions = schedule.step(Lost(first.batch, first.attempt, "gone"))
    assert {action.worker for action in actions if isinstance(action, Fetch)} == {1, 2}
    assert {action.stream for action in actions if isinstance(action, Fetch)} == {0, 2}


def test_a_place_that_stays_keeps_its_streams() -> None:
    schedule = Schedule(iter("ab"), initial_workers=[0, 1], num_workers=2, is_restarted=True)
    first = next(action for action in schedule.start() if isinstance(action, Fetch))
    again = schedule.step(Lost(first.batch, first.attempt, "gone"))
    assert [action.worker for action in again if isinstance(action, Open | Fetch)] == [0, 0]


def test_late_news_of_an_earlier_attempt_changes_nothing() -> None:
    schedule = Schedule(iter("ab"), initial_workers=[0], num_workers=2)
    fetches = [action for action in schedule.start() if isinstance(action, Fetch)]
    schedule.step(Lost(fetches[0].batch, fetches[0].attempt, "gone"))
    for fetch in fetches:
        assert not schedule.is_current(fetch.batch, fetch.attempt)
        assert schedule.step(Lost(fetch.batch, fetch.attempt, "gone")) == []
        assert schedule.step(Fetched(fetch.batch, fetch.attempt)) == []
    assert schedule.ready is None


def test_what_a_sampler_raises_waits_for_its_turn() -> None:
    def keys() -> Iterator[int]:
        yield 0
        raise KeyError("sampler")

    schedule = Schedule(keys(), initial_workers=[0], num_workers=1)
    schedule.start()
    schedule.step(Fetched(0, 0))
    assert schedule.ready == 0
    schedule.step(Taken(0))
    assert schedule.is_done
    with pytest.raises(KeyError):
        raise schedule.failure or AssertionError
