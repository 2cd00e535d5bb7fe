"""Work of ranks together: results go to those they are for, and an error of one is the same error on all."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from unified.errors import DatasetError, RefusedError, UnifiedError, UsageError
from unified.rounds.together import RankWork

T = TypeVar("T")


class ThreadRanks:
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, barrier: threading.Barrier, box: dict[int, Any]) -> None:
        self.rank, self.size = rank, barrier.parties
        self._barrier, self._box = barrier, box

    def share(self, value: Any) -> Any:
        return self.gather(value)[0]

    def gather(self, value: Any) -> list[Any]:
        self._box[self.rank] = value
        self._barrier.wait(10)
        found = [self._box[rank] for rank in range(self.size)]
        self._barrier.wait(10)
        return found


def on_ranks(work: Callable[[RankWork, int], T], size: int = 4, per_node: int = 2) -> list[T | Exception]:
    """Run `work` on each rank; return what it returned or raised, by rank."""
    barrier, box = threading.Barrier(size), {}  # type: ignore[var-annotated]
    results: dict[int, T | Exception] = {}

    def run(rank: int) -> None:
        together = RankWork(ThreadRanks(rank, barrier, box), rank // per_node, rank % per_node)
        try:
            results[rank] = work(together, rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [results[rank] for rank in range(size)]


def raising(error: Exception) -> Any:
    raise error


def test_values_go_to_those_they_are_for() -> None:
    assert on_ranks(lambda work, rank: work.on_first(lambda: rank)) == [0, 0, 0, 0]
    assert on_ranks(lambda work, rank: work.on_each_node(lambda: rank)) == [0, 0, 2, 2]
    assert on_ranks(lambda work, rank: work.on_all(lambda: rank)) == [0, 1, 2, 3]


@pytest.mark.parametrize("error", [DatasetError("line 3"), UsageError("no"), UnifiedError("other")])
def test_an_error_of_one_is_that_of_all(error: Exception) -> None:
    found = on_ranks(lambda work, rank: work.on_all(lambda: raising(error) if rank == 2 else None))
    assert [(type(each), str(each)) for each in found] == [(type(error), str(error))] * 4


def test_the_first_of_several_errors_is_said_by_all() -> None:
    found = on_ranks(lambda work, rank: work.on_each_node(lambda: raising(UsageError(f"of {rank}"))))
    assert [str(each) for each in found] == ["of 0"] * 4


def test_an_error_that_is_not_ours_keeps_its_name() -> None:
    found = on_ranks(lambda work, rank: work.on_first(lambda: raising(KeyError("k"))))
    assert isinstance(found[0], KeyError)
    assert [str(each) for each in found[1:]] == ["KeyError on another rank: 'k'"] * 3
    refused = on_ranks(lambda work, rank: work.on_first(lambda: raising(RefusedError("code", "the reason"))))
    assert [str(each) for each in refused] == ["the reason"] * 4
