"""The verdict on ranks that stand still: thousands of random rounds, of which it is known who is to blame."""

import random

import pytest
from msgspec import structs

from unified.core.hangs.verdict import judge, ranks_text
from unified.protocol.stacks import Collective, GroupCollectives, WorkerStacks

OPERATIONS = ("all_reduce", "broadcast", "all_gather")


def worker(rank: int, *groups: GroupCollectives, is_silent: bool = False) -> WorkerStacks:
    return WorkerStacks(
        worker=f"t_8-{rank}_8-{rank}",
        incarnation=0,
        rank=rank,
        source="none" if is_silent else "interpreter",
        note="its process was stopped" if is_silent else "",
        groups=None if is_silent else list(groups),
    )


def group(name: str, ranks: list[int], entered: int, *, waits: bool, operation: str = "all_reduce") -> GroupCollectives:
    recent = [Collective(number=entered, operation=operation, age_s=7.2, is_done=not waits)] if entered else []
    return GroupCollectives(group=name, ranks=ranks, entered=entered, recent=recent)


def culprits(workers: list[WorkerStacks]) -> list[int]:
    return sorted(worker.rank for worker in judge(workers).culprits)


def test_who_did_not_enter_is_named() -> None:
    everyone = [0, 1, 2, 3]
    workers = [worker(rank, group("0", everyone, 4, waits=True)) for rank in (0, 2, 3)]
    workers.append(worker(1, group("0", everyone, 3, waits=False)))
    verdict = judge(workers)
    assert verdict.findings == ["rank 1 never entered all_reduce 4 (ranks 0, 2, 3 have waited in it for 7 s)"]
    assert culprits(workers) == [1]


@pytest.mark.parametrize("seed", range(10))
def test_of_any_group_those_that_lag_are_to_blame(seed: int) -> None:
    for draw in (random.Random(f"{seed}-{number}") for number in range(200)):
        size = draw.randint(2, 12)
        everyone = list(range(size))
        lagging = set(draw.sample(everyone, draw.randint(0, size - 1)))
        number = draw.randint(1, 50)
        operation = draw.choice(OPERATIONS)
        workers = [
            worker(
                rank, group("0", everyone, number - (rank in lagging), waits=rank not in lagging, operation=operation)
            )
            for rank in everyone
        ]
        draw.shuffle(workers)
        verdict = judge(workers)
        assert culprits(workers) == sorted(lagging)
        assert len(verdict.findings) == 1
        assert ("never entered" in verdict.findings[0]) == bool(lagging)
        assert f"{operation} {number}" in verdict.findings[0]


@pytest.mark.parametrize("seed", range(10))
def test_in_a_mesh_the_one_that_waits_for_nobody_is_to_blame(seed: int) -> None:
    """One rank of a mesh sleeps; its row waits for it, and then each column for its member of that row."""
    for draw in (random.Random(f"{seed}-{number}") for number in range(200)):
        width, height = draw.randint(2, 4), draw.randint(2, 4)
        asleep = draw.randrange(width * height)
        row_of_sleeper = asleep // width
        workers = []
        for rank in range(width * height):
            row, column = rank // width, rank % width
            in_row = list(range(row * width, (row + 1) * width))
            in_column = list(range(column, width * height, width))
            if rank == asleep:
                found = [group(f"r{row}", in_row, 4, waits=False), group(f"c{column}", in_column, 4, waits=False)]
            elif row == row_of_sleeper:
                found = [group(f"r{row}", in_row, 5, waits=True), group(f"c{column}", in_column, 4, waits=False)]
            else:
                found = [group(f"r{row}", in_row, 5, waits=False), group(f"c{column}", in_column, 5, waits=True)]
            workers.append(worker(rank, *found))
        draw.shuffle(workers)
        assert culprits(workers) == [asleep]


