"""The agreement of ranks on snapshots, over a real store."""

from functools import partial

import pytest

from unified.protocol.snapshots import SnapshotStamp
from unified.rounds.rendezvous_store import RoundStores, connect
from unified.rounds.snapshot_agreement import RoundAgreement, RoundPlace

pytest.importorskip("torch")
WORLD_SIZE = 3


@pytest.fixture
def stores() -> RoundStores:
    return RoundStores("127.0.0.1", {})


@pytest.fixture
def ranks(stores: RoundStores) -> list[RoundAgreement]:
    connected = partial(connect, "127.0.0.1", stores.port, 30.0)
    places = [RoundPlace("trainer", 1, rank, WORLD_SIZE, connected, 30.0) for rank in range(WORLD_SIZE)]
    return [RoundAgreement(place, 0) for place in places]


def test_all_have_a_snapshot_once_all_ranks_have_noted_it(ranks: list[RoundAgreement]) -> None:
    stamp = SnapshotStamp(1, 5)
    first, second, third = ranks
    assert [first.all_have(stamp), first.all_have(stamp), second.all_have(stamp)] == [False, False, False]
    assert [third.all_have(stamp), first.all_have(stamp), second.all_have(stamp)] == [True, True, True]


def test_what_was_noted_of_older_snapshots_does_not_pile_up(stores: RoundStores, ranks: list[RoundAgreement]) -> None:
    store = connect("127.0.0.1", stores.port, 30.0)
    before = store.num_keys()
    for step in range(1, 31):
        order = ranks[step % 3 :] + ranks[: step % 3]
        # A rank whose partner is slow learns of every other one alone.
        noting = [rank for rank in order if step % 2 == 0 or rank is not ranks[0]]
        found = [rank.all_have(SnapshotStamp(1, step)) for rank in noting]
        assert any(found) == (len(noting) == WORLD_SIZE)
        assert all(rank.all_have(SnapshotStamp(1, step)) for rank in ranks if any(found))
    assert store.num_keys() - before == 1
