"""Names as one worker knows them: news in any order, answers to its own claims, limits."""

from __future__ import annotations

import itertools
import random

import pytest

from unified.bus.directory import Directory, LifeBegan
from unified.errors import UsageError
from unified.protocol.records import DirectoryEntry, Inbox, NameClaims, NameRefusal, Reachability, WorkerIncarnation
from unified.worker.names import NameChanged, NameTable

ALIVE, DEAD, ENDED = Reachability.ALIVE, Reachability.DEAD, Reachability.ENDED


def entry(
    worker: str,
    incarnation: int = 0,
    state: Reachability = ALIVE,
    *,
    names: dict[str, int] | None = None,
    refused: dict[str, NameRefusal] | None = None,
    revision: int = 0,
) -> DirectoryEntry:
    return DirectoryEntry(
        worker=worker,
        incarnation=incarnation,
        state=state,
        inbox=Inbox(inbox_id=f"{worker}{incarnation}") if state is ALIVE else None,
        names=names or {},
        refused=refused or {},
        revision=revision,
    )


def no(number: int, holder: str = "b") -> NameRefusal:
    return NameRefusal(number=number, holder=holder)


@pytest.fixture
def table() -> NameTable:
    return NameTable("a", 0)


# What others hold


def test_a_holder_comes_and_goes_with_its_life(table: NameTable) -> None:
    assert table.holder("x") is None
    assert table.learn([entry("b", names={"x": 1}, revision=1)]) == [NameChanged("x", WorkerIncarnation("b", 0))]
    assert table.learn([entry("b", 0, DEAD, revision=1)]) == [NameChanged("x", None)]
    assert table.learn([entry("b", 1, names={"x": 1}, revision=1)]) == [NameChanged("x", WorkerIncarnation("b", 1))]
    assert table.holder("x") == ("b", 1)


def test_the_next_life_does_not_inherit(table: NameTable) -> None:
    table.learn([entry("b", names={"x": 1, "y": 2}, revision=2)])
    changes = table.learn([entry("b", 1, names={"y": 1}, revision=1)])
    assert set(changes) == {NameChanged("x", None), NameChanged("y", WorkerIncarnation("b", 1))}


def test_a_name_that_passes_on_is_one_change(table: NameTable) -> None:
    table.learn([entry("b", names={"x": 1}, revision=1)])
    released, claimed = entry("b", revision=2), entry("c", names={"x": 1}, revision=1)
    assert table.learn([claimed, released]) == [NameChanged("x", WorkerIncarnation("c", 0))]


def test_what_is_told_again_or_late_changes_nothing(table: NameTable) -> None:
    first, second = entry("b", names={"x": 1}, revision=1), entry("b", names={"y": 2}, revision=2)
    table.learn([first, second])
    assert table.learn([second, first]) == []
    assert (table.holder("x"), table.holder("y")) == (None, WorkerIncarnation("b", 0))


LIFE = [
    entry("b"),
    entry("b", names={"x": 1}, revision=1),
    entry("b", names={"y": 2}, revision=2),
    entry("b", 0, DEAD, revision=2),
    entry("b", 1, names={"x": 1}, revision=1),
    entry("b", 1, ENDED, revision=1),
]


@pytest.mark.parametrize("last", range(len(LIFE)))
def test_any_order_of_news_leads_to_the_same_names(last: int) -> None:
    expected = NameTable("a", 0)
    expected.learn(LIFE[last : last + 1])
    for order in itertools.permutations(LIFE[: last + 1]):
        table = NameTable("a", 0)
        for one in order:
            table.learn([one])
        assert [table.holder(name) for name in "xy"] == [expected.holder(name) for name in "xy"]


@pytest.mark.parametrize("seed", range(20))
def test_the_changes_add_up_to_the_state(seed: int) -> None:
    """Two workers hand names to and fro; whoever follows the changes knows what `holder` says."""
    rng = random.Random(seed)
    table = NameTable("a", 0)
    followed: dict[str, WorkerIncarnation | None] = {}
    revisions = {"b": 0, "c": 0}
    held: dict[str, dict[str, int]] = {"b": {}, "c": {}}
    for _ in range(200):
        worker, other = rng.sample(["b", "c"], 2)
        held[worker] = {name: 1 for name in "vwxyz" if rng.random() < 0.5 and name not in held[other]}
        revisions[worker] += 1
        news = entry(worker, names=held[worker], revision=revisions[worker])
        for change in table.learn([news] * rng.randint(1, 2)):
            assert followed.get(change.name) != change.holder
            followed[change.name] = change.holder
    for name in "vwxyz":
        holder = next((WorkerIncarnation(worker, 0) for worker in held if name in held[worker]), None)
        assert table.holder(name) == followed.get(name) == holder


