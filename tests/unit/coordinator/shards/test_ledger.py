"""Workers that come, go and come back: each shard of an epoch is read once, and few change hands."""

import tracemalloc
from collections import Counter

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from unified.coordinator.core.shards.ledger import NUM_IDLE, Ledger, LedgerSnapshot
from unified.coordinator.core.shards.plan import ShardPlan
from unified.errors import DatasetError, InvariantError


def plan_of(num_shards: int, *, shuffle: bool = False) -> ShardPlan:
    return ShardPlan(dataset_id="imagenet", total_samples=num_shards, shard_size=1, shuffle=shuffle, seed=3)


def names(count: int) -> list[str]:
    return [f"worker-{number}" for number in range(count)]


def lists_of(ledger: Ledger, epoch: int = 0) -> dict[str, list[int]]:
    return {worker: ledger.shards_of(worker, epoch) for worker in ledger.workers}


def owners_of(ledger: Ledger, epoch: int = 0) -> dict[int, str]:
    owners = {shard: worker for worker, shards in lists_of(ledger, epoch).items() for shard in shards}
    assert len(owners) == sum(map(len, lists_of(ledger, epoch).values())), "a shard has two owners"
    return owners


@given(num_shards=st.integers(0, 300), num_workers=st.integers(1, 9), epoch=st.integers(0, 3), data=st.data())
@settings(max_examples=40)
def test_workers_that_come_together_have_the_same_whatever_their_order(
    num_shards: int, num_workers: int, epoch: int, data: st.DataObject
) -> None:
    workers = data.draw(st.permutations(names(num_workers)))
    plan = plan_of(num_shards, shuffle=True)
    place = {shard: position for position, shard in enumerate(plan.order(epoch))}
    shuffled = lists_of(Ledger(plan, workers), epoch)
    assert shuffled == lists_of(Ledger(plan, sorted(workers)), epoch)
    assert all(shards == sorted(shards, key=place.__getitem__) for shards in shuffled.values())
    plain = Ledger(plan_of(num_shards), workers)
    assert lists_of(plain, epoch) == lists_of(plain, 0), "the same in each epoch"
    assert all(shards == sorted(shards) for shards in lists_of(plain).values())


def test_what_workers_have_is_that_of_any_version_of_this_program() -> None:
    """Another spread would give a run that is resumed other data than it has begun with."""
    assert lists_of(Ledger(plan_of(12), ["a", "b", "c"])) == {"a": [2, 3, 6, 7], "b": [4, 5, 10, 11], "c": [0, 1, 8, 9]}


def test_a_large_ledger_takes_little_memory() -> None:
    tracemalloc.start()
    assert len(Ledger(plan_of(100_000), names(1000)).shards_of("worker-0", 0)) == 100
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20_000_000


def test_the_shard_in_hand_stays_and_the_last_ones_move() -> None:
    ledger = Ledger(plan_of(40), ["a", "b"])
    first, *rest = ledger.shards_of("a", 0)
    ledger.set_workers(["a", "b", "c"])
    assert ledger.shards_of("a", 0) == [first, *rest][: len(ledger.shards_of("a", 0))]
    ledger.set_workers(["a"])
    mine = ledger.shards_of("a", 0)
    assert mine == [first, *sorted(set(range(40)) - {first})], "what comes from others comes after it"
    ledger.mark_done(0, "a", mine[:39])
    ledger.set_workers(["a", "b", "c"])
    assert lists_of(ledger) == {"a": [mine[39]], "b": [], "c": []}, "the only shard is being read"


def test_done_is_done() -> None:
    ledger = Ledger(plan_of(10), ["a", "b"])
    mine = ledger.shards_of("a", 0)
    theirs = ledger.shards_of("b", 0)
    assert ledger.mark_done(0, "a", [mine[0], mine[0], mine[2]]) == [mine[0], mine[2]]
    assert ledger.mark_done(0, "a", mine[:2]) == [mine[1]], "twice is once"
    assert ledger.mark_done(0, "a", theirs) == ledger.mark_done(0, "a", theirs[:1]) == [], "another's"
    assert ledger.mark_done(0, "nobody", mine) == []
    assert ledger.num_done(0) == 3
    assert ledger.shards_of("a", 0) == mine[3:]
    ledger.set_workers(["b"])
    assert ledger.mark_done(0, "a", mine[3:]) == [], "too late: they are others' now"
    assert sorted(ledger.shards_of("b", 0)) == sorted([*theirs, *mine[3:]])
    assert ledger.mark_done(0, "b", range(10)) == sorted([*theirs, *mine[3:]])
    assert ledger.num_done(0) == 10
    assert ledger.shards_of("b", 0) == []
    assert ledger.mark_done(0, "b", [1]) == []
    assert (ledger.num_done(1), ledger.shards_of("b", 1)) == (0, list(range(10)))


