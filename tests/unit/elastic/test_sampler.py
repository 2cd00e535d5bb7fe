"""Rows that an elastic loop trains: each once an epoch, also if a step takes several batches and rounds change."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from unified.elastic import ElasticSampler, ElasticState
from unified.errors import UsageError


def windows(batches: Iterator[list[int]], size: int) -> Iterator[list[list[int]]]:
    """Batches of one step each; the last window of an epoch may be shorter."""
    while window := list(islice(batches, size)):
        yield window


def rows(window: list[list[int]]) -> list[int]:
    return [row for batch in window for row in batch]


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    monkeypatch.setattr("unified.elastic.sampler._ranks", lambda: (rank, world_size))


@pytest.mark.parametrize("length", [pytest.param(8, id="even"), pytest.param(7, id="with-a-shorter-last-window")])
def test_steps_of_two_batches_train_each_row_once_an_epoch(length: int) -> None:
    state: Any = ElasticState(sampler=ElasticSampler(length, batch_size=1, shuffle=False))
    for epoch in range(2):
        trained = []
        for window in windows(iter(state.sampler), 2):
            trained += rows(window)
            state.commit(batches=len(window))
        assert trained == list(range(length))
        assert state.sampler.state_dict() == {"epoch": epoch + 1, "position": 0}
    assert state.step == 8


def test_a_last_window_may_be_committed_as_if_it_were_full() -> None:
    state: Any = ElasticState(sampler=ElasticSampler(11, batch_size=2, shuffle=False))
    trained = []
    for number, batch in enumerate(state.sampler, 1):
        trained += batch
        if number % 3 == 0:
            state.commit(batches=3)
    state.commit(batches=3)
    assert trained == list(range(10))  # one sample less than a batch is left
    assert next(iter(state.sampler)) == [0, 1]


@pytest.mark.parametrize("size", [pytest.param(2, id="every-second-batch"), pytest.param(9, id="never")])
def test_an_epoch_that_commits_cover_in_part_does_not_begin_again(size: int) -> None:
    state: Any = ElasticState(sampler=ElasticSampler(8, batch_size=1, shuffle=False))
    for number, _ in enumerate(state.sampler, 1):
        if number % size == 0:
            state.commit()
    with pytest.raises(UsageError, match=rf"all 8 batches .* commits cover {8 // size}: .*commit\(batches=K"):
        next(iter(state.sampler))


def test_a_commit_covers_no_batch_that_was_not_read() -> None:
    state: Any = ElasticState(sampler=ElasticSampler(8, batch_size=1, shuffle=False))
    batches = iter(state.sampler)
    next(batches), next(batches)
    with pytest.raises(UsageError, match=r"batches=3\) was called, but 2 batches"):
        state.commit(batches=3)
    with pytest.raises(UsageError, match=r"batches=-1\) was called"):
        state.commit(batches=-1)
    state.commit(batches=2)
    with pytest.raises(UsageError, match=r"batches=1\) was called, but 0 batches"):
        state.commit()
    state.commit(batches=0)
    assert next(iter(state.sampler)) == [2]


def test_a_commit_after_the_last_batch_of_an_epoch_covers_none_of_the_next() -> None:
    state: Any = ElasticState(sampler=ElasticSampler(4, batch_size=1, shuffle=False))
    assert rows(list(state.sampler)) == [0, 1, 2, 3]
    state.commit(batches=4)
    with pytest.raises(UsageError, match=r"batches=1\) was called, but 0 batches"):
        state.commit()


def test_a_rank_whose_batches_are_read_elsewhere_counts_them_as_well() -> None:
    state: Any = ElasticState(sampler=ElasticSampler(4, batch_size=1))
    for _ in range(3):
        state.commit(batches=2)
    assert state.sampler.state_dict() == {"epoch": 1, "position": 2}


def test_batches_that_a_data_loader_reads_ahead_count_when_they_are_committed() -> None:
    state: Any = ElasticState(sampler=ElasticSampler(8, batch_size=1, shuffle=False))
    for _ in range(2):
        ahead = iter(state.sampler)
        queue = list(islice(ahead, 5))
        trained = []
        while queue:
            trained += rows(queue[:2])
            state.commit(batches=len(queue[:2]))
            queue = [*queue[2:], *islice(ahead, 2)]
        assert trained == list(range(8))


def test_batches_that_were_not_committed_are_read_again() -> None:
    state: Any = ElasticState(sampler=ElasticSampler(8, batch_size=1, shuffle=False))
    assert rows(list(islice(state.sampler, 4))) == [0, 1, 2, 3]
    state.commit(batches=2)
    assert rows(list(islice(state.sampler, 2))) == [2, 3]
    state.commit(batches=2)
    assert rows(list(state.sampler)) == [4, 5, 6, 7]  # to the end, as a data loader does that reads ahead
    state.commit()
    state.sampler.rewind()
    assert rows(list(state.sampler)) == [5, 6, 7]
    state._end_round()  # a rejoin reads them again as well
    assert rows(list(state.sampler)) == [5, 6, 7]


def test_a_window_that_a_new_world_size_cuts_is_read_again_by_the_new_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[int] = []
    committed = ElasticSampler(41, batch_size=1, seed=5).state_dict()
    for world_size, steps in [(2, 2), (3, 1), (1, 3), (2, 100)]:
        states = []
        for rank in range(world_size):
            as_rank(monkeypatch, rank, world_size)
            sampler = ElasticSampler(41, batch_size=1, seed=5)
            sampler.load_state_dict(committed)
            state: Any = ElasticState(sampler=sampler)
            batches = iter(sampler)
            for window in islice(windows(batches, 3), steps):
                trained += rows(window)
                state.commit(batches=len(window))
            next(batches, None)  # of the next window, which is lost with the round
            states.append(sampler.state_dict())
        assert all(each == states[0] for each in states)
        committed = states[0]
    assert len(trained) == len(set(trained)) == 40  # one is less than both ranks need
    assert committed == {"epoch": 1, "position": 0}


def test_an_epoch_ends_if_more_ranks_come_than_it_has_samples_left_for(monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(monkeypatch, 1, 4)
    reader, committer = (ElasticSampler(8, batch_size=1, shuffle=False) for _ in range(2))
    for sampler in (reader, committer):
        sampler.load_state_dict({"epoch": 2, "position": 6})  # of two ranks
    batches = iter(reader)
    assert next(batches) == [1]
    for sampler in (reader, committer):  # the other one reads on another rank
        sampler.on_commit()
        assert sampler.state_dict() == {"epoch": 3, "position": 4}


def test_ranks_that_need_more_samples_than_there_are_do_not_wait_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(monkeypatch, 0, 4)
    with pytest.raises(UsageError, match="has 7 samples, but its ranks take 8"):
        next(iter(ElasticSampler(7, batch_size=2)))
