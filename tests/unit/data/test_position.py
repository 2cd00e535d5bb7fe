"""How far an epoch was read: what comes next, and going on elsewhere."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unified.data.position import ReadingPosition, merge_positions
from unified.errors import UsageError
from unified.protocol.coordinator import ShardAssignment


def shards(*ids: int) -> list[ShardAssignment]:
    return [ShardAssignment(shard_id=each, file_paths=[], start_sample=0, end_sample=1) for each in ids]


def planned(position: ReadingPosition, *ids: int) -> list[tuple[int, int]]:
    return [(reading.assignment.shard_id, reading.skip) for reading in position.plan(shards(*ids))]


def test_what_is_done_does_not_come_and_what_was_begun_is_gone_on_with_in_its_turn() -> None:
    position = ReadingPosition()
    position.begin(position.plan(shards(4, 2, 9))[0])
    assert position.finish() == 4
    position.begin(position.plan(shards(4, 9, 2))[0])
    position.offset += 3

    assert planned(position, 4, 2, 9) == [(2, 0), (9, 3)]
    assert position.already_done(shards(2, 4)) == [4]

    position.begin(position.plan(shards(4, 2, 9))[0])
    position.offset += 1
    assert planned(position, 2, 9) == [(2, 1), (9, 3)]
    assert position.state() == {"epoch": 0, "done": [4], "begun": [[9, 3], [2, 1]]}
    position.finish()
    assert planned(position, 2, 9) == [(9, 3)]


def test_a_begun_shard_that_went_to_another_worker_is_not_gone_on_with() -> None:
    position = ReadingPosition()
    position.begin(position.plan(shards(1, 2))[0])
    position.offset = 5

    assert planned(position, 2) == [(2, 0)]


def test_another_epoch_begins_anew_and_the_same_one_stays() -> None:
    position = ReadingPosition(3)
    position.begin(position.plan(shards(1))[0])
    position.finish()

    position.go_to(3)
    assert position.done == [1]
    position.go_to(4)
    assert position.state() == {"epoch": 4, "done": [], "begun": []}


@pytest.mark.parametrize(
    "state", [{}, {"epoch": 1, "done": None, "begun": []}, {"epoch": 1, "done": [], "begun": [3]}, {"epoch": "x"}]
)
def test_what_is_no_state_is_refused_and_changes_nothing(state: dict[str, Any]) -> None:
    position = ReadingPosition(2)
    with pytest.raises(UsageError, match="state_dict"):
        position.load(state)
    assert position.epoch == 2


@settings(max_examples=60)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.data())
def test_every_sample_is_read_once_wherever_reading_was_cut_and_gone_on_with(
    sizes: list[int], data: st.DataObject
) -> None:
    position = ReadingPosition()
    read = []
    while readings := position.plan(shards(*data.draw(st.permutations(range(len(sizes)))))):
        position.begin(readings[0])
        shard_id, skip = readings[0].assignment.shard_id, readings[0].skip
        stop = sizes[shard_id] - data.draw(st.integers(0, sizes[shard_id] - skip))
        for row in range(skip, stop):
            position.offset += 1
            read.append((shard_id, row))
        if stop == sizes[shard_id] and not data.draw(st.booleans()):
            assert position.finish() == shard_id
        elif data.draw(st.booleans()):
            state = position.state()
            position = ReadingPosition(8)
            position.load(json.loads(json.dumps(state)))
            assert position.state() == state

    assert sorted(read) == [(shard_id, row) for shard_id, size in enumerate(sizes) for row in range(size)]
    assert sorted(position.done) == list(range(len(sizes)))


@settings(max_examples=60)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.data())
def test_every_sample_is_read_once_by_worlds_of_changing_size(sizes: list[int], data: st.DataObject) -> None:
    """Each world loads what the one before had come to, all ranks together, and has shards dealt to it anew."""
    read = []
    state: dict[str, Any] = {"epoch": 0, "done": [], "begun": []}
    for is_last in (False, False, True):
        ranks = [ReadingPosition() for _ in range(data.draw(st.integers(1, 4)))]
        of_rank = data.draw(st.lists(st.integers(0, len(ranks) - 1), min_size=len(sizes), max_size=len(sizes)))
        for rank, position in enumerate(ranks):
            position.load(state)
            mine = shards(*(shard_id for shard_id in range(len(sizes)) if of_rank[shard_id] == rank))
            for reading in position.plan(mine):
                shard_id, skip = reading.assignment.shard_id, reading.skip
                stop = sizes[shard_id] if is_last else data.draw(st.integers(skip, sizes[shard_id]))
                position.begin(reading)
                position.offset = stop
                read += [(shard_id, row) for row in range(skip, stop)]
                if stop == sizes[shard_id]:
                    position.finish()
                else:
                    break
        state = json.loads(json.dumps(merge_positions([position.state() for position in ranks])))

    assert sorted(read) == [(shard_id, row) for shard_id, size in enumerate(sizes) for row in range(size)]
    assert state["done"] == list(range(len(sizes)))


def test_positions_on_both_sides_of_an_epoch_end_merge_to_the_later_one() -> None:
    behind, ahead = {"epoch": 1, "done": [0, 1], "begun": []}, {"epoch": 2, "done": [4], "begun": []}
    assert merge_positions([behind, ahead]) == ahead


def test_no_positions_cannot_be_merged() -> None:
    with pytest.raises(UsageError, match="state_dict"):
        merge_positions([])
