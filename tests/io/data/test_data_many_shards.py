"""A dataset of very many shards: what reading one of them takes does not depend on how many there are."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from unified.data import DatasetRegistry, EmbeddedCoordinator
from unified.data.shard_cache import AT_ONCE
from unified.errors import CoordinatorError, UsageError
from unified.protocol.coordinator import CoordinatorRequest, GetDataShard, MarkDone, coordinator_to_worker

SHARDS = 100_000
READ = 5_000


class Counted(EmbeddedCoordinator):
    """Notes each request, and the bytes of its answer."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[type, list[int]] = {}

    def submit(
        self, request: CoordinatorRequest, expected: type[Any], *, timeout_s: float | None = None
    ) -> Future[Any]:
        future = super().submit(request, expected, timeout_s=timeout_s)
        if future.exception() is None:
            size = len(coordinator_to_worker.encode_body(future.result()))
            self.sizes.setdefault(type(request), []).append(size)
        return future


@pytest.fixture
def counted() -> Iterator[Counted]:
    with Counted() as coordinator:
        yield coordinator


@pytest.fixture
def registry(counted: Counted, tmp_path: Path) -> DatasetRegistry:
    """Of a worker that has all shards; each is a sample."""
    (tmp_path / "d.jsonl").write_text("{}\n" * SHARDS)
    registry = DatasetRegistry(counted, rank=0, world_size=1)
    registry.register("d", tmp_path / "d.jsonl", "jsonl", shard_size=1, shuffle=True)
    counted.sizes.clear()
    return registry


def test_a_reader_asks_seldom_and_for_few(counted: Counted, registry: DatasetRegistry) -> None:
    """Two messages a shard that are all there is left would be as many bytes as there are shards, squared."""
    source = registry.shard_source("d")
    counted.sizes.clear()
    read = []
    for _ in range(READ):
        shards = source.shards(0)
        assert len(shards) > 100, "what is read ahead is among them"
        read.append(shards[0].shard_id)
        source.mark_done(0, read[-1:])
    assert len(set(read)) == READ
    assert registry.status("d").num_done == READ
    assert len(counted.sizes[MarkDone]) == READ
    assert len(counted.sizes[GetDataShard]) <= 1 + READ / (AT_ONCE / 2)
    assert max(counted.sizes[GetDataShard]) < AT_ONCE * 400


def test_it_asks_again_as_soon_as_anything_moved(counted: Counted, registry: DatasetRegistry) -> None:
    source = registry.shard_source("d")
    first, second, *_ = source.shards(0)
    source.mark_done(0, [first.shard_id])
    assert source.shards(0)[0] == second
    assert len(counted.sizes[GetDataShard]) == 1
    assert source.shards(0)[0] == second, "nobody has told that it is so still"
    assert len(counted.sizes[GetDataShard]) == 2
    registry.register_worker("d", "another")
    source.mark_done(0, [second.shard_id])
    left = {each.shard_id for each in registry.get_assignment("d", 0, 0)}
    assert {each.shard_id for each in source.shards(0)} <= left
    assert len(counted.sizes[GetDataShard]) == 4


def test_one_may_ask_for_the_first_ones_alone(counted: Counted, registry: DatasetRegistry) -> None:
    few = registry.get_assignment("d", epoch=0, limit=3)
    assert len(few) == 3
    assert registry.get_assignment("d", epoch=0)[:3] == few
    assert counted.sizes[GetDataShard][0] < 1_000
    with pytest.raises(UsageError, match="limit=0"):
        registry.get_assignment("d", epoch=0, limit=0)
    with pytest.raises(CoordinatorError, match="-1 shards cannot be asked for"):
        registry.look_up("d", "worker-0", 0, limit=-1)
