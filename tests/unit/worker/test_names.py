"""The names of a worker: claims, answers and limits, and threads that wait for them."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from unified.core.directory import WorkerDirectory
from unified.errors import RpcTimeoutError, UsageError
from unified.protocol.records import DirectoryEntry, Inbox, NameClaims, NameRefusal, Reachability, WorkerIncarnation
from unified.worker.names import ClaimTable, Names

ALIVE, DEAD, ENDED = Reachability.ALIVE, Reachability.DEAD, Reachability.ENDED


def entry(worker: str, incarnation: int = 0, state: Reachability = ALIVE, **fields: Any) -> DirectoryEntry:
    inbox = Inbox(inbox_id=f"{worker}{incarnation}") if state is ALIVE else None
    return DirectoryEntry(worker=worker, incarnation=incarnation, state=state, inbox=inbox, **fields)


def no(number: int, holder: str = "b") -> NameRefusal:
    return NameRefusal(number=number, holder=holder)


class Master:
    """Answers the claims of worker `a` as a master would, when it is told to."""

    def __init__(self) -> None:
        self.said: list[NameClaims] = []
        self.has_said = threading.Semaphore(0)
        self.others: dict[str, str] = {}
        """Worker by the name that it holds."""
        self.directory = WorkerDirectory()
        self.names = Names(job_id="job-1", worker="a", incarnation=0, directory=self.directory, say=self._hear)
        self._revision = 0

    def learn(self, *entries: DirectoryEntry) -> None:
        self.names.learn(self.directory.merge(entries))

    def _hear(self, claims: NameClaims) -> None:
        self.said.append(claims)
        self.has_said.release()

    def answer(self) -> None:
        claims = self.said[-1].names
        self._revision += 1
        granted = {name: number for name, number in claims.items() if name not in self.others}
        refused = {name: no(claims[name], self.others[name]) for name in claims.keys() - granted.keys()}
        self.learn(entry("a", names=granted, refused=refused, revision=self._revision))

    def hear_and_answer(self) -> None:
        assert self.has_said.acquire(timeout=10)
        self.answer()

    def tell_holder(self, name: str, worker: str, incarnation: int = 0) -> None:
        self.learn(entry(worker, incarnation, names={name: 1}, revision=1))


@pytest.fixture
def master() -> Master:
    return Master()


@pytest.fixture
def start() -> Iterator[Callable[..., Future[object]]]:
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


Start = Callable[..., "Future[object]"]


def test_claim_returns_once_it_is_granted(master: Master, start: Start) -> None:
    claiming = start(master.names.claim, "x", 10.0)
    master.hear_and_answer()
    claiming.result(10)
    assert master.names.holder("x") == WorkerIncarnation("a", 0)
    master.names.claim("x", 0.0)
    assert master.said == [NameClaims(number=1, names={"x": 1})]
    master.names.release("x")
    master.names.release("x")
    assert master.said[1:] == [NameClaims(number=2)]


def test_claim_of_a_held_name_says_who_has_it(master: Master, start: Start) -> None:
    master.others["x"] = "worker_2-1_1-0"
    claiming = start(master.names.claim, "x", 10.0)
    master.hear_and_answer()
    with pytest.raises(
        UsageError, match="worker a cannot claim the name 'x' in job job-1: it is held by worker worker_2-1_1-0"
    ):
        claiming.result(10)
    assert master.said[-1] == NameClaims(number=2), "the agent is told that it is withdrawn"


def test_claim_without_an_answer_is_withdrawn(master: Master) -> None:
    with pytest.raises(RpcTimeoutError, match=r"'x' in job job-1, had no answer within 0\.01 s, and gave up"):
        master.names.claim("x", 0.01)
    assert master.said == [NameClaims(number=1, names={"x": 1}), NameClaims(number=2)]


def test_two_threads_that_claim_one_name_share_the_answer(master: Master, start: Start) -> None:
    claiming = [start(master.names.claim, "x", 10.0) for _ in range(2)]
    assert master.has_said.acquire(timeout=10)
    with pytest.raises(RpcTimeoutError):
        master.names.claim("x", 0.05)  # a third gives up; the others' claim stands
    assert master.said == [NameClaims(number=1, names={"x": 1})]
    master.answer()
    for one in claiming:
        one.result(10)


def test_release_ends_a_claim_that_waits(master: Master, start: Start) -> None:
    claiming = start(master.names.claim, "x", 10.0)
    assert master.has_said.acquire(timeout=10)
    master.names.release("x")
    with pytest.raises(UsageError, match="it was released while its claim waited"):
        claiming.result(10)


def test_find_waits_for_a_holder(master: Master, start: Start) -> None:
    finding = start(master.names.find, "x")
    master.tell_holder("y", "c")
    assert not finding.done()
    master.tell_holder("x", "b")
    assert finding.result(10) == "b"
    assert master.names.find("x", 0.0) == "b"
    assert master.said == []


def test_find_says_how_long_it_waited(master: Master) -> None:
    with pytest.raises(RpcTimeoutError, match=r"waited 0\.01 s for the holder of the name 'x', and no living worker"):
        master.names.find("x", 0.01)


def test_watchers_hear_of_every_change_until_they_stop(master: Master, capsys: pytest.CaptureFixture[str]) -> None:
    heard: list[tuple[str, WorkerIncarnation | None]] = []

    def fail(name: str, holder: WorkerIncarnation | None) -> None:
        raise KeyError("not my day")

    master.names.on_change(fail)
    stop = master.names.on_change(lambda name, holder: heard.append((name, holder)))
    master.tell_holder("x", "b")
    master.learn(entry("b", 0, DEAD))
    stop()
    stop()
    master.tell_holder("x", "b", 1)
    assert heard == [("x", WorkerIncarnation("b", 0)), ("x", None)]
    assert "not my day" in capsys.readouterr().err, "it is printed, and the others are called all the same"


def test_a_watcher_cannot_wait_for_the_news_that_it_holds_up(master: Master) -> None:
    errors: list[UsageError] = []

    def claim(name: str, holder: WorkerIncarnation | None) -> None:
        for wait in (master.names.claim, master.names.find):
            with pytest.raises(UsageError, match="in an on_change callback") as caught:
                wait("z", 5.0)
            errors.append(caught.value)

    master.names.on_change(claim)
    master.tell_holder("x", "b")
    assert len(errors) == 2


def test_a_forked_child_has_no_names(master: Master) -> None:
    master.names._pid = os.getpid() + 1  # as a child of ours would see it
    for use in (master.names.claim, master.names.find, master.names.release):
        with pytest.raises(UsageError, match="was forked from it"):
            use("x")


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
    assert table.drop("x")
    claim = table.claim("x")
    table.answer(entry("a", names={"x": 1, "y": 9}, revision=2))
    assert not claim.is_answered
    table.answer(entry("a", refused={"x": no(3)}, revision=3))
    assert claim.refusal


def test_what_is_said_of_another_incarnation_is_no_answer() -> None:
    table = ClaimTable("a", 1)
    claim = table.claim("x")
    table.answer(entry("a", 0, names={"x": 1}, revision=1))
    table.answer(entry("a", 0, DEAD))
    assert not claim.is_answered


def test_withdrawal_says_why_to_whoever_waits(table: ClaimTable) -> None:
    claim = table.claim("x")
    assert table.drop("x", "no more need")
    assert claim.refusal == "no more need"
    assert not table.drop("x")
    assert table.claims == NameClaims(number=2)


@pytest.mark.parametrize(
    ("news", "why"),
    [
        (entry("a", 0, DEAD), "has ended incarnation 0"),
        (entry("a", 0, ENDED), "has ended incarnation 0"),
        (entry("a", 1), "the master has ended incarnation 0 of this worker (incarnation 1 took its place)"),
    ],
)
def test_an_incarnation_that_the_master_has_ended_gets_no_name(
    table: ClaimTable, news: DirectoryEntry, why: str
) -> None:
    claim = table.claim("x")
    table.answer(news)
    assert why in claim.refusal
    assert why in table.claim("y").refusal


# Limits


def test_a_name_has_1_to_200_characters(table: ClaimTable) -> None:
    table.claim("é" * 200)
    with pytest.raises(
        UsageError, match=r"worker a cannot claim the name 'éé.*…: a name has 1 to 200 .*, this one 201"
    ):
        table.claim("é" * 201)
    with pytest.raises(UsageError, match="this one 0"):
        table.claim("")
    with pytest.raises(UsageError, match=r"cannot claim the name '\\ud800': it cannot be written in UTF-8"):
        table.claim("\ud800")
    assert table.claims.number == 1


def test_a_worker_has_at_most_1000_names(table: ClaimTable) -> None:
    for number in range(1000):
        table.claim(str(number))
    assert table.claim("5").number == 6, "it has that one already"
    with pytest.raises(UsageError, match="it has 1000 already"):
        table.claim("x")
    table.drop("5")
    assert table.claim("x")
