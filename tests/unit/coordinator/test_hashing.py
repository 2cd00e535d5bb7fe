"""`ShardManager` as the reference document shows it, and with what its real use needs."""

import pytest

from unified.data import ConsistentHash, ShardManager
from unified.errors import DatasetError


def test_as_the_document_shows_it() -> None:
    assert ShardManager("imagenet", 1000).assign_shards(0, "worker-1") == list(range(1000))

    ring = ConsistentHash()
    ring.add_node("worker-1")
    ring.add_node("worker-2")
    assert ring.get_node_for_shard("imagenet", 42) in ("worker-1", "worker-2")


def test_workers_come_read_and_go() -> None:
    manager = ShardManager("imagenet", 10, ["a"])
    theirs = manager.assign_shards(0, "b")
    manager.add_worker("b")
    assert manager.workers == ["a", "b"]
    assert sorted([*manager.assign_shards(0, "a"), *theirs]) == list(range(10))
    assert manager.assign_shards(1, "b") == theirs
    assert manager.mark_done(0, "b", theirs[:2]) == theirs[:2]
    manager.remove_worker("b")
    manager.remove_worker("b")
    assert set(manager.assign_shards(0, "a")) == set(range(10)) - set(theirs[:2])
    manager.advance_epoch(1)
    assert manager.assign_shards(1, "a") == list(range(10))
    with pytest.raises(DatasetError, match="Epoch 0 of dataset 'imagenet' is past"):
        manager.assign_shards(0, "a")


def test_with_shuffle_the_order_is_that_of_the_seed_and_epoch() -> None:
    one, other, third = (ShardManager("d", 100, ["a"], shuffle=True, seed=seed) for seed in (1, 1, 2))
    assert one.assign_shards(0, "a") == other.assign_shards(0, "a")
    orders = [one.assign_shards(0, "a"), one.assign_shards(1, "a"), third.assign_shards(0, "a"), list(range(100))]
    assert all(orders.count(order) == 1 and sorted(order) == list(range(100)) for order in orders)
