"""Looking again and again before going to sleep: only while it pays."""

import time
from collections.abc import Iterator

from unified.bus.transport.unix_connection import SPIN_S, Spin


def tries(spin: Spin, outcomes: Iterator[bool] | list[bool]) -> list[bool]:
    """For each wait: whether it was looked; if so, the next outcome is noted."""
    looked = []
    for outcome in outcomes:
        looked.append(spin.is_worth_it())
        if looked[-1]:
            spin.note(outcome)
    return looked


def test_it_goes_on_while_it_pays() -> None:
    assert all(tries(Spin(2), [True] * 100))
    assert all(tries(Spin(2), [False, True] * 100)), "one success makes up for what failed before it"


def test_what_does_not_pay_is_tried_ever_more_rarely_but_never_given_up() -> None:
    spin = Spin(2)
    looked = tries(spin, [False] * 10_000)
    assert all(looked[:4])
    assert not any(looked[4:6])
    assert 10_000 / 80 < sum(looked) < 10_000 / 50
    assert any(looked[-70:])
    while not spin.is_worth_it():
        pass
    spin.note(True)
    assert all(tries(spin, [True] * 100)), "once it pays again it is done each time"


def test_one_core_is_left_to_the_other_side() -> None:
    assert not any(tries(Spin(1), [True] * 100))


def test_looking_ends_with_what_is_found_or_with_its_time() -> None:
    asked: list[int] = []

    def third_time(timeout: int) -> list[int]:
        asked.append(timeout)
        return [7] if len(asked) == 3 else []

    assert Spin(2).look(third_time) == [7]
    assert asked == [0, 0, 0]
    began = time.perf_counter()
    assert Spin(2).look(lambda timeout: []) == []
    assert time.perf_counter() - began >= SPIN_S