def test_names_do_not_disturb_the_directory_of_the_bus() -> None:
    directory = Directory()
    (began,) = directory.merge([entry("b")])
    assert isinstance(began, LifeBegan)
    assert directory.merge([entry("b", names={"x": 1}, revision=1)]) == []
    assert directory.inbox("b0") is not None


# Its own claims


def test_a_claim_is_granted_by_the_answer_to_it(table: NameTable) -> None:
    claim = table.claim("x")
    assert table.claims == NameClaims(number=1, names={"x": 1})
    assert not claim.is_answered
    table.learn([entry("a", names={"x": 1}, revision=1)])
    assert claim.is_granted
    assert table.holder("x") == ("a", 0)
    assert table.claim("x") is claim, "it stands"
    assert table.claims.number == 1


def test_a_refused_claim_is_withdrawn_and_can_be_made_anew(table: NameTable) -> None:
    claim = table.claim("x")
    table.learn([entry("a", refused={"x": no(1)}, revision=1)])
    assert (claim.is_granted, claim.refusal) == (False, "it is held by worker b")
    assert table.claims == NameClaims(number=2)
    again = table.claim("x")
    assert table.claims == NameClaims(number=3, names={"x": 3})
    table.learn([entry("a", refused={"x": no(1)}, names={"y": 9}, revision=2)])
    assert not again.is_answered, "the answer was to the first claim"
    table.learn([entry("a", names={"x": 3}, revision=3)])
    assert again.is_granted


def test_an_old_grant_is_no_answer_to_a_new_claim(table: NameTable) -> None:
    table.claim("x")
    table.learn([entry("a", names={"x": 1}, revision=1)])
    assert table.withdraw("x")
    claim = table.claim("x")
    table.learn([entry("a", names={"x": 1, "y": 9}, revision=2)])
    assert not claim.is_answered
    table.learn([entry("a", refused={"x": no(3)}, revision=3)])
    assert claim.refusal


def test_what_is_said_of_another_life_is_no_answer() -> None:
    table = NameTable("a", 1)
    claim = table.claim("x")
    table.learn([entry("a", 0, names={"x": 1}, revision=1), entry("a", 0, DEAD)])
    assert not claim.is_answered
    table.learn([entry("b", names={"x": 1}, revision=1)])
    assert not claim.is_answered


def test_withdrawal_says_why_to_whoever_waits(table: NameTable) -> None:
    claim = table.claim("x")
    assert table.withdraw("x", "no more need")
    assert claim.refusal == "no more need"
    assert not table.withdraw("x")
    assert table.claims == NameClaims(number=2)


@pytest.mark.parametrize("state", [DEAD, ENDED])
def test_a_life_that_the_master_has_ended_gets_no_name(table: NameTable, state: Reachability) -> None:
    claim = table.claim("x")
    table.learn([entry("a", 0, state)])
    assert "has ended life 0" in claim.refusal
    assert "has ended life 0" in table.claim("y").refusal


# Limits


def test_a_name_has_1_to_200_characters(table: NameTable) -> None:
    table.claim("é" * 200)
    with pytest.raises(
        UsageError, match=r"worker a cannot claim the name 'éé.*…: a name has 1 to 200 .*, this one 201"
    ):
        table.claim("é" * 201)
    with pytest.raises(UsageError, match="this one 0"):
        table.claim("")
    assert table.claims.number == 1


def test_a_worker_has_at_most_1000_names(table: NameTable) -> None:
    for number in range(1000):
        table.claim(str(number))
    assert table.claim("5").number == 6, "it has that one already"
    with pytest.raises(UsageError, match="it has 1000 already"):
        table.claim("x")
    table.withdraw("5")
    assert table.claim("x")
