"""The agreement of ranks on snapshots, over a real store."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from unified.protocol.snapshots import RankReport, ServerAddress, SettledCopies, SnapshotStamp
from unified.rounds.rendezvous_store import RoundStores, connect
from unified.rounds.snapshot_agreement import RoundAgreement, RoundPlace
from unified.snapshot.core.agreement import agree

pytest.importorskip("torch")
WORLD_SIZE = 3


@pytest.fixture
def stores() -> RoundStores:
    return RoundStores("127.0.0.1", {})


@pytest.fixture
def ranks(stores: RoundStores) -> list[RoundAgreement]:
    """Ranks that have agreed that they hold nothing."""
    connected = partial(connect, "127.0.0.1", stores.port, 100.0)
    places = [RoundPlace("trainer", 1, rank, WORLD_SIZE, connected, 100.0) for rank in range(WORLD_SIZE)]
    found = [RoundAgreement(place, 0) for place in places]
    report = RankReport(server=ServerAddress(node="n1", url="", token=""))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda rank: rank.reach(report, partial(agree, job_id="job-1", role="trainer")), found))
    return found


def test_a_snapshot_is_settled_once_all_ranks_have_voted_on_it(ranks: list[RoundAgreement]) -> None:
    first, second = SnapshotStamp(1, 5), SnapshotStamp(1, 6)
    for rank in ranks:
        assert {each.settled() for each in ranks} == {SettledCopies()}
        rank.vote(first, True)
    assert {rank.settled() for rank in ranks} == {SettledCopies(newest=first, floor=first)}
    for rank in reversed(ranks):
        rank.vote(second, rank is not ranks[1])
    assert {rank.settled() for rank in ranks} == {SettledCopies(newest=second, floor=first)}


def test_votes_on_older_snapshots_do_not_pile_up(stores: RoundStores, ranks: list[RoundAgreement]) -> None:
    store = connect("127.0.0.1", stores.port, 100.0)
    before = store.num_keys()
    for step in range(1, 31):
        for rank in ranks[step % 3 :] + ranks[: step % 3]:
            rank.vote(SnapshotStamp(1, step), step % 2 == 0 or rank is not ranks[0])
    assert store.num_keys() == before
    assert ranks[0].settled() == SettledCopies(newest=SnapshotStamp(1, 30), floor=SnapshotStamp(1, 30))
