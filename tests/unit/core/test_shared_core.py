"""The decisions that daemons share: transition tables, timers, leases, back-off."""

import random
from enum import StrEnum

import pytest

from unified.core.backoff import Backoff
from unified.core.lease import LeaseTable
from unified.core.timers import TimerTable
from unified.errors import InvariantError
from unified.protocol.records import JOB_MOVES, NODE_MOVES, WORKER_MOVES, TransitionTable
from unified_master.core.membership import MEMBERSHIP_MOVES


class Lamp(StrEnum):
    OFF = "OFF"
    ON = "ON"
    BROKEN = "BROKEN"


LAMP = TransitionTable("lamp", {Lamp.OFF: (Lamp.ON,), Lamp.ON: (Lamp.OFF, Lamp.BROKEN), Lamp.BROKEN: ()})


def test_a_legal_move_returns_the_new_state() -> None:
    assert LAMP.check("desk", Lamp.OFF, Lamp.ON) is Lamp.ON


def test_an_illegal_move_names_who_and_what_is_legal() -> None:
    with pytest.raises(InvariantError, match=r"lamp desk cannot go from OFF to BROKEN; from OFF it may become ON\."):
        LAMP.check("desk", Lamp.OFF, Lamp.BROKEN)
    with pytest.raises(InvariantError, match="nothing: it is final"):
        LAMP.check("desk", Lamp.BROKEN, Lamp.ON)


def test_a_table_draws_itself() -> None:
    found = LAMP.mermaid().splitlines()
    assert found == ["stateDiagram-v2", "    OFF --> ON", "    ON --> OFF", "    ON --> BROKEN", "    BROKEN --> [*]"]


@pytest.mark.parametrize("table", [JOB_MOVES, MEMBERSHIP_MOVES, WORKER_MOVES, NODE_MOVES], ids=lambda table: table.what)
def test_every_state_of_our_tables_is_listed_and_reachable(table: TransitionTable[StrEnum]) -> None:
    states = list(table.moves)
    assert set(type(states[0])) == set(states)
    reached = {states[0]}
    while new := {move for state in reached for move in table.moves[state]} - reached:
        reached |= new
    assert reached == set(states)


def test_timers_fire_in_order_of_deadline_then_of_arming() -> None:
    timers: TimerTable[object] = TimerTable()
    timers.arm("late", 5.0)
    keys = ["b", "a", ("a", 1), 3]  # which have no order among them
    for key in keys:
        timers.arm(key, 2.0)
    assert timers.next_deadline == 2.0
    assert timers.due(1.9) == []
    assert timers.due(2.0) == keys
    assert timers.due(9.0) == ["late"]
    assert timers.next_deadline is None


def test_arming_a_timer_again_moves_it_and_cancelling_forgets_it() -> None:
    timers: TimerTable[str] = TimerTable()
    timers.arm("x", 1.0)
    timers.arm("x", 3.0)
    timers.arm("y", 2.0)
    timers.cancel("y")
    timers.cancel("never armed")
    assert ("x" in timers, "y" in timers, "never armed" in timers) == (True, False, False)
    assert timers.due(2.5) == []
    assert timers.due(3.0) == ["x"]


def test_a_lease_lives_while_it_is_renewed() -> None:
    leases: LeaseTable[str] = LeaseTable(5.0)
    leases.renew("n1", 0.0)
    leases.renew("n2", 0.0)
    leases.renew("n1", 4.0)
    assert leases.expired(4.9) == []
    assert leases.expired(5.0) == ["n2"]
    assert leases.deadline("n2") is None
    assert leases.deadline("n1") == 9.0
    assert leases.expired(9.0) == ["n1"]
    assert leases.next_check is None


def test_a_shorter_lease_replaces_a_longer_one() -> None:
    leases: LeaseTable[str] = LeaseTable(5.0)
    leases.renew("n1", 0.0, lease_s=60.0)
    leases.renew("n1", 1.0)
    assert leases.next_check == 6.0
    assert leases.expired(6.0) == ["n1"]
    assert leases.next_check is None


def test_leases_agree_with_a_plain_model() -> None:
    rng = random.Random(7)
    leases: LeaseTable[int] = LeaseTable(5.0)
    model: dict[int, float] = {}
    now = 0.0
    for _ in range(5000):
        now += rng.random()
        key = rng.randrange(20)
        if rng.random() < 0.8:
            leases.renew(key, now)
            model[key] = now + 5.0
        else:
            leases.drop(key)
            model.pop(key, None)
        due = {key for key, deadline in model.items() if deadline <= now}
        assert set(leases.expired(now)) == due
        for key in due:
            del model[key]
        assert all(leases.deadline(key) == deadline for key, deadline in model.items())
        assert model == {} or (leases.next_check or 1e9) <= min(model.values())


def test_back_off_doubles_up_to_its_limit() -> None:
    assert [Backoff().delay_s(n) for n in range(9)] == [0, 0.5, 1, 2, 4, 8, 16, 30, 30]
    assert Backoff().delay_s(10_000) == 30
    assert [Backoff(first_s=0.1, num_free=0, limit_s=0.3).delay_s(n) for n in range(3)] == [0.1, 0.2, 0.3]


def test_back_off_is_spread_over_its_upper_half() -> None:
    waits = [Backoff().delay_s(9, random.Random(seed)) for seed in range(200)]
    assert all(15 <= wait <= 30 for wait in waits)
    assert len({round(wait) for wait in waits}) == 16
    assert Backoff().delay_s(0, random.Random(1)) == 0
    assert Backoff().delay_s(9, random.Random(1)) == Backoff().delay_s(9, random.Random(1))
