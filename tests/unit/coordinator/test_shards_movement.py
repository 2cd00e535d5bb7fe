"""Whoever comes and goes: nobody has much more than the mean, and few shards change hands."""

from __future__ import annotations

from collections import Counter

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.core.shards.test_ledger import lists_of, names, owners_of, plan_of
from unified.core.shards.ledger import Ledger


def assert_even(ledger: Ledger, num_shards: int) -> None:
    loads = [len(shards) for shards in lists_of(ledger).values()]
    assert sum(loads) == num_shards
    assert max(loads) - min(loads) <= 1, "each has the mean, rounded down or up"


@settings(max_examples=6, deadline=None)
@given(
    num_workers=st.integers(1, 1000),
    num_shards=st.integers(0, 100_000),
    shuffle=st.booleans(),
    leaver=st.integers(0, 1000),
)
@example(num_workers=999, num_shards=100_000, shuffle=True, leaver=999)
@example(num_workers=1, num_shards=100_000, shuffle=False, leaver=0)
@example(num_workers=1000, num_shards=3, shuffle=False, leaver=4)
@example(num_workers=64, num_shards=10_000, shuffle=False, leaver=64)
def test_loads_are_even_and_a_join_or_leave_moves_one_share(
    num_workers: int, num_shards: int, shuffle: bool, leaver: int
) -> None:
    ledger = Ledger(plan_of(num_shards, shuffle=shuffle), names(num_workers))
    before = owners_of(ledger)
    assert_even(ledger, num_shards)
    revision = ledger.revision

    assert ledger.set_workers([*names(num_workers), "new"])
    joined = owners_of(ledger)
    assert_even(ledger, num_shards)
    moved = {shard: worker for shard, worker in joined.items() if before[shard] != worker}
    assert set(moved.values()) <= {"new"}
    assert len(moved) == num_shards // (num_workers + 1), "its share, and no more"

    gone = ledger.workers[leaver % (num_workers + 1)]
    assert ledger.set_workers(worker for worker in ledger.workers if worker != gone)
    left = owners_of(ledger)
    assert_even(ledger, num_shards)
    assert {shard for shard in left if joined[shard] != left[shard]} == {
        shard for shard, worker in joined.items() if worker == gone
    }
    assert ledger.revision == revision + 2


@settings(max_examples=10, deadline=None)
@given(
    num_workers=st.integers(1, 1000),
    num_shards=st.integers(1, 100_000),
    changes=st.lists(st.integers(-1000, 1000), min_size=1, max_size=5),
)
@example(num_workers=1, num_shards=100_000, changes=[1, 1, -1, 1])
@example(num_workers=1000, num_shards=100_000, changes=[-500, 1, -3, 1])
def test_whoever_comes_and_goes_nobody_has_much_more_than_the_mean_and_little_moves(
    num_workers: int, num_shards: int, changes: list[int]
) -> None:
    """One joins for each number from 0 up; else that one of those who are there leaves, unless it is the last."""
    ledger = Ledger(plan_of(num_shards), names(num_workers))
    owners = owners_of(ledger)
    for number, change in enumerate(changes):
        before = ledger.workers
        if change >= 0:
            ledger.set_workers([*before, f"new-{number}"])
        else:
            ledger.set_workers([name for name in before if name != before[change % len(before)]] or before)
        owners, was = owners_of(ledger), owners
        loads = Counter(owners.values())
        assert sum(loads.values()) == num_shards
        assert max(loads.values()) <= -(-num_shards // len(ledger.workers)) + 1
        moved = sum(was[shard] != worker for shard, worker in owners.items())
        assert moved <= -(-11 * num_shards // (10 * max(len(before), len(ledger.workers))))


@given(
    num_shards=st.integers(0, 60),
    num_workers=st.integers(1, 7),
    shuffle=st.booleans(),
    done=st.lists(st.integers(0, 6)),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_after_uneven_progress_a_change_moves_one_share_and_overloads_nobody(
    num_shards: int, num_workers: int, shuffle: bool, done: list[int], data: st.DataObject
) -> None:
    ledger = Ledger(plan_of(num_shards, shuffle=shuffle), names(num_workers))
    for number in done:
        worker = f"worker-{number % num_workers}"
        for shard in ledger.shards_of(worker, 0)[: data.draw(st.integers(1, 5))]:
            assert ledger.mark_done(0, worker, [shard]) == [shard]
    before, loads = owners_of(ledger), {worker: len(shards) for worker, shards in lists_of(ledger).items()}

    ledger.set_workers([*names(num_workers), "new"])
    joined = lists_of(ledger)
    assert len(joined["new"]) == len(before) // (num_workers + 1)
    assert all(
        set(shards) <= {s for s, w in before.items() if w == name} for name, shards in joined.items() if name != "new"
    )

    ledger.set_workers(names(num_workers))
    ledger.set_workers(names(num_workers)[1:])
    mean_up = -(-len(before) // max(num_workers - 1, 1))
    for worker, shards in lists_of(ledger).items():
        assert len(shards) <= max(mean_up, loads[worker])