def test_a_rank_that_does_not_answer_is_suspected() -> None:
    everyone = [0, 1, 2]
    workers = [worker(rank, group("0", everyone, 9, waits=True)) for rank in (0, 1)] + [worker(2, is_silent=True)]
    verdict = judge(workers)
    assert verdict.findings == [
        "ranks 0, 1 have waited in all_reduce 9 for 7 s; whether rank 2 entered it is not known",
        "rank 2 did not answer: its process was stopped",
    ]
    assert culprits(workers) == [2]


def test_who_cleans_up_after_a_failure_is_to_blame_wherever_its_peers_are() -> None:
    everyone = [0, 1, 2]
    failed = structs.replace(
        worker(1, group("0", everyone, 9, waits=True, operation="barrier")), handles="ValueError: x"
    )
    peers = [worker(rank, group("0", everyone, 9, waits=True)) for rank in (0, 2)]
    verdict = judge([*peers, failed])
    assert verdict.culprits == [failed]
    assert verdict.findings[0].startswith("rank 1 failed with ValueError: x, and cleaned up in ")
    asleep = [worker(rank, group("0", everyone, 8, waits=False)) for rank in (0, 2)]
    assert judge([*asleep, failed]) == (
        ["rank 1 failed with ValueError: x, and cleaned up in barrier 9, which ranks 0, 2 never entered (rank 1 has "
         "waited in it for 7 s)"], [failed])  # fmt: skip


def test_programs_that_run_in_a_handler_on_every_rank_accuse_nobody() -> None:
    """As after ``except ImportError:``, in which all that follows is called."""
    workers = [worker(0, group("0", [0, 1], 4, waits=True)), worker(1, group("0", [0, 1], 3, waits=False))]
    handling = [structs.replace(each, handles="ImportError: x") for each in workers]
    assert culprits(handling) == [1]


def test_who_has_ended_is_told() -> None:
    ended = structs.replace(worker(1, group("0", [0, 1], 29, waits=False)), has_ended=True)
    verdict = judge([worker(0, group("0", [0, 1], 30, waits=True)), ended])
    assert verdict == (
        ["rank 1 never entered all_reduce 30; the program of rank 1 had ended after 29 collectives (rank 0 has waited "
         "in it for 7 s)"], [ended])  # fmt: skip


def test_different_collectives_are_told_apart() -> None:
    everyone = [0, 1, 2]
    workers = [worker(rank, group("0", everyone, 9, waits=True)) for rank in (0, 2)]
    workers.append(worker(1, group("0", everyone, 9, waits=True, operation="broadcast")))
    verdict = judge(workers)
    assert verdict.findings == [
        "ranks 0, 2 are in all_reduce 9 and rank 1 is in broadcast 9: they have called different collectives"
    ]
    assert culprits(workers) == [1]


def test_who_waits_in_an_earlier_group_that_nobody_else_entered() -> None:
    """Two ranks that call two groups' collectives in another order wait for each other: both are to blame."""
    everyone = [0, 1]
    workers = [
        worker(0, group("0", everyone, 5, waits=True), group("1", everyone, 2, waits=False)),
        worker(1, group("0", everyone, 4, waits=False), group("1", everyone, 3, waits=True)),
    ]
    assert culprits(workers) == [0, 1]


def test_a_group_that_the_recorder_has_forgotten_accuses_nobody() -> None:
    cut = WorkerStacks(worker="t_2-1_2-1", incarnation=0, rank=1, source="interpreter", groups=[], is_cut=True)
    workers = [worker(0, group("1", [0, 1], 2, waits=True)), cut]
    assert judge(workers).culprits == []


def test_nothing_is_found_where_nobody_waits() -> None:
    workers = [worker(rank, group("0", [0, 1], 4, waits=False)) for rank in (0, 1)] + [worker(2)]
    assert judge(workers) == ([], [])
    assert judge([]) == ([], [])


def test_ranks_are_shown_as_ranges() -> None:
    assert ranks_text([worker(rank) for rank in (7, 0, 1, 2, 9, 10)]) == "ranks 0-2, 7, 9, 10"
    assert ranks_text([worker(3)]) == "rank 3"
