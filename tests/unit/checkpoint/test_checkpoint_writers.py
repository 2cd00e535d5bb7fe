"""Who may write a step that is there already."""

from __future__ import annotations

import pytest

from unified.checkpoint.location import Resolution, WriterIdentity, resolve
from unified.checkpoint.manifest import Manifest
from unified.checkpoint.retention import SaveHistory

US = WriterIdentity(name="us", rank=1, world_size=2)


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
    existing: Manifest | None, is_older: bool, expected: Resolution
) -> None:
    assert resolve(existing, US, is_older=is_older) == expected


def test_a_life_keeps_what_it_saved_last_in_the_order_of_its_saves() -> None:
    history = SaveHistory()
    assert [history.saved(step, 2) for step in (9, 3, 4, 3)] == [[9], [9, 3], [3, 4], [4, 3]]
    history.rolled_back(3)
    assert history.saved(5, 2) == [3, 5]
    assert history.saved(6, None) == [6], "all stay, and nothing needs to be kept in mind"
