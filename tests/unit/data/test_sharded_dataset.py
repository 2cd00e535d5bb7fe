"""How long a reader waits for the rest of an epoch."""

import math

from unified.data.sharded_dataset import WaitPolicy


def test_it_looks_often_at_first_and_then_seldom() -> None:
    policy = WaitPolicy(math.inf, 100.0)
    assert [policy.next_poll_s(100.0 + waited, 3) for waited in (0.0, 1.0, 10.0, 1e6)] == [0.05, 0.1, 1.0, 2.0]


def test_it_ends_when_no_shard_was_finished_for_too_long() -> None:
    policy = WaitPolicy(5.0, 0.0)
    assert policy.next_poll_s(0.0, 3) is not None
    assert policy.next_poll_s(4.9, 2) is not None
    assert policy.next_poll_s(9.8, 2) is not None, "one was finished 4.9 s ago"
    assert policy.next_poll_s(9.9, 2) is None


def test_it_looks_once_more_at_the_very_end() -> None:
    policy = WaitPolicy(1.0, 0.0)
    policy.next_poll_s(0.0, 3)
    assert policy.next_poll_s(0.75, 3) == 0.075
    assert policy.next_poll_s(0.96875, 3) == 0.03125
