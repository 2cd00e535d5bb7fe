"""How many shards each worker is to have, and which: a ring moves what it must, and no more."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unified.coordinator.core.shards.assignment import drain_highest, fill_lowest
from unified.coordinator.core.shards.hash_ring import along_the_ring, spread
from unified.coordinator.hashing import ConsistentHash
from unified.errors import DatasetError

LOADS = st.lists(st.integers(0, 12), min_size=1, max_size=8)


def names(count: int) -> list[str]:
    return [f"worker-{number}" for number in range(count)]


def of(loads: list[int]) -> tuple[dict[str, int], dict[str, bytes]]:
    """Holders of so much, with hashes that are not in the order of the names."""
    return dict(zip(names(len(loads)), loads, strict=True)), {
        name: bytes([number * 7 % 8]) for number, name in enumerate(names(len(loads)))
    }


@given(loads=LOADS, num_more=st.integers(0, 60))
def test_filling_is_giving_one_by_one_to_who_has_least(loads: list[int], num_more: int) -> None:
    holders, hashes = of(loads)
    one_by_one = dict(holders)
    for _ in range(num_more):
        one_by_one[min(one_by_one, key=lambda name: (one_by_one[name], hashes[name]))] += 1
    more = fill_lowest(holders, num_more, hashes)
    assert {name: load + more.get(name, 0) for name, load in holders.items()} == one_by_one
    assert fill_lowest(dict(reversed(holders.items())), num_more, hashes) == more


@given(loads=LOADS, share=st.floats(0, 1))
def test_draining_is_taking_one_by_one_from_who_has_most(loads: list[int], share: float) -> None:
    holders, hashes = of(loads)
    num_less = int(sum(loads) * share)
    one_by_one = dict(holders)
    for _ in range(num_less):
        one_by_one[min(one_by_one, key=lambda name: (-one_by_one[name], hashes[name]))] -= 1
    less = drain_highest(holders, num_less, hashes)
    assert {name: load - less.get(name, 0) for name, load in holders.items()} == one_by_one


@settings(max_examples=100)
@given(num_shards=st.integers(1, 9000), salt=st.text(max_size=5), data=st.data())
def test_a_shard_has_the_same_place_whoever_else_is_on_the_ring(
    num_shards: int, salt: str, data: st.DataObject
) -> None:
    everything, _ = along_the_ring(salt, range(num_shards), num_shards)
    assert sorted(everything) == [*range(num_shards)]
    some = data.draw(st.lists(st.integers(0, num_shards - 1), unique=True, max_size=min(num_shards - 1, 200)))
    in_order, places = along_the_ring(salt, some, num_shards)
    assert places is not None
    assert sorted(in_order) == sorted(some)
    assert in_order.tolist() == [everything[place] for place in places]
    assert places == sorted(places)


def test_with_room_enough_a_worker_keeps_its_shards_when_others_join() -> None:
    few, more = (spread("s", range(5000), 5000, dict.fromkeys(names(count), 5000)) for count in (20, 21))
    for name, shards in few.items():
        assert set(more[name]) <= set(shards)
    assert 0 < len(more["worker-20"]) < 1000


def test_a_spread_depends_on_its_salt_and_no_order_matters() -> None:
    rooms = dict.fromkeys(names(4), 25)
    spreads = [spread(salt, range(100), 100, rooms) for salt in "abc"]
    assert all(spreads.count(each) == 1 for each in spreads)
    assert spread("a", range(100), 100, dict(reversed(rooms.items()))) == spreads[0]
    assert spread("a", range(9, 90), 100, rooms) == spread("a", range(89, 8, -1), 100, rooms)


@settings(max_examples=50)
@given(rooms=st.lists(st.integers(0, 12), min_size=1, max_size=8), others=st.integers(0, 50), data=st.data())
def test_a_spread_gives_everything_and_nobody_more_than_has_room(
    rooms: list[int], others: int, data: st.DataObject
) -> None:
    most = sum(rooms) + others
    shards = data.draw(st.lists(st.integers(0, max(most - 1, 0)), unique=True, max_size=sum(rooms)))
    given_out = spread("s", shards, most, dict(zip(names(len(rooms)), rooms, strict=True)))
    assert sorted(shard for some in given_out.values() for shard in some) == sorted(shards)
    assert all(len(some) <= rooms[int(name.removeprefix("worker-"))] for name, some in given_out.items())


@settings(max_examples=20)
@given(num_nodes=st.integers(1, 12), data=st.data())
def test_a_ring_moves_only_what_a_node_takes_or_gives_up(num_nodes: int, data: st.DataObject) -> None:
    ring = ConsistentHash(names(num_nodes), num_points=8)
    before = [ring.get_node_for_shard("d", shard) for shard in range(200)]
    ring.add_node("new")
    after = [ring.get_node_for_shard("d", shard) for shard in range(200)]
    assert all(node in (old, "new") for old, node in zip(before, after, strict=True))
    assert ring.nodes == sorted([*names(num_nodes), "new"])
    ring.remove_node("new")
    assert [ring.get_node_for_shard("d", shard) for shard in range(200)] == before
    again = ConsistentHash(num_points=8)
    for node in data.draw(st.permutations(names(num_nodes))):
        again.add_node(node)
        again.add_node(node)
    assert [again.get_node_for_shard("d", shard) for shard in range(200)] == before


def test_a_ring_is_about_even() -> None:
    ring = ConsistentHash(names(10))
    loads = Counter(ring.get_node_for_shard("d", shard) for shard in range(20_000))
    assert len(loads) == 10
    assert max(loads.values()) < 1.3 * 2000


def test_a_ring_without_nodes_says_so() -> None:
    ring = ConsistentHash(["a"])
    ring.remove_node("a")
    ring.remove_node("a")
    with pytest.raises(DatasetError, match="ring is empty"):
        ring.get_node_for_shard("d", 1)
    with pytest.raises(DatasetError, match="1 point or more"):
        ConsistentHash(num_points=0)
