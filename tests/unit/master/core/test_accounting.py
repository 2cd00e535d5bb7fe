"""Seconds of a job by phase: steps redone, stalls, recoveries, and the time until a first step."""

import random

import pytest

from unified.protocol.records import Phase, TimeSpent
from unified_master.core.accounting import Account


def begun(**more: float | str) -> Account:
    """An account of a job that was submitted at 100, got its place at 101, and was whole at 103."""
    account = Account(spent=TimeSpent(phase=Phase.WAITING, since=100.0))
    account.enter(101.0, Phase.STARTING, is_whole=False)
    account.enter(103.0, Phase.RECOVERING, is_whole=True)
    return account


def steps(account: Account, first: int, last: int, at: float, every_s: float) -> float:
    """Report these steps, the first at `at`; return the time of the last."""
    for step in range(first, last + 1):
        account.stepped(at + (step - first) * every_s, "trainer", step, is_last=False)
    return at + (last - first) * every_s


def seconds(account: Account, now: float) -> dict[str, float]:
    found = account.spent.at(now)
    assert sum(found.values()) == pytest.approx(now - 100.0)
    return {phase: round(value, 3) for phase, value in found.items()}


def test_a_job_without_steps_is_productive_while_all_run() -> None:
    account = begun()
    assert seconds(account, 203.0) == {"waiting": 1, "starting": 2, "productive": 100}
    account.enter(203.0, Phase.RECOVERING, is_whole=False)
    account.enter(205.0, Phase.RECOVERING, is_whole=True)
    account.enter(210.0, Phase.STOPPING, is_whole=False)
    account.enter(211.0, None, is_whole=False)
    whole = {"waiting": 1, "starting": 2, "productive": 105, "recovering": 2, "stopping": 1}
    assert seconds(account, 211.0) == whole
    assert account.spent.at(999.0) == account.spent.at(211.0), "it has ended"


def test_what_comes_before_the_first_step_is_a_part_of_the_start() -> None:
    account = begun()
    steps(account, 1, 11, 123.0, 2.0)  # 18 s to load a model, and 11 steps of 2 s
    assert seconds(account, 143.0) == {"waiting": 1, "starting": 20, "productive": 22}


def test_steps_that_were_reached_before_are_redone() -> None:
    account = begun()
    failed_at = steps(account, 1, 10, 105.0, 2.0) + 1  # at 124, in the midst of step 11
    account.enter(failed_at, Phase.RECOVERING, is_whole=False)
    account.enter(130.0, Phase.RECOVERING, is_whole=True)
    steps(account, 7, 12, 142.0, 2.0)  # from the checkpoint of step 6, which takes 10 s to load
    spent = {"waiting": 1, "starting": 2, "productive": 10 * 2 + 1 + 2 * 2, "redone": 4 * 2, "recovering": 16}
    assert seconds(account, 152.0) == spent


def test_a_report_that_spans_old_and_new_steps_is_divided() -> None:
    account = begun()
    for number in range(1, 6):
        account.stepped(103.0 + 10 * number, "trainer", 10 * number, is_last=False)
    account.enter(153.0, Phase.RECOVERING, is_whole=False)
    account.enter(154.0, Phase.RECOVERING, is_whole=True)
    account.stepped(164.0, "trainer", 45, is_last=False)
    account.stepped(174.0, "trainer", 55, is_last=False)  # half of these ten are new
    assert seconds(account, 174.0) == {"waiting": 1, "starting": 2, "productive": 55, "redone": 15, "recovering": 1}


def test_the_other_ranks_of_a_role_change_nothing() -> None:
    account, alone = begun(), begun()
    for step in range(1, 20):
        for rank in range(8):
            account.stepped(103.0 + step + rank * 0.01, "trainer", step, is_last=False)
        account.stepped(103.5 + step, "other", 1000 + step, is_last=False)
        alone.stepped(103.0 + step, "trainer", step, is_last=False)
    assert seconds(account, 123.0) == seconds(alone, 123.0)


def test_silence_is_a_stall_once_it_is_unusual() -> None:
    account = begun()
    last = steps(account, 1, 5, 104.0, 1.0)
    assert "stalled" not in seconds(account, last + 30)
    assert seconds(account, last + 100)["stalled"] == 70
    account.stepped(last + 100, "trainer", 6, is_last=False)
    assert seconds(account, last + 100)["stalled"] == 70
    assert seconds(account, last + 125)["stalled"] == 70, "the usual time has hardly changed"


def test_slower_steps_become_usual_and_the_last_one_ends_the_watch() -> None:
    account = begun()
    at = steps(account, 1, 3, 104.0, 1.0)
    at = steps(account, 4, 40, at + 60, 60.0)
    stalled = seconds(account, at)["stalled"]
    at = steps(account, 41, 60, at + 60, 60.0)
    assert seconds(account, at)["stalled"] == stalled
    account.stepped(at + 60, "trainer", 61, is_last=True)
    assert seconds(account, at + 5000)["stalled"] == stalled, "it saves what it has, say"


def test_a_suspected_hang_counts_from_its_last_progress() -> None:
    account = begun()
    last = steps(account, 1, 5, 104.0, 1.0)
    account.suspect(last + 2)
    assert account.spent.stalled_since(last + 10) == last + 2, "and its age counts from there"
    account.enter(last + 11, Phase.RECOVERING, is_whole=False)
    assert seconds(account, last + 11) == {"waiting": 1, "starting": 2, "productive": 7, "stalled": 9}
    account.enter(last + 12, Phase.RECOVERING, is_whole=True)
    account.stepped(last + 13, "trainer", 6, is_last=False)
    account.suspect(last + 13)
    account.goes_on(last + 51)
    assert account.spent.phase == Phase.PRODUCTIVE


def test_a_place_that_is_lost_is_waited_for_and_what_follows_is_a_start() -> None:
    account = begun()
    steps(account, 1, 5, 104.0, 1.0)
    account.enter(109.0, Phase.WAITING, is_whole=False)
    account.enter(119.0, Phase.STARTING, is_whole=False)
    account.enter(120.0, Phase.STARTING, is_whole=True)
    account.stepped(124.0, "trainer", 6, is_last=False)  # 3 s to load, and a step
    assert seconds(account, 124.0) == {"waiting": 11, "starting": 2 + 1 + 3, "productive": 7}


@pytest.mark.parametrize("seed", range(200))
def test_the_sum_is_the_wall_time_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    account, now = Account(spent=TimeSpent(phase=Phase.WAITING, since=100.0)), 100.0
    for _ in range(300):
        now += rng.choice((0.0, 0.01, 1.0, 7.0, 400.0))
        kind = rng.randrange(6)
        if kind == 0:
            phase = rng.choice((Phase.WAITING, Phase.STARTING, Phase.RECOVERING, Phase.STOPPING))
            account.enter(now, phase, is_whole=False)
        elif kind == 1:
            account.enter(now, Phase.RECOVERING, is_whole=True)
        elif kind == 2:
            account.suspect(now - rng.choice((0.0, 5.0, 1000.0)))
        elif kind == 3:
            account.goes_on(now)
        else:
            account.stepped(now, rng.choice(("a", "b")), rng.randrange(50), is_last=rng.random() < 0.05)
        assert min(seconds(account, now + rng.choice((0.0, 50.0))).values(), default=0.0) >= 0
