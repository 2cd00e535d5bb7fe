"""Entries merge in any order; what changes is told once: incarnations, and who holds which name."""

import itertools
import random
from typing import Any

import pytest

from unified.core.directory import IncarnationDied, IncarnationStarted, NameMoved, WorkerDirectory, WorkerEnded
from unified.protocol.records import DirectoryEntry, Inbox, Reachability, WorkerIncarnation

ALIVE, DEAD, ENDED = Reachability.ALIVE, Reachability.DEAD, Reachability.ENDED


def entry(incarnation: int, state: Reachability, *, inbox: bool = True, reason: str = "") -> DirectoryEntry:
    there = Inbox(inbox_id=f"i{incarnation}") if inbox else None
    return DirectoryEntry(worker="w", incarnation=incarnation, state=state, inbox=there, reason=reason)


@pytest.fixture
def directory() -> WorkerDirectory:
    return WorkerDirectory()


def test_an_incarnation_begins_once(directory: WorkerDirectory) -> None:
    first = entry(0, ALIVE)
    assert directory.merge([first, first]) == [IncarnationStarted("w", 0, Inbox(inbox_id="i0"))]
    assert directory.reachable("w") == Inbox(inbox_id="i0")
    assert directory.inbox("i0") is not None


def test_an_incarnation_without_an_inbox_is_waited_for(directory: WorkerDirectory) -> None:
    assert directory.merge([entry(0, ALIVE, inbox=False)]) == []
    assert directory.reachable("w") is None
    assert "no inbox yet" in directory.why_waiting("w")
    assert len(directory.merge([entry(0, ALIVE)])) == 1


def test_higher_incarnation_ends_the_lower(directory: WorkerDirectory) -> None:
    directory.merge([entry(0, ALIVE)])
    changes = directory.merge([entry(1, ALIVE)])
    assert [type(change) for change in changes] == [IncarnationDied, IncarnationStarted]
    assert directory.inbox("i0") is None
    assert directory.merge([entry(0, ALIVE), entry(0, ENDED)]) == []


def test_incarnations_that_were_never_told_of_are_over_too(directory: WorkerDirectory) -> None:
    assert directory.newest_over("w") == -1
    assert directory.merge([entry(2, ALIVE)]) == [
        IncarnationDied("w", 1, "incarnation 2 took its place", "", None),
        IncarnationStarted("w", 2, Inbox(inbox_id="i2")),
    ]
    assert directory.merge([entry(2, DEAD, inbox=False)]) == [
        IncarnationDied("w", 2, "no reason given", "", Inbox(inbox_id="i2"))
    ]
    assert directory.merge([entry(3, ALIVE)]) == [IncarnationStarted("w", 3, Inbox(inbox_id="i3"))]
    assert directory.newest_over("w") == 2


def test_a_node_is_remembered_from_the_newest_incarnation(directory: WorkerDirectory) -> None:
    for node, number, state in [("n1", 0, ALIVE), ("n7", 1, ALIVE), ("n1", 0, DEAD), ("", 1, DEAD)]:
        directory.merge([DirectoryEntry(worker="w", incarnation=number, state=state, node=node)])
    assert directory.node("w") == "n7"
    assert directory.node("v") == ""


def test_entries_that_tell_something_new_are_passed_on(directory: WorkerDirectory) -> None:
    first, second = named("w", revision=1), named("w", names={"x": 1}, revision=2)
    assert directory.accept([first, first, second, first]) == [first, second]
    assert directory.entries == [second]


def test_ended_is_told_with_its_reason(directory: WorkerDirectory) -> None:
    directory.merge([entry(0, ALIVE)])
    ended, last = directory.merge([entry(0, ENDED, inbox=False, reason="job stopped")])
    assert isinstance(ended, IncarnationDied)
    assert ended.reason == "job stopped"
    assert isinstance(last, WorkerEnded)
    assert directory.is_ended("w")


def test_a_death_whose_birth_was_never_told_still_names_the_inbox() -> None:
    (ended,) = WorkerDirectory().merge([entry(0, DEAD)])
    assert isinstance(ended, IncarnationDied)
    assert ended.inbox == Inbox(inbox_id="i0")


def test_why_waiting_says_what_is_known(directory: WorkerDirectory) -> None:
    assert directory.why_waiting("w") == "it has not started yet"
    directory.merge([entry(3, DEAD, reason="killed by SIGKILL")])
    assert directory.why_waiting("w") == "its incarnation 3 ended (killed by SIGKILL) and the next has not begun"


