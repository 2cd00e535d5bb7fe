"""The names that a worker claims: answers to its claims, limits."""

from __future__ import annotations

import pytest

from unified.errors import UsageError
from unified.protocol.records import DirectoryEntry, Inbox, NameClaims, NameRefusal, Reachability
from unified.worker.names import ClaimTable

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
def table() -> ClaimTable:
    return ClaimTable("a", 0)


def test_a_claim_is_granted_by_the_answer_to_it(table: ClaimTable) -> None:
    claim = table.claim("x")
    assert table.claims == NameClaims(number=1, names={"x": 1})
    assert not claim.is_answered
    table.answer(entry("a", names={"x": 1}, revision=1))
    assert claim.is_granted
    assert table.claim("x") is claim, "it stands"
    assert table.claims.number == 1


def test_a_refused_claim_is_withdrawn_and_can_be_made_anew(table: ClaimTable) -> None:
    claim = table.claim("x")
    table.answer(entry("a", refused={"x": no(1)}, revision=1))
    assert (claim.is_granted, claim.refusal) == (False, "it is held by worker b")
    assert table.claims == NameClaims(number=2)
    again = table.claim("x")
    assert table.claims == NameClaims(number=3, names={"x": 3})
    table.answer(entry("a", refused={"x": no(1)}, names={"y": 9}, revision=2))
    assert not again.is_answered, "the answer was to the first claim"
    table.answer(entry("a", names={"x": 3}, revision=3))
    assert again.is_granted


def test_an_old_grant_is_no_answer_to_a_new_claim(table: ClaimTable) -> None:
    table.claim("x")
    table.answer(entry("a", names={"x": 1}, revision=1))
    assert table.withdraw("x")
    claim = table.claim("x")
    table.answer(entry("a", names={"x": 1, "y": 9}, revision=2))
    assert not claim.is_answered
    table.answer(entry("a", refused={"x": no(3)}, revision=3))
    assert claim.refusal


def test_what_is_said_of_another_life_is_no_answer() -> None:
    table = ClaimTable("a", 1)
    claim = table.claim("x")
    table.answer(entry("a", 0, names={"x": 1}, revision=1))
    table.answer(entry("a", 0, DEAD))
    assert not claim.is_answered


def test_withdrawal_says_why_to_whoever_waits(table: ClaimTable) -> None:
    claim = table.claim("x")
    assert table.withdraw("x", "no more need")
    assert claim.refusal == "no more need"
    assert not table.withdraw("x")
    assert table.claims == NameClaims(number=2)


@pytest.mark.parametrize("state", [DEAD, ENDED])
def test_a_life_that_the_master_has_ended_gets_no_name(table: ClaimTable, state: Reachability) -> None:
    claim = table.claim("x")
    table.answer(entry("a", 0, state))
    assert "has ended life 0" in claim.refusal
    assert "has ended life 0" in table.claim("y").refusal


def test_a_life_whose_place_was_taken_gets_no_name(table: ClaimTable) -> None:
    claim = table.claim("x")
    table.answer(entry("a", 1))
    assert claim.refusal == "the master has ended life 0 of this worker (life 1 took its place)"


# Limits


def test_a_name_has_1_to_200_characters(table: ClaimTable) -> None:
    table.claim("é" * 200)
    with pytest.raises(
        UsageError, match=r"worker a cannot claim the name 'éé.*…: a name has 1 to 200 .*, this one 201"
    ):
        table.claim("é" * 201)
    with pytest.raises(UsageError, match="this one 0"):
        table.claim("")
    assert table.claims.number == 1


def test_a_worker_has_at_most_1000_names(table: ClaimTable) -> None:
    for number in range(1000):
        table.claim(str(number))
    assert table.claim("5").number == 6, "it has that one already"
    with pytest.raises(UsageError, match="it has 1000 already"):
        table.claim("x")
    table.withdraw("5")
    assert table.claim("x")
