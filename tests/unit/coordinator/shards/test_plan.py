"""Shards cover every sample once; the order of an epoch depends on the seed, the dataset and the epoch alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from unified.coordinator.core.shards.plan import MAX_SHARDS, ShardPlan
from unified.errors import DatasetError, UsageError


@given(total=st.integers(0, 2000), size=st.integers(1, 300))
def test_shards_cover_every_sample_once(total: int, size: int) -> None:
    plan = ShardPlan(dataset_id="d", total_samples=total, shard_size=size)
    samples = [sample for shard in range(plan.num_shards) for sample in range(*plan.bounds(shard))]
    assert samples == list(range(total))
    assert all(plan.bounds(shard)[1] - plan.bounds(shard)[0] == size for shard in range(plan.num_shards - 1))


@given(dataset_id=st.text(max_size=8), num_shards=st.integers(0, 200), seed=st.integers(), epoch=st.integers(0, 9))
def test_an_order_has_every_shard_once(dataset_id: str, num_shards: int, seed: int, epoch: int) -> None:
    shuffled = ShardPlan(dataset_id=dataset_id, total_samples=num_shards, shard_size=1, shuffle=True, seed=seed)
    assert sorted(shuffled.order(epoch)) == list(range(num_shards))
    assert list(shuffled.order(epoch)) == list(shuffled.order(epoch))
    plain = ShardPlan(dataset_id=dataset_id, total_samples=num_shards, shard_size=1, seed=seed)
    assert list(plain.order(epoch)) == list(range(num_shards))


def test_an_order_is_that_of_any_version_of_this_program() -> None:
    """Changing it would give a run that is resumed other data than it has begun with."""
    plan = ShardPlan(dataset_id="imagenet", total_samples=80, shard_size=10, shuffle=True, seed=42)
    assert [list(plan.order(epoch)) for epoch in range(2)] == [[2, 3, 1, 5, 4, 6, 0, 7], [6, 0, 1, 2, 3, 5, 4, 7]]


def test_seed_dataset_and_epoch_each_change_the_order() -> None:
    plan = ShardPlan(dataset_id="a", total_samples=1000, shard_size=10, shuffle=True, seed=1)
    others = [replace(plan, dataset_id="b").order(0), replace(plan, seed=2).order(0), plan.order(1), range(100)]
    assert len({tuple(order) for order in [plan.order(0), *others]}) == 5
    assert ShardPlan(dataset_id="a", total_samples=500, shard_size=5, shuffle=True, seed=1).order(0) == plan.order(0)


@pytest.mark.parametrize(
    ("total", "size", "what"),
    [(-1, 1, "has -1 samples"), (10, 0, "shards of 0 samples"), (MAX_SHARDS * 3, 2, "a shard_size of 3 or more")],
)
def test_what_cannot_be_cut_is_refused(total: int, size: int, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        ShardPlan(dataset_id="d", total_samples=total, shard_size=size)


@pytest.mark.parametrize(("total", "shard", "what"), [(30, 3, "are 0 to 2"), (30, -1, "are 0 to 2"), (0, 0, "no samp")])
def test_a_shard_that_does_not_exist_is_refused(total: int, shard: int, what: str) -> None:
    with pytest.raises(DatasetError, match=what):
        ShardPlan(dataset_id="d", total_samples=total, shard_size=10).bounds(shard)
