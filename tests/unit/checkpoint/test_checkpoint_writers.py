"""Who may write a step that is there already."""

from __future__ import annotations

import pytest

from unified.checkpoint.going_back import Course
from unified.checkpoint.location import Judgement, Writer, judge
from unified.checkpoint.manifest import Manifest

US = Writer(name="us", rank=1, world_size=2)


@pytest.mark.parametrize(
    ("existing", "is_older", "expected"),
    [
        (None, False, "write"),
        (Manifest(step=1, writer="us", rank=1, world_size=2), False, "write"),
        (Manifest(step=1, writer="peer", rank=0, world_size=2), False, "leave"),
        (Manifest(step=1, writer="peer", rank=0, world_size=2, saved_at=9e9), True, "write"),
        (Manifest(step=1, writer="other", rank=1, world_size=2), False, "refuse"),
        (Manifest(step=1, writer="other", rank=1, world_size=2, saved_at=9e9), True, "write"),
        (Manifest(step=1, writer="other", rank=0, world_size=4), False, "refuse"),
    ],
)
def test_what_was_there_at_the_first_look_is_replaced_whatever_the_clocks_say(
    existing: Manifest | None, is_older: bool, expected: Judgement
) -> None:
    assert judge(existing, US, is_older=is_older) == expected


def test_a_life_keeps_what_it_saved_last_in_the_order_of_its_saves() -> None:
    course = Course()
    assert [course.saved(step, 2) for step in (9, 3, 4, 3)] == [[9], [9, 3], [3, 4], [4, 3]]
    course.went_back_to(3)
    assert course.saved(5, 2) == [3, 5]
    assert course.saved(6, None) == [6], "all stay, and nothing needs to be kept in mind"


def test_each_remark_is_made_once() -> None:
    course = Course()
    course.saved(3, 2)
    others = [Manifest(step=3, writer="other"), Manifest(step=8, writer="old")]
    assert [remark.split()[:2] for remark in course.remarks(3, others)] == [
        ["event=checkpoint-below-latest", "step=3:"],
        ["event=checkpoint-replaced", "step=3:"],
    ]
    assert course.remarks(3, others) == []
