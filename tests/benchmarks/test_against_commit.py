"""How `benchmarks/against_commit/run.py` compares two sides that were measured in turns."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.against_commit.run import range_of_median, times


def test_a_slow_turn_of_both_sides_changes_no_ratio() -> None:
    assert times(here=[1.1, 11.0, 1.1], commit=[1.0, 10.0, 1.0]) == pytest.approx(1.1)


def test_the_range_has_the_ranks_of_the_tables() -> None:
    ratios = [float(number) for number in range(1, 41)]
    low, high = range_of_median(ratios, [1.0] * len(ratios))
    assert (low, high) == (14.0, 27.0), "ranks 14 and 27 of 40, by the binomial distribution"
    assert low < statistics.median(ratios) < high


def test_the_range_of_two_turns_is_all_that_was_seen() -> None:
    assert range_of_median([1.0, 3.0], [1.0, 1.0]) == (1.0, 3.0)