NEWS = [entry(0, ALIVE), entry(0, DEAD, inbox=False), entry(1, ALIVE), entry(1, ENDED, inbox=False)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_any_order_of_news_leads_to_the_same_state(order: tuple[int, ...], directory: WorkerDirectory) -> None:
    for index in order:
        directory.merge([NEWS[index]])
    assert directory.get("w") == NEWS[3]
    assert directory.inbox("i0") is None
    assert directory.inbox("i1") is None


# Who holds which name


def named(worker: str, incarnation: int = 0, state: Reachability = ALIVE, **fields: Any) -> DirectoryEntry:
    inbox = Inbox(inbox_id=f"{worker}{incarnation}") if state is ALIVE else None
    return DirectoryEntry(worker=worker, incarnation=incarnation, state=state, inbox=inbox, **fields)


def moves(directory: WorkerDirectory, entries: list[DirectoryEntry]) -> list[NameMoved]:
    return [change for change in directory.merge(entries) if isinstance(change, NameMoved)]


def test_a_holder_comes_and_goes_with_its_incarnation(directory: WorkerDirectory) -> None:
    assert directory.holder("x") is None
    assert moves(directory, [named("b", names={"x": 1}, revision=1)]) == [NameMoved("x", WorkerIncarnation("b", 0))]
    assert moves(directory, [named("b", 0, DEAD, revision=1)]) == [NameMoved("x", None)]
    assert moves(directory, [named("b", 1, names={"x": 1}, revision=1)]) == [NameMoved("x", WorkerIncarnation("b", 1))]
    assert directory.holder("x") == ("b", 1)


def test_the_next_incarnation_does_not_inherit(directory: WorkerDirectory) -> None:
    moves(directory, [named("b", names={"x": 1, "y": 2}, revision=2)])
    changes = moves(directory, [named("b", 1, names={"y": 1}, revision=1)])
    assert set(changes) == {NameMoved("x", None), NameMoved("y", WorkerIncarnation("b", 1))}


def test_a_name_that_passes_on_is_one_change(directory: WorkerDirectory) -> None:
    moves(directory, [named("b", names={"x": 1}, revision=1)])
    released, claimed = named("b", revision=2), named("c", names={"x": 1}, revision=1)
    assert moves(directory, [claimed, released]) == [NameMoved("x", WorkerIncarnation("c", 0))]


def test_what_is_told_again_or_late_changes_nothing(directory: WorkerDirectory) -> None:
    first, second = named("b", names={"x": 1}, revision=1), named("b", names={"y": 2}, revision=2)
    moves(directory, [first, second])
    assert moves(directory, [second, first]) == []
    assert (directory.holder("x"), directory.holder("y")) == (None, WorkerIncarnation("b", 0))


HOLDER = [
    named("b"),
    named("b", names={"x": 1}, revision=1),
    named("b", names={"y": 2}, revision=2),
    named("b", 0, DEAD, revision=2),
    named("b", 1, names={"x": 1}, revision=1),
    named("b", 1, ENDED, revision=1),
]


@pytest.mark.parametrize("last", range(len(HOLDER)))
def test_any_order_of_news_leads_to_the_same_names(last: int) -> None:
    expected = WorkerDirectory()
    expected.merge(HOLDER[last : last + 1])
    for order in itertools.permutations(HOLDER[: last + 1]):
        directory = WorkerDirectory()
        for one in order:
            moves(directory, [one])
        assert [directory.holder(name) for name in "xy"] == [expected.holder(name) for name in "xy"]


@pytest.mark.parametrize("seed", range(20))
def test_the_changes_add_up_to_the_state(seed: int) -> None:
    """Two workers hand names to and fro; whoever follows the changes knows what `holder` says."""
    rng = random.Random(seed)
    directory = WorkerDirectory()
    followed: dict[str, WorkerIncarnation | None] = {}
    revisions = {"b": 0, "c": 0}
    held: dict[str, dict[str, int]] = {"b": {}, "c": {}}
    for _ in range(200):
        worker, other = rng.sample(["b", "c"], 2)
        held[worker] = {name: 1 for name in "vwxyz" if rng.random() < 0.5 and name not in held[other]}
        revisions[worker] += 1
        news = named(worker, names=held[worker], revision=revisions[worker])
        for change in moves(directory, [news] * rng.randint(1, 2)):
            assert followed.get(change.name) != change.holder
            followed[change.name] = change.holder
    for name in "vwxyz":
        holder = next((WorkerIncarnation(worker, 0) for worker in held if name in held[worker]), None)
        assert directory.holder(name) == followed.get(name) == holder


def test_names_say_nothing_of_incarnations(directory: WorkerDirectory) -> None:
    (began,) = directory.merge([named("b")])
    assert isinstance(began, IncarnationStarted)
    assert directory.merge([named("b", names={"x": 1}, revision=1)]) == [NameMoved("x", WorkerIncarnation("b", 0))]
    assert directory.inbox("b0") is not None