def test_who_was_away_gets_nothing_back_that_is_done() -> None:
    ledger = Ledger(plan_of(10), ["a"])
    ledger.mark_done(0, "a", [0, 1, 2])
    ledger.set_workers([])
    assert ledger.check() == []
    with pytest.raises(DatasetError, match="'a' has no part in dataset 'imagenet'"):
        ledger.shards_of("a", 0)
    ledger.set_workers(["b"])
    assert ledger.shards_of("b", 0) == list(range(3, 10))


def test_epochs_go_on_and_never_back() -> None:
    ledger = Ledger(plan_of(4), ["a"])
    assert ledger.advance(2)
    assert (ledger.epoch, ledger.revision) == (2, 1)
    assert ledger.advance(5)
    assert not ledger.advance(5)
    assert not ledger.advance(4)
    assert (ledger.epoch, ledger.revision) == (5, 2)
    with pytest.raises(DatasetError, match="Epoch 4 of dataset 'imagenet' is past: ask for 5"):
        ledger.shards_of("a", 4)
    assert ledger.mark_done(4, "a", [0]) == []
    assert ledger.shards_of("a", 7) == [0, 1, 2, 3], "workers do not end an epoch together"
    ledger.mark_done(7, "a", [0])
    ledger.advance(7)
    assert ledger.shards_of("a", 7) == [1, 2, 3]


def test_what_does_not_exist_is_refused() -> None:
    ledger = Ledger(plan_of(4), ["worker-1"])
    for call in (lambda: ledger.shards_of("worker-1", -1), lambda: ledger.advance(-1)):
        with pytest.raises(DatasetError, match="no epoch -1: they count from 0"):
            call()
    with pytest.raises(DatasetError, match="no epoch -2"):
        ledger.mark_done(-2, "worker-1", [0])
    with pytest.raises(DatasetError, match=r"spread over 1 workers; add it to them first. Did you mean 'worker-1'"):
        ledger.shards_of("worker1", 0)
    for shard in (4, -1):
        with pytest.raises(DatasetError, match=f"no shard {shard}: its shards are 0 to 3"):
            ledger.mark_done(0, "worker-1", [0, shard])
    assert ledger.num_done(0) == 0, "a report with a mistake in it counts for nothing"


def test_a_dataset_without_samples_has_nothing_to_read() -> None:
    ledger = Ledger(plan_of(0), ["a"])
    assert ledger.shards_of("a", 0) == []
    ledger.set_workers(["b", "c"])
    assert (ledger.shards_of("c", 3), ledger.num_done(0), ledger.check()) == ([], 0, [])


@pytest.mark.parametrize("shuffle", [False, True])
def test_epochs_that_are_only_asked_for_do_not_fill_the_memory(shuffle: bool) -> None:
    ledger = Ledger(plan_of(20, shuffle=shuffle), ["a", "b"])
    ledger.mark_done(0, "a", ledger.shards_of("a", 0)[:1])
    first = lists_of(ledger, 1)
    for epoch in range(2, 30):
        lists_of(ledger, epoch)
    assert len(ledger.open_epochs) <= NUM_IDLE + 2
    assert 0 in ledger.open_epochs, "something is done of it"
    assert (lists_of(ledger, 1), ledger.revision) == (first, 0)
    ledger.set_workers(["a", "b", "c"])
    revision = ledger.revision
    for epoch in range(2, 30):
        lists_of(ledger, epoch)
    assert ledger.revision > revision, "who asks again may be told of other shards"


def test_the_order_of_coming_does_not_matter() -> None:
    together, reversed_ = Ledger(plan_of(50), ["a", "b", "c"]), Ledger(plan_of(50), ["c", "a", "b", "a"])
    assert lists_of(together) == lists_of(reversed_)
    assert not together.set_workers(["b", "c", "a"])
    assert (together.revision, together.workers) == (0, ["a", "b", "c"])


