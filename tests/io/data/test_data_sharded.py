"""`ShardedDataset` on real files: order, reading ahead, progress, and going on."""

import gc
import itertools
import pickle
import threading
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.support.data_files import assign_files, samples, write_jsonl, write_parquet, write_tfrecord
from unified.data.formats.row_format import RowFormat
from unified.data.position import Reading
from unified.data.prefetch import ShardPrefetcher
from unified.data.reading import find_runs
from unified.data.sharded_dataset import ShardedDataset, ShardSource
from unified.errors import DatasetError, UsageError
from unified.protocol.coordinator import ShardAssignment
from unified.testing import eventually

TOTAL = 50
SHARD = 8


class Shards:
    def __init__(self, path: Path, format_: str, shard_size: int = SHARD) -> None:
        runs = find_runs(str(path), format_)
        total = sum(run.num_samples for run in runs)
        self.format = format_
        self.all = [
            assign_files(runs, number, start, min(start + shard_size, total))
            for number, start in enumerate(range(0, total, shard_size))
        ]
        self.done: dict[int, list[int]] = {}
        self.taken_away: set[int] = set()
        self.asked = 0

    def shards(self, epoch: int) -> list[ShardAssignment]:
        self.asked += 1
        gone = {*self.done.get(epoch, []), *self.taken_away}
        return [each for each in self.all if each.shard_id not in gone]

    def mark_done(self, epoch: int, shard_ids: Sequence[int]) -> None:
        self.done.setdefault(epoch, []).extend(shard_ids)

    def shard_source(self, dataset_id: str) -> ShardSource:
        assert dataset_id == "numbers"
        return self


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "data-prefetch"]


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    if threads():
        gc.collect()
    eventually(lambda: not threads(), message="a thread that reads ahead was left behind")


@pytest.fixture
def shards(tmp_path: Path) -> Shards:
    write_jsonl(tmp_path / "0.jsonl", samples(0, 21))
    write_jsonl(tmp_path / "1.jsonl", samples(21, TOTAL))
    return Shards(tmp_path, "jsonl")


def numbers(rows: Any) -> list[int]:
    return [row["number"] for row in rows]


@pytest.mark.parametrize("prefetch_shards", [0, 1, 2, 100])
def test_an_epoch_is_every_sample_in_order_and_every_shard_done(shards: Shards, prefetch_shards: int) -> None:
    dataset = ShardedDataset(shards, "numbers", prefetch_shards=prefetch_shards)
    for epoch in range(2):
        assert dataset.epoch == epoch
        assert numbers(dataset) == list(range(TOTAL))
        assert shards.done[epoch] == [0, 1, 2, 3, 4, 5, 6]
    assert set(shards.done) == {0, 1}


def test_a_shard_is_done_when_the_sample_after_it_is_asked_for(shards: Shards) -> None:
    rows = iter(ShardedDataset(shards))
    for _ in range(SHARD):
        next(rows)
    assert not shards.done
    next(rows)
    assert shards.done == {0: [0]}


def test_torchs_data_loader_makes_batches_of_it(shards: Shards) -> None:
    loader = DataLoader(ShardedDataset(shards, columns=["number", "half"]), batch_size=16)
    batches = list(loader)
    assert [batch["number"].tolist() for batch in batches] == [
        list(range(start, min(start + 16, TOTAL))) for start in range(0, TOTAL, 16)
    ]
    assert batches[0]["half"][3].item() == 1.5


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_torchs_worker_processes_are_refused_with_what_to_do(shards: Shards) -> None:
    loader = DataLoader(ShardedDataset(shards), batch_size=4, num_workers=1)
    with pytest.raises(UsageError, match="num_workers=0"):
        list(loader)
    assert not shards.done


def test_tfrecords_are_bytes_and_a_transform_makes_of_them_what_is_wanted(tmp_path: Path) -> None:
    write_tfrecord(tmp_path / "a.tfrecord", samples(0, 10))
    source = Shards(tmp_path, "tfrecord")
    assert all(isinstance(row, bytes) for row in ShardedDataset(source))
    lengths = list(ShardedDataset(source, epoch=1, transform=len))
    assert len(lengths) == 10
    assert all(isinstance(each, int) for each in lengths)


