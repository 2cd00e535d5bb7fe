"""What is where in a sharded checkpoint, and who writes what."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Barrier
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from unified.checkpoint.manifest import Part, make_manifest, part_name
from unified.checkpoint.sharded import index as s
from unified.checkpoint.sharded.index import MAX_GAP_BYTES, MAX_RUN_BYTES, runs
from unified.checkpoint.sharded.plan import SMALL_BYTES, ShardPlanner, groups_of, shared_out
from unified.checkpoint.store import RANK_ERRORS
from unified.errors import CheckpointCorruptError, CheckpointError, UsageError
from unified.rounds.rank_group import Alone, each_does, lead
from unified.tensors.host_buffers import BufferPool


def shard(start: int, nbytes: int) -> s.Shard:
    return s.Shard(rank=0, start=start, nbytes=nbytes, checksum="crc32:00000000")


def test_the_names_in_the_store_say_how_far_a_save_is() -> None:
    names = (s.rank_file(0, "bin"), s.rank_file(1, "bin"), s.rank_file(1, "note"), s.rank_file(12, "failed"))
    keys = [part_name(4, "t", name) for name in names]
    others = [
        part_name(4, "other", s.rank_file(2, "note")),
        part_name(3, "t", s.rank_file(3, "note")),
        "step-000003.json",
    ]
    found = s.progress_of(keys + others, 4, "t")
    assert found == s.SaveProgress(written=frozenset({1}), failed=frozenset({12}), has_manifest=False)
    assert s.progress_of(["step-000004.json"], 4, "t").has_manifest


def test_a_manifest_is_of_the_save_whose_index_it_names() -> None:
    part = Part(key=part_name(4, "t", s.INDEX), size_bytes=1, checksum="", name=s.INDEX)
    assert s.is_of(make_manifest([part], step=4), "t")
    assert not s.is_of(make_manifest([part], step=4), "other")


def test_index_and_notes_come_back() -> None:
    entries = {"a.0": s.IndexEntry(path=["a", 0], dtype="float32", size=[2, 3]), "n": s.IndexEntry(path=["n"])}
    part = Part(key="k", size_bytes=9, checksum="crc32:00000000")
    notes = [
        s.RankNote(part=part, shards={"a.0": [shard(0, 4)], "n": [shard(64, 1)]}),
        s.RankNote(part=part, shards={"a.0": [shard(8, 4)]}),
    ]
    assert s.decode_note(msgspec.msgpack.encode(notes[0])) == notes[0]
    found = s.decode_index(msgspec.msgpack.encode(s.with_shards(entries, notes)))
    assert found["a.0"].shards == [shard(0, 4), shard(8, 4)]
    assert found["n"] == s.IndexEntry(path=["n"], shards=[shard(64, 1)])
    for broken in (b"", b"\xc1"):
        with pytest.raises(CheckpointCorruptError):
            s.decode_index(broken)
        with pytest.raises(CheckpointCorruptError):
            s.decode_note(broken)


@given(st.lists(st.integers(0, 2 * MAX_GAP_BYTES), max_size=60), st.integers(1, MAX_RUN_BYTES // 4))
def test_runs_hold_every_piece_once_and_stay_within_bounds(gaps: list[int], nbytes: int) -> None:
    pieces, position = [], 0
    for gap in gaps:
        position += gap
        pieces.append(shard(position, nbytes))
        position += nbytes
    found = runs(reversed(pieces))
    assert [each for run in found for each in run] == pieces
    for run in found:
        assert len(run) == 1 or run[-1].start + nbytes - run[0].start <= MAX_RUN_BYTES
        assert all(right.start - left.start - nbytes <= MAX_GAP_BYTES for left, right in pairwise(run))


def item(name: str, nbytes: int) -> WriteItem:
    size = torch.Size([nbytes])
    chunk = ChunkStorageMetadata(torch.Size([0]), size)
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.uint8), size)
    return WriteItem(MetadataIndex(name, [0]), WriteItemType.TENSOR, tensor_data=data)


def test_what_all_ranks_have_is_written_once_the_small_by_the_first_and_the_large_by_turns() -> None:
    small = [item(f"small-{number}", 8) for number in range(5)]
    large = [item(f"large-{number}", SMALL_BYTES + 1) for number in range(4)]
    plans = shared_out([SavePlan(small + large), SavePlan([*small, *large, item("own", 8)])])
    names = [[each.index.fqn for each in plan.items] for plan in plans]
    assert names == [[*(f"small-{number}" for number in range(5)), "large-1", "large-3"], ["large-0", "large-2", "own"]]


def test_values_are_compared_among_the_ranks_that_have_them() -> None:
    found = groups_of([{"a": 1, "b": 1, "own": 5, "c": 4}, {"a": 1, "b": 2, "d": 3}, {"c": 4, "b": 1, "a": 1, "d": 3}])
    assert found == {"a": "a", "own": "own", "c": "c", "d": "d"}
    assert groups_of([{"a": 1, "b": 2}, {"b": 2, "a": 1}]) == {"a": "a", "b": "a"}


class ThreadRank:
    """A rank in a thread of this process."""

    size = 2

    def __init__(self, rank: int, board: list[object], barrier: Barrier) -> None:
        self.rank, self._board, self._barrier = rank, board, barrier
        self.num_gathered = 0

    def share(self, value: object) -> object:
        return self.gather(value)[0]

    def gather(self, value: object) -> list[Any]:
        self.num_gathered += 1
        self._board[self.rank] = value
        self._barrier.wait(100)
        found = list(self._board)
        self._barrier.wait(100)
        return found


def test_each_rank_writes_its_own_value_once_values_differ_and_the_plan_is_kept_while_they_do() -> None:
    numbers = [(7, 7), (7, 8), (8, 9), (9, 9)]

    def be(rank: ThreadRank) -> list[tuple[int, list[str]]]:
        planner, found = ShardPlanner(BufferPool()), []
        for pair in numbers:
            state = {"rows": pair[rank.rank], "same": torch.ones(3), f"only-{rank.rank}": torch.ones(1)}
            planner.settle(rank.gather(planner.look_at(state, rank)), rank)
            found.append((rank.num_gathered, sorted(piece.name for piece in planner.pieces())))
            rank.num_gathered = 0
        return found

    board: list[object] = [None, None]
    barrier = Barrier(2)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(be, [ThreadRank(rank, board, barrier) for rank in range(2)])
    own = [f"rows{s.OF_RANK}{rank}" for rank in range(2)]
    assert first == [(3, ["only-0", "rows", "same"]), *((count, ["only-0", own[0], "same"]) for count in (3, 1, 1))]
    assert second == [(3, ["only-1"]), *((count, ["only-1", own[1]]) for count in (3, 1, 1))]


class Two:
    """This rank and another, which says what the test has it say."""

    size = 2

    def __init__(self, rank: int, other: object) -> None:
        self.rank, self.other = rank, other

    def share(self, value: object) -> object:
        return self.gather(value)[0]

    def gather(self, value: object) -> list[object]:
        return [value, self.other] if self.rank == 0 else [self.other, value]


def test_all_ranks_get_what_the_first_got_or_its_error() -> None:
    assert lead(Alone(), lambda: 1, RANK_ERRORS) == 1
    assert lead(Two(1, (5, None)), lambda: 1, RANK_ERRORS) == 5
    with pytest.raises(UsageError, match="no such"):
        lead(Two(1, (None, ("UsageError", "no such"))), lambda: 1, RANK_ERRORS)
    with pytest.raises(CheckpointError, match="Rank 0 failed: OSError: gone"):
        lead(Two(1, (None, ("OSError", "gone"))), lambda: 1, RANK_ERRORS)


def fail(error: Exception) -> None:
    raise error


def all_do(ranks: Two, work: Callable[[], None]) -> None:
    each_does(ranks, work, RANK_ERRORS, shared=CheckpointCorruptError)


def test_damage_that_one_rank_sees_is_damage_to_all_and_anything_else_ends_it() -> None:
    damage = ("CheckpointCorruptError", "a part is gone")
    with pytest.raises(CheckpointCorruptError, match="a part is gone"):
        all_do(Two(0, damage), lambda: None)
    with pytest.raises(CheckpointCorruptError, match="of rank 0"):  # the same words on both
        all_do(Two(0, damage), lambda: fail(CheckpointCorruptError("of rank 0")))
    with pytest.raises(CheckpointError, match=r"Rank 1 failed.*OSError: gone") as caught:
        all_do(Two(0, ("OSError", "gone")), lambda: fail(CheckpointCorruptError("of rank 0")))
    assert not isinstance(caught.value, CheckpointCorruptError)
    with pytest.raises(KeyError):
        all_do(Two(0, damage), lambda: fail(KeyError("own")))
