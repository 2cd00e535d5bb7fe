"""A permutation has every number once, looks random, and differs by seed."""

import itertools

import pytest

from unified.core.permutation import Permutation


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 65, 1000, 4097])
def test_a_permutation_has_every_number_once(size: int) -> None:
    order = Permutation(size, 7)
    assert len(order) == size
    assert sorted(order) == list(range(size))


def test_a_permutation_looks_random_and_differs_by_seed() -> None:
    size = 20_000
    order = list(Permutation(size, 1))
    steps = [abs(a - b) / size for a, b in itertools.pairwise(order)]
    assert 0.32 < sum(steps) / len(steps) < 0.347, "a third is the mean distance of two random numbers"
    halves = [sum(number < size / 2 for number in order[start : start + 1000]) for start in range(0, size, 1000)]
    assert all(400 < count < 600 for count in halves)
    other = list(Permutation(size, 2))
    assert sum(a == b for a, b in zip(order, other, strict=True)) < 20
