"""The time of a recovery, and its cost in steps, from what ranks have written."""

from benchmarks.recovery.run import recovered
from benchmarks.recovery.work import Step

KILLED_AT = 10.0
VICTIM = 101


def steps(*told: tuple[float, int, int, int, int]) -> list[Step]:
    return [Step(*each) for each in told]


def test_a_recovery_ends_with_the_last_rank_of_the_first_whole_step() -> None:
    before = steps((9.8, 7, 0, 100, 2), (9.9, 7, 1, VICTIM, 2), (10.001, 8, 0, 100, 2))
    alone = steps((10.2, 9, 0, 100, 1))
    after = steps((10.5, 10, 1, 201, 2), (10.6, 10, 0, 100, 2), (10.7, 11, 0, 100, 2))
    assert recovered(before + alone, KILLED_AT, VICTIM, 2) == {}
    assert recovered(before + alone + after[:1], KILLED_AT, VICTIM, 2) == {}
    found = recovered(before + alone + after, KILLED_AT, VICTIM, 2)
    assert {rank: step.at for rank, step in found.items()} == {1: 10.5, 0: 10.6}


def test_ranks_that_go_back_are_taken_from_where_they_went_back_to() -> None:
    before = steps((9.8, 7, 0, 100, 2), (9.9, 7, 1, VICTIM, 2), (10.001, 8, 0, 100, 2))
    after = steps((10.5, 6, 0, 200, 2), (10.6, 6, 1, 201, 2))
    found = recovered(before + after, KILLED_AT, VICTIM, 2)
    assert {rank: step.step for rank, step in found.items()} == {0: 6, 1: 6}
