"""Readers that wait for the end of an epoch: what a lost worker leaves behind is read, also by those at their end."""

import asyncio
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.data_files import samples, write_jsonl
from unified.data import DatasetRegistry, EmbeddedCoordinator, ShardedDataset, TrainingOrchestrator
from unified.errors import CoordinatorError, EpochTimeoutError, UsageError
from unified.testing import eventually

TOTAL = 60
SHARD = 6
MINE = TOTAL // 2


@pytest.fixture
def registries(tmp_path: Path) -> Iterator[list[DatasetRegistry]]:
    """Of two workers that have five shards each."""
    write_jsonl(tmp_path / "d.jsonl", samples(0, TOTAL))
    with EmbeddedCoordinator() as coordinator:
        made = [DatasetRegistry(coordinator, rank=rank, world_size=2) for rank in range(2)]
        for each in made:
            each.register("d", tmp_path / "d.jsonl", "jsonl", shard_size=SHARD)
        yield made


class Reader:
    def __init__(self, dataset: ShardedDataset, registry: DatasetRegistry | None = None, epochs: int = 1) -> None:
        self.seen: list[int] = []
        self.error: BaseException | None = None
        self._dataset, self._registry, self._epochs = dataset, registry, epochs
        self._thread = threading.Thread(target=self._run, name="test-reader", daemon=True)
        self._thread.start()

    @property
    def is_reading(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            for _ in range(self._epochs):
                self.seen.extend(row["number"] for row in self._dataset)
                if self._registry is not None:
                    self._registry.advance_epoch("d")
        except BaseException as error:
            self.error = error

    def join(self) -> list[int]:
        eventually(lambda: not self.is_reading)
        if self.error is not None:
            raise self.error
        return self.seen


def test_what_is_left_behind_by_one_that_is_lost_after_the_others_are_at_their_end_is_read(
    registries: list[DatasetRegistry],
) -> None:
    coordinator = registries[0]._coordinator
    # So long that a busy machine keeps it until the test lets it go.
    lost = TrainingOrchestrator("worker-1", coordinator, 2, 1, heartbeat_timeout_s=3.0)
    asyncio.run(lost.register_worker())
    rows = iter(ShardedDataset(registries[1], "d"))
    theirs = [next(rows)["number"] for _ in range(2 * SHARD + 3)]  # two shards, and the third is begun
    dataset = ShardedDataset(registries[0], "d", wait_for_others=math.inf)
    reader = Reader(dataset)
    eventually(lambda: registries[0].status("d").num_done == MINE // SHARD + 2)
    assert len(reader.seen) == MINE
    assert reader.is_reading

    lost.close()  # its heartbeats end
    assert sorted(reader.join() + theirs[: 2 * SHARD]) == list(range(TOTAL))
    assert dataset.epoch == 1
    assert registries[0].status("d").num_done == TOTAL // SHARD


def test_all_come_to_the_end_together_and_may_all_go_on_to_the_next_epoch(registries: list[DatasetRegistry]) -> None:
    readers = [Reader(ShardedDataset(each, "d", wait_for_others=20.0), each, epochs=3) for each in registries]
    seen = [reader.join() for reader in readers]
    assert sorted(seen[0] + seen[1]) == sorted([*range(TOTAL)] * 3)
    assert registries[0].current_epoch("d") == 3


def test_an_epoch_that_is_past_when_it_would_begin_is_refused_also_who_waits(registries: list[DatasetRegistry]) -> None:
    dataset = ShardedDataset(registries[0], "d", wait_for_others=20.0, restart="resume")
    registries[1].advance_epoch("d", 2)
    with pytest.raises(CoordinatorError, match="epoch 0 of dataset 'd' is past"):
        list(dataset)


def test_nobody_waits_for_ever_for_one_that_does_not_read(registries: list[DatasetRegistry]) -> None:
    dataset = ShardedDataset(registries[0], "d", wait_for_others=0.2)
    rows = iter(dataset)
    seen = [next(rows)["number"] for _ in range(MINE)]
    with pytest.raises(EpochTimeoutError, match=r"5 of 10 shards of epoch 0 of dataset 'd' .*worker-1.* in 0.2 s"):
        next(rows)
    registries[0].remove_worker("d", 1)  # as the message says
    seen += [row["number"] for row in dataset]
    assert sorted(seen) == list(range(TOTAL))


def test_by_itself_a_reader_waits_for_nobody(registries: list[DatasetRegistry]) -> None:
    assert len(list(ShardedDataset(registries[0], "d"))) == MINE


@pytest.mark.parametrize("seconds", [-1.0, math.nan])
def test_times_that_cannot_be_are_refused(registries: list[DatasetRegistry], seconds: float) -> None:
    with pytest.raises(UsageError, match="seconds from 0 on"):
        ShardedDataset(registries[0], "d", wait_for_others=seconds)


def test_a_source_that_knows_nothing_of_others_cannot_be_waited_for() -> None:
    source: Any = SimpleNamespace(format="jsonl", shards=lambda _: [], mark_done=lambda *_: None)
    with pytest.raises(UsageError, match="knows how far others are"):
        ShardedDataset(source, wait_for_others=1.0)
