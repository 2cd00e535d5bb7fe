"""Batches: their runs put together are the batch, and their results read like one list that blocks where it is read."""

import collections
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.runtime import Called, InstantBus, worker_of
from unified.api.runtime import FutureSequence, RoleGroup
from unified.api.runtime.batch import is_cut, share
from unified.bus.calls.future import RpcFuture
from unified.errors import RpcTimeoutError, UsageError
from unified.worker.context import set_current_worker

CUT: dict[str, Callable[[int], Any]] = {
    "list": lambda size: list(range(size)),
    "tuple": lambda size: tuple(range(size)),
    "range": range,
    "deque": lambda size: collections.deque(range(size)),
    "array": lambda size: np.arange(2 * size).reshape(size, 2),
    "objects": lambda size: np.array([{"i": i} for i in range(size)], dtype=object),
    "tensor": lambda size: torch.arange(3 * size).reshape(size, 3),
    "sequence": lambda size: FutureSequence([done([i]) for i in range(size)], [1] * size),
}
WHOLE: dict[str, Any] = {
    "text": "seven",
    "bytes": b"seven",
    "bytearray": bytearray(b"seven"),
    "view": memoryview(b"seven"),
    "dict": {"a": 1},
    "set": {1, 2, 3},
    "number": 7,
    "none": None,
    "array of no dimension": np.array(7),
    "tensor of no dimension": torch.tensor(7),
    "generator": (i for i in range(3)),
}


def done(value: Any) -> Future[Any]:
    future: RpcFuture[Any] = RpcFuture()
    future.succeed(value)
    return future


@pytest.fixture(autouse=True)
def outside_again() -> Iterator[None]:
    yield
    set_current_worker(None)


def sent(
    actors: int, size: int, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Called], FutureSequence[Any]]:
    """The calls that a batch becomes, and its results: the place of each input in the batch."""
    bus = InstantBus()
    starts = iter(range(0, size, math.ceil(size / actors) or 1))

    def places(*args: Any, **kwargs: Any) -> list[int]:
        start = next(starts)
        return list(range(start, min(start + math.ceil(size / actors), size)))

    bus.methods = {"m": places}
    set_current_worker(worker_of(bus, rollout=actors))
    results: FutureSequence[Any] = RoleGroup("rollout").call_batch("m", size, *args, **kwargs)
    return bus.calls, results


def flat(value: Any) -> list[Any]:
    return value.tolist() if hasattr(value, "tolist") else list(value)


@given(
    size=st.integers(0, 50),
    actors=st.integers(1, 9),
    cut=st.lists(st.sampled_from(sorted(CUT)), max_size=4),
    whole=st.lists(st.sampled_from(sorted(WHOLE)), max_size=3),
)
def test_runs_put_together_are_the_batch(size: int, actors: int, cut: list[str], whole: list[str]) -> None:
    args = [*(CUT[kind](size) for kind in cut), *(WHOLE[kind] for kind in whole)]
    kwargs = {f"cut_{kind}": CUT[kind](size) for kind in cut} | {f"whole_{kind}": WHOLE[kind] for kind in whole}
    calls, results = sent(actors, size, args, kwargs)
    run = math.ceil(size / actors)
    assert [call.target for call in calls] == [f"rollout_{actors}-{i}_1-0" for i in range(len(calls))]
    assert len(calls) == (math.ceil(size / run) if size else 0)
    assert results._lens == [min(run, size - i * run) for i in range(len(calls))]
    assert list(results) == list(range(size))
    assert repr(results) == f"FutureSequence(lens={results._lens})"
    for i, kind in enumerate(cut):
        for whose, parts in (
            (args[i], [call.args[i] for call in calls]),
            (kwargs[f"cut_{kind}"], [call.kwargs[f"cut_{kind}"] for call in calls]),
        ):
            assert [len(part) for part in parts] == results._lens
            assert [row for part in parts for row in flat(part)] == flat(whose)
            if kind in ("list", "tuple", "range", "array", "tensor"):
                assert {type(part) for part in parts} <= {type(whose)}
    for i, kind in enumerate(whole):
        assert all(call.args[len(cut) + i] is WHOLE[kind] for call in calls)
        assert all(call.kwargs[f"whole_{kind}"] is WHOLE[kind] for call in calls)


@given(size=st.integers(0, 20), other=st.integers(0, 20), kind=st.sampled_from(sorted(CUT)), by_name=st.booleans())
def test_sequence_of_another_length_is_refused_before_anything_is_sent(
    size: int, other: int, kind: str, by_name: bool
) -> None:
    value = CUT[kind](other)
    args, kwargs = ([list(range(size))], {"extra": value}) if by_name else ([list(range(size)), value], {})
    if size == other:
        sent(3, size, args, kwargs)
        return
    bus = InstantBus()
    set_current_worker(worker_of(bus, rollout=3))
    where = "extra" if by_name else "argument 1"
    with pytest.raises(ValueError, match=f"the batch has {size} inputs, but {where} has {other} entries"):
        RoleGroup("rollout").call_batch("m", size, *args, **kwargs)
    assert not bus.calls


@given(size=st.integers(0, 20), start=st.integers(0, 20), length=st.integers(0, 20))
def test_share_of_each_kind_is_its_slice(size: int, start: int, length: int) -> None:
    end = min(start + length, size)
    for kind, make in CUT.items():
        value = make(size)
        assert is_cut(value), kind
        assert flat(share(value, start, end)) == flat(make(size))[start:end], kind
    for kind, value in WHOLE.items():
        assert not is_cut(value), kind
        assert share(value, start, end) is value


