"""Order, exactly-once, bounds and progress of the loader's bookkeeping, whatever comes when, and whatever is lost."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unified.loader.schedule import Action, Ended, Fetch, Fetched, GiveUp, Lost, Open, Schedule, Taken


class FakePlaces:
    """Streams as they are at places: orders in line, all forgotten when the place is lost. An iterable stream has
    `lengths[stream]` batches."""

    def __init__(self, num_places: int, lengths: list[int] | None) -> None:
        self.lengths = lengths
        self.work: list[deque[Open | Fetch]] = [deque() for _ in range(num_places)]
        self.open: list[dict[int, int]] = [{} for _ in range(num_places)]
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
                self.work[action.place].append(action)

    def answer(self, place: int) -> tuple[Fetched | Ended | Lost, object]:
        """Carry out orders up to the next fetch, and that."""
        while isinstance(order := self.work[place].popleft(), Open):
            self.open[place][order.stream] = order.skip
        position = self.open[place].get(order.stream)
        if position is None:  # sent to a process that is younger than the schedule knows
            assert self.num_losses, "a fetch before its stream was opened there"
            return Lost(order.batch, order.attempt, "it does not know that stream"), None
        if self.lengths is not None and position >= self.lengths[order.stream]:
            return Ended(order.batch, order.attempt), None
        self.open[place][order.stream] += 1
        value = order.task if self.lengths is None else (order.stream, position)
        return Fetched(order.batch, order.attempt), value

    def lose(self, place: int) -> None:
        self.num_losses += 1
        self.failed.extend(order for order in self.work[place] if isinstance(order, Fetch))
        self.work[place].clear()
        self.open[place].clear()


def drive(
    schedule: Schedule, places: FakePlaces, draw: Iterator[int], *, depth: int, num_streams: int, max_losses: int = 0
) -> list[object]:
    """Let things happen in the order that `draw` says, until nothing can; what the consumer took."""
    taken: list[object] = []
    values: dict[int, object] = {}
    places.perform(schedule.start())
    while not schedule.is_done and places.given_up is None:
        busy = [place for place in range(len(places.work)) if places.work[place]]
        orders = itertools.chain.from_iterable(places.work)
        fetches = [order for order in orders if isinstance(order, Fetch)]
        waited_for = [fetch for fetch in fetches if schedule.is_current(fetch.batch, fetch.attempt)]
        assert len(waited_for) + len(values) <= depth * num_streams, "more at once than there is room for"
        moves = [("answer", place) for place in busy]
        moves += [("lose", place) for place in busy if places.num_losses < max_losses]
        moves += [("news", 0)] if places.failed else []
        moves += [("take", 0)] if schedule.ready is not None else []
        assert moves, "nothing can happen, and it is not done"
        kind, place = moves[next(draw) % len(moves)]
        if kind == "answer":
            event, value = places.answer(place)
            if schedule.is_current(event.batch, event.attempt) and isinstance(event, Fetched):
                assert event.batch not in values
                values[event.batch] = value
            places.perform(schedule.step(event))
        elif kind == "lose":
            places.lose(place)
        elif kind == "news":
            lost = places.failed.popleft()
            places.perform(schedule.step(Lost(lost.batch, lost.attempt, "it was killed")))
        else:
            ready = schedule.ready
            assert ready is not None
            taken.append(values.pop(ready))
            places.perform(schedule.step(Taken(ready)))
    return taken


def choices(data: st.DataObject) -> Iterator[int]:
    """Endless; what hypothesis does not say is pseudo-random."""
    said = data.draw(st.lists(st.integers(0, 11), max_size=80))
    return itertools.chain(said, (n * 2654435761 >> 7 for n in itertools.count()))


SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
"""Streams, places, depth."""


def made(
    tasks: Iterator[object], shape: tuple[int, int, int], *, in_order: bool, stays: bool, retries: int
) -> Schedule:
    num_streams, num_places, depth = shape
    homes = [stream % num_places for stream in range(num_streams)]
    return Schedule(
        tasks, homes=homes, num_places=num_places, depth=depth, in_order=in_order, max_retries=retries, stays=stays
    )


@settings(max_examples=150, deadline=None)
@given(st.data(), SHAPES, st.integers(0, 15), st.booleans(), st.booleans())
def test_every_task_once_whatever_is_lost(
    data: st.DataObject, shape: tuple[int, int, int], size: int, in_order: bool, stays: bool
) -> None:
    losses = 3
    schedule = made(iter(range(size)), shape, in_order=in_order, stays=stays, retries=losses)
    places = FakePlaces(shape[1], None)
    taken = drive(schedule, places, choices(data), depth=shape[2], num_streams=shape[0], max_losses=losses)
    assert places.given_up is None
    assert (taken if in_order else sorted(taken)) == list(range(size))  # type: ignore[type-var]


@settings(max_examples=150, deadline=None)
@given(st.data(), SHAPES, st.booleans())
def test_streams_of_an_iterable_dataset_each_to_its_end(
    data: st.DataObject, shape: tuple[int, int, int], stays: bool
) -> None:
    """And in an order that depends on neither timing nor losses."""
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=shape[0], max_size=shape[0]))
    orders = []
    for losses in (0, 3):
        schedule = made(itertools.repeat(None), shape, in_order=True, stays=stays, retries=3)
        places = FakePlaces(shape[1], lengths)
        orders.append(drive(schedule, places, choices(data), depth=shape[2], num_streams=shape[0], max_losses=losses))
    assert orders[0] == orders[1]
    for stream, length in enumerate(lengths):
        assert [item for item in orders[0] if item[0] == stream] == [(stream, i) for i in range(length)]  # type: ignore[index]
    assert len(orders[0]) == sum(lengths)


@settings(max_examples=150, deadline=None)
@given(st.data(), SHAPES)
def test_streams_out_of_order_lose_nothing_either(data: st.DataObject, shape: tuple[int, int, int]) -> None:
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=shape[0], max_size=shape[0]))
    schedule = made(itertools.repeat(None), shape, in_order=False, stays=False, retries=3)
    places = FakePlaces(shape[1], lengths)
    taken = drive(schedule, places, choices(data), depth=shape[2], num_streams=shape[0], max_losses=3)
    assert sorted(taken) == [(stream, i) for stream, length in enumerate(lengths) for i in range(length)]  # type: ignore[type-var]


def test_batches_go_to_streams_in_turn() -> None:
    """As with torch's workers, so that their random numbers are the same."""
    schedule = Schedule(iter("abcdefgh"), homes=[0, 1, 2], num_places=3, depth=2)
    fetches = [action for action in schedule.start() if isinstance(action, Fetch)]
    assert [(fetch.stream, fetch.task) for fetch in fetches] == list(zip([0, 1, 2, 0, 1, 2], "abcdef", strict=True))


