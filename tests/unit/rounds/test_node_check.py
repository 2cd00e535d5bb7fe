"""Node checks: of random clusters with known faults, the nodes at fault are found and no other is accused."""

import random

import pytest

from unified.rounds.core.node_check import (
    CheckVerdict,
    DeviceMeasure,
    LinkAttempt,
    LinkMeasure,
    accused,
    broken_devices,
    first_pairs,
    judge,
    links_of_nodes,
    second_pairs,
)


def attempt(groups: list[list[int]], broken: set[int], slow: set[int] = frozenset()) -> LinkAttempt:  # type: ignore[assignment]
    """What nodes measure of which some break every collective that they are in, and some hold it up."""
    nodes = {node: node for group in groups for node in group}
    links = {
        node: LinkMeasure(error="timed out" if broken & set(group) else "", seconds=3.0 if slow & set(group) else 0.4)
        for group in groups
        for node in group
    }
    return LinkAttempt(groups, links_of_nodes(groups, nodes, links))


def check(number: int, broken: set[int], slow: set[int] = frozenset()) -> CheckVerdict:  # type: ignore[assignment]
    first = attempt(first_pairs(range(number)), broken, slow)
    second = attempt(second_pairs(range(number), first.groups, accused(first.links)), broken, slow)
    devices = {node: DeviceMeasure(node=node, matmul_s=0.1, copy_s=0.1) for node in range(number)}
    return judge(devices, first, second)


@pytest.mark.parametrize("seed", range(20))
def test_the_node_at_fault_is_found_and_no_other_is_accused(seed: int) -> None:
    for draw in (random.Random(f"{seed}-{number}") for number in range(200)):
        number = draw.randint(4, 30)
        broken = set(draw.sample(range(number), draw.randint(0, number // 4)))
        verdict = check(number, broken)
        assert set(verdict.faulty) <= broken, "an innocent node is excluded"
        assert set(verdict.faulty) | set(verdict.undecided) >= broken
        if len(broken) <= 1 or number > 4 * len(broken):
            assert (set(verdict.faulty), set(verdict.undecided)) == (broken, set()), (number, broken)
        assert verdict.is_good == (not broken)


@pytest.mark.parametrize("seed", range(20))
def test_groups_are_fit_to_be_measured_at_once(seed: int) -> None:
    for draw in (random.Random(f"{seed}-{number}") for number in range(100)):
        number = draw.randint(1, 30)
        first = first_pairs(range(number))
        assert sorted(node for group in first for node in group) == list(range(number - number % 2))
        bad = set(draw.sample(range(number), draw.randint(0, number)))
        second = second_pairs(range(number), first, bad)
        met = [node for group in second for node in group]
        assert len(met) == len(set(met)), "a node is in one group at a time"
        assert all(group not in first and group[::-1] not in first for group in second), "nobody meets the same again"


@pytest.mark.parametrize("number", [3, 5, 7])
def test_the_one_left_over_of_an_odd_number_meets_somebody(number: int) -> None:
    for broken in range(number):
        verdict = check(number, {broken})
        assert (set(verdict.faulty), set(verdict.undecided)) == ({broken}, set())


def test_two_nodes_cannot_be_told_apart() -> None:
    verdict = check(2, {1})
    assert verdict.faulty == {}
    assert set(verdict.undecided) == {0, 1}


@pytest.mark.parametrize("seed", range(10))
def test_a_slow_link_is_that_of_one_node(seed: int) -> None:
    for draw in (random.Random(f"{seed}-{number}") for number in range(100)):
        number = draw.randint(4, 30)
        slow = {draw.randrange(number)}
        verdict = check(number, set(), slow)
        assert verdict.is_good
        assert verdict.slow == {node: {"collective": 7.5} for node in slow}


def test_slow_devices_are_compared_with_the_median() -> None:
    devices = {rank: DeviceMeasure(node=rank // 2, matmul_s=0.2, copy_s=0.01) for rank in range(8)}
    devices[5] = DeviceMeasure(node=2, matmul_s=0.5, copy_s=0.03)
    assert judge(devices, LinkAttempt(), LinkAttempt()).slow == {2: {"matmul": 2.5}}, "20 ms more are noise"
    two = {0: DeviceMeasure(node=0, matmul_s=1.0), 1: DeviceMeasure(node=1, matmul_s=2.5)}
    assert judge(two, LinkAttempt(), LinkAttempt()).slow == {1: {"matmul": 2.5}}


def test_a_device_that_fails_or_does_not_answer_is_its_nodes() -> None:
    nodes = {0: 0, 1: 0, 2: 1, 3: 1, 4: 2}
    devices = {
        0: DeviceMeasure(node=0),
        1: DeviceMeasure(node=0, error="CUDA error: ECC"),
        2: DeviceMeasure(node=1),
        3: DeviceMeasure(node=1),
    }
    assert broken_devices(devices, nodes) == {
        0: "the device of rank 1: CUDA error: ECC",
        2: "rank 4 did not finish the check of its device in time",
    }


def test_a_rank_that_says_nothing_is_its_nodes_error() -> None:
    links = links_of_nodes([[0, 1]], {0: 0, 1: 0, 2: 1}, {0: LinkMeasure(seconds=1), 2: LinkMeasure(seconds=3)})
    assert links[0].error == "rank 1: no answer in time"
    assert links[1] == LinkMeasure(seconds=3)
