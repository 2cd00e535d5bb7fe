"""Workers that read one dataset together: the registry, the embedded coordinator and `ShardedDataset` as they are."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.io.data_files import WRITERS, plain, samples
from unified.data import DatasetRegistry, EmbeddedCoordinator, ShardedDataset, iter_samples

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


def registries(coordinator: EmbeddedCoordinator, dataset: tuple[str, str], num: int) -> list[DatasetRegistry]:
    made = [DatasetRegistry(coordinator, rank=rank, world_size=num) for rank in range(num)]
    for each in made:
        each.register("numbers", *dataset, shard_size=12, shuffle=True, seed=3)
    return made


def number(format_: str, sample: Any) -> int:
    return int(plain(format_, sample)["number"])


def test_the_assignments_of_all_workers_are_every_sample_once(
    coordinator: EmbeddedCoordinator, dataset: tuple[str, str]
) -> None:
    read = [
        number(dataset[1], sample)
        for registry in registries(coordinator, dataset, 3)
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


def test_a_worker_that_comes_in_mid_epoch_reads_what_nobody_else_does(
    coordinator: EmbeddedCoordinator, dataset: tuple[str, str]
) -> None:
    made = registries(coordinator, dataset, 3)
    together = Together(dataset[1], {rank: ShardedDataset(each, "numbers") for rank, each in enumerate(made)})
    together.read(70)
    newcomer = DatasetRegistry(coordinator, rank=3)
    newcomer.register_worker("numbers")
    together.add(3, ShardedDataset(newcomer, "numbers"))
    together.read()

    assert together.all_seen == Counter(range(TOTAL))
    assert together.seen[3]

    together = Together(dataset[1], together.datasets)  # the next epoch
    together.read()
    assert together.all_seen == Counter(range(TOTAL))
    assert {each.epoch for each in together.datasets.values()} == {2}


def test_of_a_worker_that_is_lost_only_the_shard_that_it_was_reading_is_read_again(
    coordinator: EmbeddedCoordinator, dataset: tuple[str, str]
) -> None:
    made = registries(coordinator, dataset, 3)
    together = Together(dataset[1], {rank: ShardedDataset(each, "numbers") for rank, each in enumerate(made)})
    for _ in range(12 + 5):
        together.step(1)
    made[0].remove_worker("numbers", 1)
    del together.reading[1]
    together.read()

    seen = together.all_seen
    assert set(seen) == set(range(TOTAL))
    assert {sample for sample, times in seen.items() if times > 1} == set(together.seen[1][12:])