@pytest.mark.parametrize("prefetch_shards", [0, 2])
@pytest.mark.parametrize("stop", [0, 1, 7, 8, 9, 16, 49, 50])
def test_another_process_goes_on_after_the_last_sample(tmp_path: Path, prefetch_shards: int, stop: int) -> None:
    write_parquet(tmp_path / "a.parquet", samples(0, TOTAL))
    first = ShardedDataset(Shards(tmp_path, "parquet"), prefetch_shards=prefetch_shards)
    rows = iter(first)
    read = [next(rows)["number"] for _ in range(stop)]
    state = first.state_dict()

    source = Shards(tmp_path, "parquet")  # a coordinator that knows of no progress
    second = ShardedDataset(source, prefetch_shards=prefetch_shards)
    second.load_state_dict(state)
    assert sorted(source.done.get(0, [])) == list(range(max(stop - 1, 0) // SHARD))

    assert read + numbers(second) == list(range(TOTAL))
    assert sorted(source.done[0]) == list(range(7))


def test_an_iteration_that_was_left_is_gone_on_with_by_the_next(shards: Shards) -> None:
    dataset = ShardedDataset(shards)
    first = iter(dataset)
    read = [next(first)["number"] for _ in range(11)]
    second = iter(dataset)
    read += [next(second)["number"] for _ in range(2)]
    with pytest.raises(UsageError, match="this iteration is over"):
        next(first)
    assert read + numbers(second) == list(range(TOTAL))


def test_another_epoch_may_be_chosen_in_the_middle(shards: Shards) -> None:
    dataset = ShardedDataset(shards)
    rows = iter(dataset)
    next(rows)
    dataset.set_epoch(5)
    with pytest.raises(UsageError, match="this iteration is over"):
        next(rows)
    assert numbers(dataset) == list(range(TOTAL))
    assert set(shards.done) == {5}


def test_the_state_of_another_dataset_is_refused(shards: Shards) -> None:
    state = ShardedDataset(shards, "numbers").state_dict()
    with pytest.raises(UsageError, match="position in 'numbers', not in ''"):
        ShardedDataset(shards).load_state_dict(state)


def test_a_shard_that_went_to_another_worker_is_not_read_though_it_was_read_ahead(shards: Shards) -> None:
    rows = iter(ShardedDataset(shards, prefetch_shards=3))
    read = [next(rows)["number"]]
    shards.taken_away = {1, 2}
    read += numbers(rows)
    assert read == [number for number in range(TOTAL) if number // SHARD not in (1, 2)]


def test_a_shard_that_comes_from_a_lost_worker_is_read_in_the_same_epoch(shards: Shards) -> None:
    shards.taken_away = {0, 6}
    rows = iter(ShardedDataset(shards))
    read = [next(rows)["number"]]
    shards.taken_away = set()
    read += numbers(rows)
    assert sorted(read) == list(range(TOTAL))


def test_a_shard_that_the_coordinator_forgot_is_reported_again_and_not_read_again(shards: Shards) -> None:
    rows = iter(ShardedDataset(shards))
    read = [next(rows)["number"] for _ in range(SHARD + 1)]
    shards.done.clear()
    read += numbers(rows)
    assert read == list(range(TOTAL))
    assert sorted(shards.done[0]) == list(range(7))


def test_what_goes_to_another_while_forgotten_shards_are_reported_is_not_read(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = iter(ShardedDataset(shards))
    read = [next(rows)["number"] for _ in range(SHARD + 1)]
    shards.done.clear()

    def mark_done(epoch: int, shard_ids: Sequence[int]) -> None:
        Shards.mark_done(shards, epoch, shard_ids)
        if 0 in shard_ids:  # now the next one of the list is the first, and until now it was not
            shards.taken_away = {2}

    monkeypatch.setattr(shards, "mark_done", mark_done)
    read += numbers(rows)
    assert read == [number for number in range(TOTAL) if number // SHARD != 2]


def test_a_thread_that_reads_what_is_not_wanted_any_more_lets_it_be() -> None:
    def read(reading: Reading) -> Generator[int, None, None]:
        yield from itertools.count() if reading.assignment.shard_id == 0 else [7]

    def reading(shard_id: int) -> Reading:
        return Reading(ShardAssignment(shard_id=shard_id, file_paths=[], start_sample=0, end_sample=1))

    prefetcher = ShardPrefetcher(read)
    prefetcher.want([reading(0)])
    assert next(prefetcher.take(0)) == 0  # which has no end
    prefetcher.want([reading(1)])
    assert list(prefetcher.take(1)) == [7]
    prefetcher.want([reading(0)])
    rows = prefetcher.take(0)
    assert next(rows) == 0
    assert prefetcher.close()
    with pytest.raises(UsageError, match="before this shard was read to its end"):
        list(rows)


@pytest.mark.parametrize("prefetch_shards", [0, 2])
def test_what_cannot_be_read_is_raised_where_its_samples_would_come(
    shards: Shards, tmp_path: Path, prefetch_shards: int
) -> None:
    lines = (tmp_path / "1.jsonl").read_text().splitlines(keepends=True)
    lines[9] = "{no json\n"  # sample 30, in shard 3
    (tmp_path / "1.jsonl").write_text("".join(lines))
    dataset = ShardedDataset(shards, prefetch_shards=prefetch_shards)
    rows = iter(dataset)
    assert [next(rows)["number"] for _ in range(30)] == list(range(30))
    with pytest.raises(DatasetError, match=r"row 9 of .*1\.jsonl is not JSON"):
        next(rows)
    assert shards.done == {0: [0, 1, 2]}

    lines[9] = '{"number": 30}\n'
    (tmp_path / "1.jsonl").write_text("".join(lines))
    assert numbers(dataset) == list(range(30, TOTAL))


def test_a_transform_that_fails_loses_nothing_before_it(shards: Shards) -> None:
    def refuse(row: Any) -> int:
        if row["number"] == 5:
            raise StopIteration  # which in a naive generator would be a silent end
        return int(row["number"])

    rows = iter(ShardedDataset(shards, transform=refuse))
    assert [next(rows) for _ in range(5)] == list(range(5))
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(rows)
    assert not shards.done


def test_the_thread_reads_no_further_than_it_was_told(shards: Shards) -> None:
    seen: list[int] = []

    def see(row: Any) -> int:
        seen.append(row["number"])
        return seen[-1]

    rows = iter(ShardedDataset(shards, transform=see, prefetch_shards=2))
    next(rows)
    eventually(lambda: len(seen) >= 3 * SHARD)
    for _ in range(SHARD - 1):
        next(rows)
    assert len(seen) == 3 * SHARD  # the shard that is handed out, and two ahead
    next(rows)
    eventually(lambda: len(seen) == 4 * SHARD)


def test_the_settings_say_how_much_is_read_ahead(
    shards: Shards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "settings.toml").write_text("[dataset]\nprefetch_shards = 0\n")
    monkeypatch.setenv("UNIFIED_CONFIG", str(tmp_path / "settings.toml"))
    rows = iter(ShardedDataset(shards))
    next(rows)
    assert not threads()


def test_files_are_not_searched_for_rows_again_in_each_epoch(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = ShardedDataset(shards)
    assert numbers(dataset) == list(range(TOTAL))
    monkeypatch.setattr(RowFormat, "_check_first_bytes", lambda *_: pytest.fail("a file was taken for a new one"))
    assert numbers(dataset) == list(range(TOTAL))


def test_it_can_be_pickled_with_its_position(shards: Shards) -> None:
    dataset = ShardedDataset(shards, prefetch_shards=1)
    rows = iter(dataset)
    read = [next(rows)["number"] for _ in range(10)]
    del rows
    assert read + numbers(pickle.loads(pickle.dumps(dataset))) == list(range(TOTAL))


def test_the_thread_ends_with_its_iterator(shards: Shards) -> None:
    rows = iter(ShardedDataset(shards))
    next(rows)
    assert len(threads()) == 1
    del rows
    assert not threads()

    for _ in ShardedDataset(shards, epoch=1):
        break
    gc.collect()
    assert not threads()


@pytest.mark.parametrize("options", [{"prefetch_shards": -1}, {"epoch": -1}, {"dataset_id": "numbers"}])
def test_arguments_that_cannot_be_are_refused(shards: Shards, options: dict[str, Any]) -> None:
    source: Any = SimpleNamespace(format="jsonl", shards=shards.shards, mark_done=shards.mark_done)
    assert numbers(ShardedDataset(source)) == list(range(TOTAL))
    with pytest.raises(UsageError):
        ShardedDataset(source, **options)
