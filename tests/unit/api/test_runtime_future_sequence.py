"""Several runs of results read like one list, and block only where they are read."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unified.api.runtime import FutureSequence
from unified.bus.calls.future import RpcFuture
from unified.errors import RpcTimeoutError, UsageError


def done(value: list[int]) -> Future[list[int]]:
    future: Future[list[int]] = RpcFuture()
    future.set_result(value)
    return future


def sequence(runs: list[list[int]]) -> FutureSequence[int]:
    return FutureSequence([done(run) for run in runs], [len(run) for run in runs])


indices = st.none() | st.integers(-12, 12)


@given(
    st.lists(st.lists(st.integers(), max_size=3), max_size=4), indices, indices, st.none() | st.sampled_from([-2, 1, 3])
)
def test_reads_like_the_list(runs: list[list[int]], start: int | None, stop: int | None, step: int | None) -> None:
    flat = [item for run in runs for item in run]
    whole = sequence(runs)
    assert len(whole) == len(flat)
    assert list(whole) == flat == whole.wait()
    assert list(reversed(whole)) == flat[::-1]
    assert whole[start:stop:step] == flat[start:stop:step]
    assert [whole[i] for i in range(-len(flat), len(flat))] == [flat[i] for i in range(-len(flat), len(flat))]
    for outside in (len(flat), -len(flat) - 1):
        with pytest.raises(IndexError):
            whole[outside]


def test_repr() -> None:
    assert repr(sequence([[1, 2], [3, 4]])) == "FutureSequence(lens=[2, 2])"


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


def test_handler_with_another_number_of_results() -> None:
    whole: FutureSequence[int] = FutureSequence([done([1]), done([1, 2, 3])], [1, 2])
    with pytest.raises(UsageError, match="part 1 of a batch of 3 returned 3 results for 2 inputs"):
        whole.wait()


def test_arrays_as_runs() -> None:
    future: Future[np.ndarray] = RpcFuture()
    future.set_result(np.array([1, 2]))
    whole: FutureSequence[int] = FutureSequence([future], [2])
    assert whole.wait() == [1, 2]


def test_lengths_must_match() -> None:
    with pytest.raises(UsageError, match="1 futures and 2 lengths"):
        FutureSequence([done([1])], [1, 2])
