"""Workers that read one dataset together: the registry, the embedded coordinator and `ShardedDataset` as they are."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.data_files import WRITERS, plain, samples
from unified.data import DatasetRegistry, EmbeddedCoordinator, ShardedDataset, iter_samples, merge_positions
from unified.data.shard_cache import DatasetShards
from unified.errors import CoordinatorError, UsageError

Register = Callable[[int], list[DatasetRegistry]]
TOTAL = 230


@pytest.fixture
def coordinator() -> Iterator[EmbeddedCoordinator]:
    made = EmbeddedCoordinator()
    yield made
    made.close()


@pytest.fixture(params=["parquet", "csv", "tfrecord", "jsonl", "arrow"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    format_, suffix, write = WRITERS[request.param]
    for number, start in enumerate(range(0, TOTAL, 90)):
        write(tmp_path / f"{number}{suffix}", samples(start, min(start + 90, TOTAL)))
    return str(tmp_path), format_


@pytest.fixture
def register(coordinator: EmbeddedCoordinator, dataset: tuple[str, str]) -> Register:
    def registries(num: int) -> list[DatasetRegistry]:
        made = [DatasetRegistry(coordinator, rank=rank, world_size=num) for rank in range(num)]
        for each in made:
            each.register("numbers", *dataset, shard_size=12, shuffle=True, seed=3)
        return made

    return registries


def number(format_: str, sample: Any) -> int:
    return int(plain(format_, sample)["number"])


def test_the_assignments_of_all_workers_are_every_sample_once(register: Register, dataset: tuple[str, str]) -> None:
    read = [
        number(dataset[1], sample)
        for registry in register(3)
        for sample in iter_samples(registry.get_assignment("numbers", epoch=0))
    ]
    assert sorted(read) == list(range(TOTAL))
    assert read != sorted(read)


class Together:
    """Workers that read an epoch, each a sample at a time, in a random order."""

    def __init__(self, format_: str, datasets: dict[int, ShardedDataset]) -> None:
        self.format = format_
        self.datasets = datasets
        self.reading = {rank: iter(each) for rank, each in datasets.items()}
        self.seen: dict[int, list[int]] = {rank: [] for rank in datasets}
        self._chance = random.Random(5)

    def step(self, rank: int) -> None:
        try:
            self.seen[rank].append(number(self.format, next(self.reading[rank])))
        except StopIteration:
            del self.reading[rank]

    def read(self, num_steps: int = TOTAL * 2) -> None:
        for _ in range(num_steps):
            if self.reading:
                self.step(self._chance.choice(sorted(self.reading)))

    def add(self, rank: int, dataset: ShardedDataset) -> None:
        self.datasets[rank], self.reading[rank], self.seen[rank] = dataset, iter(dataset), []

    @property
    def all_seen(self) -> Counter[int]:
        return Counter(itertools.chain.from_iterable(self.seen.values()))


def read_together(registries: list[DatasetRegistry], position: dict[str, Any] | None = None) -> Together:
    datasets = {rank: ShardedDataset(each, "numbers") for rank, each in enumerate(registries)}
    for each in datasets.values():
        if position is not None:
            each.load_state_dict(position)
    return Together(registries[0].datasets()[0].format, datasets)


def test_a_worker_that_comes_in_mid_epoch_reads_what_nobody_else_does(
    coordinator: EmbeddedCoordinator, register: Register
) -> None:
    together = read_together(register(3))
    together.read(70)
    newcomer = DatasetRegistry(coordinator, rank=3)
    newcomer.register_worker("numbers")
    together.add(3, ShardedDataset(newcomer, "numbers"))
    together.read()

    assert together.all_seen == Counter(range(TOTAL))
    assert together.seen[3]

    together = Together(together.format, together.datasets)  # the next epoch
    together.read()
    assert together.all_seen == Counter(range(TOTAL))
    assert {each.epoch for each in together.datasets.values()} == {2}


def test_of_a_worker_that_is_lost_only_the_shard_that_it_was_reading_is_read_again(register: Register) -> None:
    made = register(3)
    together = read_together(made)
    for _ in range(12 + 5):
        together.step(1)
    made[0].remove_worker("numbers", 1)
    del together.reading[1]
    together.read()

    seen = together.all_seen
    assert set(seen) == set(range(TOTAL))
    assert {sample for sample, times in seen.items() if times > 1} == set(together.seen[1][12:])


def test_a_smaller_world_goes_on_where_a_checkpoint_was_taken(register: Register) -> None:
    """What was read after the checkpoint comes again, and nothing that was read before it."""
    together = read_together(register(3))
    together.read(100)
    position = merge_positions([each.state_dict() for each in together.datasets.values()])
    before = together.all_seen
    together.read(60)  # is lost

    made = register(2)
    together = read_together(made, position)
    together.read()
    assert before + together.all_seen == Counter(range(TOTAL))
    assert all(together.seen.values())
    assert made[0].active_workers("numbers") == ["worker-0", "worker-1"]


def test_who_loads_late_undoes_nothing_and_who_loads_another_position_is_refused(register: Register) -> None:
    together = read_together(register(3))
    together.read(TOTAL + 60)  # beyond the epoch
    together = Together(together.format, together.datasets)
    together.read(40)
    start = {"epoch": 0, "done": [], "begun": []}
    together.datasets[0].load_state_dict(start)
    together.reading[0] = iter(together.datasets[0])
    together.seen = {0: [], 1: [], 2: []}
    for _ in range(30):
        together.step(0)
    for rank in (1, 2):
        with pytest.raises(CoordinatorError, match=r"worker-0.* another position .*merge_positions"):
            together.datasets[rank].load_state_dict({**start, "done": [1]})
        together.datasets[rank].load_state_dict(start)
        together.reading[rank] = iter(together.datasets[rank])
    together.read()
    assert together.all_seen == Counter(range(TOTAL))


def test_a_reader_that_gets_nothing_says_so_and_can_begin_anew(
    register: Register, caplog: pytest.LogCaptureFixture
) -> None:
    (registry,) = register(1)
    assert len(list(ShardedDataset(registry, "numbers"))) == TOTAL
    assert not caplog.records
    assert list(ShardedDataset(registry, "numbers", restart="resume")) == []
    assert not caplog.records
    assert list(ShardedDataset(registry, "numbers")) == []
    assert "dataset 'numbers': 20 of 20 shards of epoch 0 were read before" in caplog.text
    assert "load_state_dict" in caplog.text
    assert len(list(ShardedDataset(registry, "numbers", restart="anew"))) == TOTAL
    with pytest.raises(UsageError, match="restart"):
        ShardedDataset(registry, "numbers", restart="again")  # type: ignore[arg-type]


@pytest.mark.parametrize("is_elastic", [False, True])
def test_a_new_incarnation_goes_on_and_says_so_or_begins_anew_where_all_ranks_do(
    register: Register, caplog: pytest.LogCaptureFixture, is_elastic: bool
) -> None:
    (registry,) = register(1)
    old = read_together([registry])
    old.read(30)
    source = DatasetShards(registry, "numbers", "worker-0", old.format, incarnation=1, is_elastic=is_elastic)
    new = Together(old.format, {0: ShardedDataset(source)})
    new.read()
    assert new.all_seen == (Counter(range(TOTAL)) if is_elastic else Counter(range(TOTAL)) - Counter(old.seen[0][:24]))
    assert ("2 of 20 shards of epoch 0 were read before" in caplog.text) == (not is_elastic)
    assert sum(1 for _ in ShardedDataset(source)) == 0, "once in a process"
