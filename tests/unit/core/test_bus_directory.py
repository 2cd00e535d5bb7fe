"""Entries merge in any order; what changes is told once."""

from __future__ import annotations

import itertools

import pytest

from unified.bus.directory import Directory, LifeBegan, LifeEnded, WorkerEnded
from unified.protocol.records import DirectoryEntry, Inbox, Reachability

ALIVE, DEAD, ENDED = Reachability.ALIVE, Reachability.DEAD, Reachability.ENDED


def entry(incarnation: int, state: Reachability, *, inbox: bool = True, reason: str = "") -> DirectoryEntry:
    there = Inbox(inbox_id=f"i{incarnation}") if inbox else None
    return DirectoryEntry(worker="w", incarnation=incarnation, state=state, inbox=there, reason=reason)


def test_a_life_begins_once() -> None:
    directory = Directory()
    first = entry(0, ALIVE)
    assert directory.merge([first, first]) == [LifeBegan(first, Inbox(inbox_id="i0"))]
    assert directory.reachable("w") == Inbox(inbox_id="i0")
    assert directory.inbox("i0") is not None


def test_a_life_without_an_inbox_is_waited_for() -> None:
    directory = Directory()
    assert directory.merge([entry(0, ALIVE, inbox=False)]) == []
    assert directory.reachable("w") is None
    assert "no inbox yet" in directory.why_waiting("w")
    assert len(directory.merge([entry(0, ALIVE)])) == 1


def test_higher_incarnation_ends_the_lower() -> None:
    directory = Directory()
    directory.merge([entry(0, ALIVE)])
    changes = directory.merge([entry(1, ALIVE)])
    assert [type(change) for change in changes] == [LifeEnded, LifeBegan]
    assert directory.inbox("i0") is None
    assert directory.merge([entry(0, ALIVE), entry(0, ENDED)]) == []


def test_ended_is_told_with_its_reason() -> None:
    directory = Directory()
    directory.merge([entry(0, ALIVE)])
    ended, last = directory.merge([entry(0, ENDED, inbox=False, reason="job stopped")])
    assert isinstance(ended, LifeEnded)
    assert ended.reason == "job stopped"
    assert isinstance(last, WorkerEnded)
    assert directory.is_ended("w")


def test_a_death_whose_birth_was_never_told_still_names_the_inbox() -> None:
    (ended,) = Directory().merge([entry(0, DEAD)])
    assert isinstance(ended, LifeEnded)
    assert ended.old.inbox == Inbox(inbox_id="i0")


def test_why_waiting_says_what_is_known() -> None:
    directory = Directory()
    assert directory.why_waiting("w") == "it has not started yet"
    directory.merge([entry(3, DEAD, reason="killed by SIGKILL")])
    assert directory.why_waiting("w") == "its life 3 ended (killed by SIGKILL) and the next has not begun"


NEWS = [entry(0, ALIVE), entry(0, DEAD, inbox=False), entry(1, ALIVE), entry(1, ENDED, inbox=False)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_any_order_of_news_leads_to_the_same_state(order: tuple[int, ...]) -> None:
    directory = Directory()
    for index in order:
        directory.merge([NEWS[index]])
    assert directory.get("w") == NEWS[3]
    assert directory.inbox("i0") is None
    assert directory.inbox("i1") is None