class Watched(Future[Any]):
    """A future of a run that says that it was read."""

    def __init__(self, number: int, run: list[int], read: set[int], fails: bool) -> None:
        super().__init__()
        self.number, self.run, self.read, self.fails = number, run, read, fails

    def result(self, timeout: float | None = None) -> list[int]:
        self.read.add(self.number)
        if self.fails:
            raise KeyError(self.number)
        return self.run


runs = st.lists(st.lists(st.integers(), max_size=4), max_size=6)
"""Of a batch; some are empty, though an actor without a run is not called."""


class Reading:
    """A sequence over runs, some of which fail; the list that it stands for; and which runs were read."""

    def __init__(self, runs: list[list[int]], broken: set[int]) -> None:
        self.read: set[int] = set()
        self.flat = [item for run in runs for item in run]
        self.run_of = [number for number, run in enumerate(runs) for _ in run]
        futures = [Watched(number, run, self.read, number in broken) for number, run in enumerate(runs)]
        self.sequence: FutureSequence[int] = FutureSequence(futures, [len(run) for run in runs])
        self.broken = broken

    def check(self, read: Callable[[], Any], indices: Sequence[int]) -> None:
        """`read` gives what is at these indices, asks for no other run, and fails where one of theirs fails."""
        self.read.clear()
        needed = {self.run_of[i] for i in indices}
        if needed & self.broken:
            with pytest.raises(KeyError):
                read()
            assert self.read <= needed
        else:
            assert read() == [self.flat[i] for i in indices]
            assert self.read == needed


@given(runs, st.sets(st.integers(0, 5), max_size=2), st.data())
def test_sequence_reads_like_the_list_and_only_the_runs_it_needs(
    runs: list[list[int]], broken: set[int], data: st.DataObject
) -> None:
    reading = Reading(runs, broken)
    whole, length = reading.sequence, len(reading.flat)
    assert len(whole) == length
    for i in range(-length, length):
        reading.check(lambda i=i: [whole[i]], [i % length])  # type: ignore[misc]
    for outside in (length, -length - 1):
        with pytest.raises(IndexError, match="is outside a FutureSequence of"):
            whole[outside]
    cut = data.draw(st.slices(length))
    reading.check(lambda: whole[cut], range(*cut.indices(length)))
    if all(number >= len(runs) for number in broken):
        assert list(whole) == reading.flat
        assert list(reversed(whole)) == reading.flat[::-1]
        for value in {*reading.flat, 10**9}:
            assert (value in whole) == (value in reading.flat)
            assert whole.count(value) == reading.flat.count(value)
            if value in reading.flat:
                assert whole.index(value) == reading.flat.index(value)


@given(runs.map(lambda each: [run for run in each if run]), st.integers(0, 30))
def test_iteration_asks_for_a_run_when_it_comes_to_it(runs: list[list[int]], stop: int) -> None:
    reading = Reading(runs, set())
    assert list(itertools.islice(reading.sequence, stop)) == reading.flat[:stop]
    assert reading.read == set(reading.run_of[:stop])


@given(runs, st.sets(st.integers(0, 5)))
def test_wait_gives_all_or_the_first_failure_in_order(runs: list[list[int]], broken: set[int]) -> None:
    reading = Reading(runs, broken)
    failing = sorted(number for number in broken if number < len(runs))
    if not failing:
        assert reading.sequence.wait(0) == reading.flat
        return
    with pytest.raises(KeyError) as caught:
        reading.sequence.wait()
    assert caught.value.args == (failing[0],)


@given(runs, st.integers(0, 5), st.integers(-4, 4).filter(bool))
def test_handler_with_another_number_of_results_is_named(runs: list[list[int]], which: int, more: int) -> None:
    lens = [len(run) for run in runs]
    if which >= len(runs) or lens[which] + more <= 0:
        return
    lens[which] += more
    sequence: FutureSequence[int] = FutureSequence([done(run) for run in runs], lens)
    said = f"part {which} of a batch of {sum(lens)} returned {len(runs[which])} results for {lens[which]} inputs"
    with pytest.raises(UsageError, match=said):
        sequence.wait()
    with pytest.raises(UsageError):
        sequence[sum(lens[: which + 1]) - 1]


def test_blocks_only_for_what_is_read() -> None:
    late: Future[list[int]] = RpcFuture()
    whole: FutureSequence[int] = FutureSequence([done([1, 2]), late, done([5])], [2, 2, 1])
    assert (whole[0], whole[-1], whole[:2]) == (1, 5, [1, 2])
    reading = iter(whole)
    assert [next(reading), next(reading)] == [1, 2]
    with pytest.raises(RpcTimeoutError):
        whole.wait(timeout=0)
    late.set_result([3, 4])
    assert next(reading) == 3
    assert whole.wait() == [1, 2, 3, 4, 5]


def test_failure_comes_where_it_is_read() -> None:
    broken: Future[list[int]] = RpcFuture()
    broken.set_exception(KeyError("k"))
    whole: FutureSequence[int] = FutureSequence([done([1]), broken], [1, 1])
    assert whole[0] == 1
    for read in (lambda: whole[1], whole.wait, lambda: list(whole)):
        with pytest.raises(KeyError):
            read()


def test_arrays_as_runs() -> None:
    whole: FutureSequence[int] = FutureSequence([done(np.array([1, 2]))], [2])
    assert whole.wait() == [1, 2]


def test_lengths_must_match() -> None:
    with pytest.raises(UsageError, match="1 futures and 2 lengths"):
        FutureSequence([done([1])], [1, 2])