def test_what_is_restored_is_what_was_kept_and_redone() -> None:
    ledger = Ledger(plan_of(30, shuffle=True), ["a", "b", "c"])
    ledger.mark_done(0, "a", ledger.shards_of("a", 0)[:3])
    ledger.mark_done(1, "b", ledger.shards_of("b", 1)[:2])
    ledger.set_workers(["a", "c"])
    for worker, shards in lists_of(ledger, 2).items():
        ledger.mark_done(2, worker, shards)
    kept = msgspec.msgpack.encode(ledger.snapshot())
    counted = ledger.mark_done(0, "c", ledger.shards_of("c", 0)[:4])
    ahead = lists_of(ledger, 3)

    restored = Ledger.restore(msgspec.msgpack.decode(kept, type=LedgerSnapshot))
    restored.redo(0, counted)
    restored.redo(0, counted)
    restored.redo(2, [1])
    with pytest.raises(DatasetError, match="no shard 30"):
        restored.redo(0, [30])
    assert [lists_of(restored, epoch) for epoch in range(3)] == [lists_of(ledger, epoch) for epoch in range(3)]
    assert lists_of(restored, 3) == ahead
    assert restored.snapshot() == ledger.snapshot()
    assert (restored.num_done(0), restored.num_done(2), restored.revision) == (7, 30, ledger.revision)
    for each in (ledger, restored):
        each.set_workers(["a", "d"])
    assert [lists_of(restored, epoch) for epoch in range(4)] == [lists_of(ledger, epoch) for epoch in range(4)]


@pytest.mark.parametrize("shuffle", [False, True])
def test_what_is_restored_decides_as_what_was_never_stopped(shuffle: bool) -> None:
    ledger = Ledger(plan_of(2000, shuffle=shuffle))
    for number in reversed(range(12)):
        ledger.set_workers([*ledger.workers, f"worker-{number}"])
        lists_of(ledger)
    restored = Ledger.restore(ledger.snapshot())
    for each in (ledger, restored):
        each.set_workers(["worker-1", "worker-3", "worker-5", "worker-7"])
    assert lists_of(restored) == lists_of(ledger)
    assert restored.snapshot() == ledger.snapshot()


def test_a_damaged_snapshot_is_refused() -> None:
    ledger = Ledger(plan_of(8), ["a", "b"])
    lists_of(ledger)
    kept = ledger.snapshot()
    replace = msgspec.structs.replace
    epoch = kept.epochs[0]
    for lists in ([], [b"123", b""], [epoch.lists[0], epoch.lists[0]], [epoch.lists[0], b"\xff" * 4]):
        with pytest.raises(InvariantError):
            Ledger.restore(replace(kept, epochs=[replace(epoch, lists=lists)]))
    with pytest.raises(InvariantError, match="is past but still kept"):
        Ledger.restore(replace(kept, epoch=3))
    assert kept.initial is not None
    with pytest.raises(InvariantError, match="the lists do not match the unfinished shards"):
        Ledger.restore(replace(kept, initial=replace(kept.initial, lists=[b"", b""])))
    assert Ledger.restore(kept).snapshot() == kept


def test_going_back_is_to_exactly_that_position() -> None:
    ledger = Ledger(plan_of(12, shuffle=True), ["a", "b"])
    for name in ("a", "b"):
        ledger.mark_done(0, name, ledger.shards_of(name, 0))
    ledger.mark_done(1, "a", ledger.shards_of("a", 1)[:2])
    ledger.advance(1)

    ledger.rewind(0, [3, 5, 3])
    assert sorted(owners_of(ledger)) == [shard for shard in range(12) if shard not in (3, 5)]
    assert sorted(owners_of(ledger, 1)) == list(range(12)), "the next epoch is whole again"
    assert (ledger.epoch, ledger.num_done(0)) == (0, 2)

    ledger.rewind(2, range(12))
    assert lists_of(ledger, 2) == {"a": [], "b": []}
    assert sorted(owners_of(ledger, 3)) == list(range(12))
    with pytest.raises(DatasetError, match="past"):
        ledger.shards_of("a", 1)
    before = ledger.snapshot()
    for epoch, done in ((-1, [0]), (2, [12])):
        with pytest.raises(DatasetError):
            ledger.rewind(epoch, done)
    assert ledger.snapshot() == before


def assert_even(ledger: Ledger, num_shards: int) -> None:
    loads = [len(shards) for shards in lists_of(ledger).values()]
    assert sum(loads) == num_shards
    assert max(loads) - min(loads) <= 1, "each has the mean, rounded down or up"


@settings(max_examples=6)
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


@settings(max_examples=10)
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
@settings(max_examples=60)
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
