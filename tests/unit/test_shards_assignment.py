"""How many shards each worker is to have, and which: a ring moves what it must, and no more."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unified.core.shards.levels import drained, filled
from unified.core.shards.ring import BLOCK, TABLE_PAYS, places, spread
from unified.data.hashing import ConsistentHash
from unified.errors import DatasetError

LOADS = st.lists(st.integers(0, 12), min_size=1, max_size=8)


def names(count: int) -> list[str]:
    return [f"worker-{number}" for number in range(count)]


def of(loads: list[int]) -> tuple[dict[str, int], dict[str, bytes]]:
    """Holders of so much, with tickets that are not in the order of the names."""
    return dict(zip(names(len(loads)), loads, strict=True)), {
        name: bytes([number * 7 % 8]) for number, name in enumerate(names(len(loads)))
    }


@given(loads=LOADS, num_more=st.integers(0, 60))
def test_filling_is_giving_one_by_one_to_who_has_least(loads: list[int], num_more: int) -> None:
    holders, tickets = of(loads)
    one_by_one = dict(holders)
    for _ in range(num_more):
        one_by_one[min(one_by_one, key=lambda name: (one_by_one[name], tickets[name]))] += 1
    more = filled(holders, num_more, tickets)
    assert {name: load + more.get(name, 0) for name, load in holders.items()} == one_by_one
    assert filled(dict(reversed(holders.items())), num_more, tickets) == more


@given(loads=LOADS, share=st.floats(0, 1))
def test_draining_is_taking_one_by_one_from_who_has_most(loads: list[int], share: float) -> None:
    holders, tickets = of(loads)
    num_less = int(sum(loads) * share)
    one_by_one = dict(holders)
    for _ in range(num_less):
        one_by_one[min(one_by_one, key=lambda name: (-one_by_one[name], tickets[name]))] -= 1
    less = drained(holders, num_less, tickets)
    assert {name: load - less.get(name, 0) for name, load in holders.items()} == one_by_one


def test_a_table_of_places_says_what_a_search_says() -> None:
    """With room for all where they belong, only the look-up decides; and that of few shards is another one."""
    few, many = range(TABLE_PAYS - 1), range(TABLE_PAYS)
    by_table = spread("s", many, dict.fromkeys(names(50), 1000))
    by_search = spread("s", few, dict.fromkeys(names(50), 1000))
    assert {name: [shard for shard in shards if shard != few.stop] for name, shards in by_table.items()} == by_search


def test_the_place_of_a_shard_does_not_depend_on_the_others() -> None:
    together = list(places("s", range(3 * BLOCK)))
    assert list(places("s", [5, 2 * BLOCK + 1])) == [together[5], together[2 * BLOCK + 1]]
    assert list(places("s", [10**9, 5])) == [*places("s", [10**9]), together[5]]


def test_a_spread_depends_on_its_salt_and_the_order_of_workers_does_not_matter() -> None:
    rooms = dict.fromkeys(names(4), 25)
    spreads = [spread(salt, range(100), rooms) for salt in "abc"]
    assert all(spreads.count(each) == 1 for each in spreads)
    assert spread("a", range(100), dict(reversed(rooms.items()))) == spreads[0]


@settings(max_examples=50, deadline=None)
@given(rooms=st.lists(st.integers(0, 12), min_size=1, max_size=8), data=st.data())
def test_a_spread_gives_everything_and_nobody_more_than_has_room(rooms: list[int], data: st.DataObject) -> None:
    shards = data.draw(st.lists(st.integers(0, 10**6), unique=True, max_size=sum(rooms)))
    given_out = spread("s", shards, dict(zip(names(len(rooms)), rooms, strict=True)))
    assert sorted(shard for some in given_out.values() for shard in some) == sorted(shards)
    assert all(len(some) <= rooms[int(name.removeprefix("worker-"))] for name, some in given_out.items())


@settings(max_examples=20, deadline=None)
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
