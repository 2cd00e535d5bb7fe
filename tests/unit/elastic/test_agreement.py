"""Ranks of a new round agree on a step, and on who gives the state to whom."""

from hypothesis import given
from hypothesis import strategies as st

from unified.elastic.core.agreement import Holding, StepAgreement, agree


def whole(rank: int, step: int) -> Holding:
    return Holding(rank=rank, step=step, is_whole=True, reason="rank 2 died")


def test_the_newest_step_that_a_rank_has_whole_wins() -> None:
    torn = Holding(rank=3, step=7)
    found = agree([whole(0, 6), whole(1, 7), Holding(rank=2), torn])
    assert found == StepAgreement(step=7, sources={0: 1, 2: 1, 3: 1}, reason="rank 2 died")
    assert found.receivers(1) == [0, 2, 3]
    assert found.receivers(0) == []


def test_without_a_whole_replica_nobody_gives_any() -> None:
    assert agree([Holding(rank=0, step=9), Holding(rank=1)]) == StepAgreement(step=None)


def test_those_who_have_it_share_the_work() -> None:
    ranks = [whole(rank, 5) for rank in (0, 1, 4)] + [Holding(rank=rank) for rank in (2, 3, 5, 6)]
    assert agree(ranks).sources == {2: 0, 3: 1, 5: 4, 6: 0}


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=40))
def test_every_rank_ends_at_the_agreed_step(given_: list[tuple[int, bool]]) -> None:
    holdings = [Holding(rank=rank, step=step, is_whole=ok) for rank, (step, ok) in enumerate(given_)]
    found = agree(holdings)
    assert agree(holdings[::-1]) == found  # the order of what was read says nothing
    for each in holdings:
        has_it = each.is_whole and each.step == found.step
        assert (each.rank in found.sources) == (found.step is not None and not has_it)
    for source in found.sources.values():
        assert holdings[source].is_whole
        assert holdings[source].step == found.step
    assert sorted(found.sources) == sorted(rank for source in range(len(holdings)) for rank in found.receivers(source))