def test_a_batch_that_kills_whoever_makes_it_is_given_up() -> None:
    schedule = Schedule(iter(["poison"]), homes=[0], num_places=3, max_retries=2)
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
    schedule = Schedule(iter(["fine", "poison", "after"]), homes=[0], num_places=2, depth=3, max_retries=2)
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
    schedule = Schedule(itertools.repeat(None), homes=[0, 1, 0, 2], num_places=3, depth=1)
    first = next(action for action in schedule.start() if isinstance(action, Fetch))
    actions = schedule.step(Lost(first.batch, first.attempt, "gone"))
    assert {action.place for action in actions if isinstance(action, Fetch)} == {1, 2}
    assert {action.stream for action in actions if isinstance(action, Fetch)} == {0, 2}


def test_a_place_that_stays_keeps_its_streams() -> None:
    schedule = Schedule(iter("ab"), homes=[0, 1], num_places=2, stays=True)
    first = next(action for action in schedule.start() if isinstance(action, Fetch))
    again = schedule.step(Lost(first.batch, first.attempt, "gone"))
    assert [action.place for action in again if isinstance(action, Open | Fetch)] == [0, 0]


def test_late_news_of_an_earlier_attempt_changes_nothing() -> None:
    schedule = Schedule(iter("ab"), homes=[0], num_places=2)
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

    schedule = Schedule(keys(), homes=[0], num_places=1)
    schedule.start()
    schedule.step(Fetched(0, 0))
    assert schedule.ready == 0
    schedule.step(Taken(0))
    assert schedule.is_done
    with pytest.raises(KeyError):
        raise schedule.failure or AssertionError
