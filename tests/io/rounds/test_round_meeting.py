"""Meetings of ranks over a real store: who comes is heard, and who does not is named."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.deadlines import missed
from unified.elastic import ElasticState, loop
from unified.errors import RoundMeetingError
from unified.rounds.meeting import RoundMeeting, RoundMember
from unified.rounds.rendezvous_store import RoundStores, connect
from unified.worker.failure import is_collateral

pytest.importorskip("torch")
LONG_S = 100.0


class Round:
    """A round's store, and its ranks, each with a connection and a thread of its own."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.stores = RoundStores("127.0.0.1", {})
        self.pool = pool

    def meeting(self, rank: int, world_size: int = 3, within_s: float = LONG_S) -> RoundMeeting:
        store = connect("127.0.0.1", self.stores.port, LONG_S)
        member = RoundMember(4, rank, world_size)
        return RoundMeeting(store, "lunch", member, within_s, "have lunch", "Ring the bell.")

    def start(self, rank: int, method: str, *args: Any) -> Future[Any]:
        return self.pool.submit(getattr(self.meeting(rank), method), *args)


@pytest.fixture
def a_round() -> Iterator[Round]:
    with ThreadPoolExecutor() as pool:
        yield Round(pool)


def test_nobody_goes_on_before_all_have_come(a_round: Round) -> None:
    early = [a_round.start(rank, "wait_for_all") for rank in (2, 0)]
    with pytest.raises(TimeoutError):
        early[0].result(missed(0.2))
    assert not early[1].done()
    a_round.meeting(1).wait_for_all()
    for each in early:
        each.result(LONG_S)


def test_rank_0_decides_on_what_all_have_said(a_round: Round) -> None:
    def agree(rank: int) -> bytes:
        meeting = a_round.meeting(rank)
        said = meeting.gather(b"\xff%d" % rank)
        assert len(said) == (3 if rank == 0 else 0)
        return meeting.conclude(b" ".join(said) if said else None)

    found = [a_round.pool.submit(agree, rank) for rank in range(3)]
    assert [each.result(LONG_S) for each in found] == [b"\xff0 \xff1 \xff2"] * 3


def test_who_waits_in_vain_is_told_for_whom(a_round: Round) -> None:
    with pytest.raises(RoundMeetingError) as raised:
        a_round.meeting(1, within_s=missed(0.2)).wait_for_all()
    assert raised.value.missing == [0, 2]
    assert str(raised.value).endswith(" s for all 3 ranks to have lunch: ranks 0, 2 have not. Ring the bell.")
    with pytest.raises(RoundMeetingError, match=r"^round 4: rank 0 waited .* have lunch: rank 2 has not\."):
        a_round.meeting(0, within_s=missed(0.2)).gather(b"")
    with pytest.raises(RoundMeetingError, match="ranks 2, 3, 4, 5, 6, 7, 8, 10 and 9 more have not"):
        a_round.meeting(9, world_size=20, within_s=missed(0.2)).wait_for_all()


def test_a_rank_0_that_has_come_and_gone_is_told_from_ranks_that_did_not_come(a_round: Round) -> None:
    waiting = [a_round.meeting(rank, within_s=missed(0.2)) for rank in (1, 2)]
    assert [each.gather(b"") for each in waiting] == [[], []]
    assert a_round.meeting(0).gather(b"") == [b""] * 3
    for each in waiting:
        with pytest.raises(RoundMeetingError, match="all have, but rank 0 has not published its decision") as raised:
            each.conclude(None)
        assert raised.value.missing == []


def test_a_store_that_is_gone_ends_the_wait_as_the_death_of_a_peer_does(a_round: Round) -> None:
    waiting = a_round.start(1, "wait_for_all")
    with pytest.raises(TimeoutError):
        waiting.result(missed(0.5))
    del a_round.stores
    with pytest.raises(RoundMeetingError, match=r"the round's store is gone\. Check that") as raised:
        waiting.result(LONG_S)
    assert is_collateral(raised.value, has_process_group=False)


@pytest.mark.parametrize("absent", [0, 2])
def test_all_hear_the_same_of_those_who_came_in_time(a_round: Round, absent: int) -> None:
    present = [rank for rank in range(3) if rank != absent]
    expected = {rank: b"%d" % rank for rank in present}
    meetings = {rank: a_round.meeting(rank, within_s=missed(0.5)) for rank in present}
    for rank in present:  # all have spoken before anybody waits
        meetings[rank]._say(expected[rank])
    found = [a_round.pool.submit(meetings[rank].hear, range(3), expected[rank], 0.2) for rank in present]
    assert [each.result(LONG_S) for each in found] == [expected, expected]
    assert a_round.meeting(absent).hear(range(3), b"late", 0.2) == expected


def test_who_is_not_asked_hears_as_well(a_round: Round) -> None:
    found = [a_round.start(rank, "hear", [1, 2], None if rank == 0 else b"%d" % rank, 0.2) for rank in range(3)]
    assert [each.result(LONG_S) for each in found] == [{1: b"1", 2: b"2"}] * 3


def test_an_elastic_loop_that_ended_names_the_ranks_that_did_not(
    a_round: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "MEET_WITHIN_S", 0.3)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(a_round.stores.port))
    actor, job = SimpleNamespace(rank=1, world_size=2), SimpleNamespace(name="train")
    worker: Any = SimpleNamespace(actor_info=actor, job_info=job, round=4)
    rounds: Any = None
    expected = r"rank 1 waited .* to end their elastic loops: rank 0 has not\. .*`unified stack train`"
    with pytest.raises(RoundMeetingError, match=expected):
        loop._Loop(ElasticState(), worker, rounds)._finish()
