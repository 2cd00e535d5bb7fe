"""Claims of names pass through the agent: the newest set goes up, the answers come down with the directory."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.agent_core import W0, W1, Driver, next_life, wanted
from unified.protocol.agent_master import DirectoryChanged
from unified.protocol.records import DirectoryEntry, Inbox, NameClaims, NameRefusal, Reachability
from unified.protocol.worker_agent import Claimed, DirectoryNews, worker_to_agent
from unified_agent.core.messages import TellWorker, WorkerExited


def claims(number: int, *names: str) -> NameClaims:
    return NameClaims(number=number, names=dict.fromkeys(names, number))


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.desire(wanted(W0), wanted(W1))
    driver.start(W0)
    driver.start(W1)
    driver.take()
    return driver


def test_the_newest_claims_of_each_life_are_told_with_its_state(driver: Driver) -> None:
    driver.say(W0, Claimed(claims=claims(1, "x")), Claimed(claims=claims(2, "y")), Claimed(claims=claims(1, "x")))
    driver.say(W1, Claimed(claims=claims(1, "x")))
    observed = driver.observed()
    assert observed[f"{W0.worker}#0"].claims == claims(2, "y")
    assert observed[f"{W1.worker}#0"].claims == claims(1, "x")
    driver.hear(DirectoryChanged(job_id="job-1", entries=[]))
    driver.pass_time(20)
    assert driver.observed()[f"{W0.worker}#0"].claims == claims(2, "y"), "and told again with every report"


def test_claims_are_told_at_once(driver: Driver) -> None:
    before = driver.now
    driver.say(W0, Claimed(claims=claims(1, "x")))
    assert driver.core.next_deadline is not None
    assert driver.core.next_deadline - before <= 0.002


def test_the_next_life_claims_nothing_yet(driver: Driver) -> None:
    driver.say(W0, Claimed(claims=claims(5, "x")))
    driver.step(WorkerExited(life=W0, code=-9))
    driver.desire(wanted(next_life(W0)), wanted(W1))
    driver.start(next_life(W0))
    assert driver.observed()[f"{W0.worker}#1"].claims == NameClaims()


def test_answers_are_news_and_older_ones_are_not(driver: Driver) -> None:
    first = DirectoryEntry(worker="a", incarnation=0, state=Reachability.ALIVE, inbox=Inbox(inbox_id="i"))
    refusal = {"x": NameRefusal(number=1, holder="b")}
    refused = msgspec.structs.replace(first, refused=refusal, revision=1)
    granted = msgspec.structs.replace(first, names={"x": 3}, revision=2)
    for entry in (first, refused, granted):
        driver.hear(DirectoryChanged(job_id="job-1", entries=[entry]))
        news = DirectoryNews(entries=[entry])
        assert driver.notable() == [TellWorker(life=W0, message=news), TellWorker(life=W1, message=news)]
    driver.hear(DirectoryChanged(job_id="job-1", entries=[refused, first, granted]))
    assert driver.notable() == []
    dead = DirectoryEntry(worker="a", incarnation=0, state=Reachability.DEAD)
    driver.hear(DirectoryChanged(job_id="job-1", entries=[dead]))
    assert len(driver.notable()) == 2
    driver.hear(DirectoryChanged(job_id="job-1", entries=[granted]))
    assert driver.notable() == []


def test_neighbours_hear_of_an_end_before_the_master_does(driver: Driver) -> None:
    driver.step(WorkerExited(life=W0, code=-9))
    (told,) = driver.notable()
    assert isinstance(told, TellWorker)
    assert isinstance(told.message, DirectoryNews)
    (entry,) = told.message.entries
    assert told.life == W1
    assert (entry.worker, entry.incarnation, entry.state) == (W0.worker, 0, Reachability.DEAD)
    assert entry.reason == "killed by SIGKILL"
    driver.hear(DirectoryChanged(job_id="job-1", entries=[msgspec.structs.replace(entry, reason="as the master says")]))
    assert driver.notable() == [], "it is no news"
    ended = msgspec.structs.replace(entry, state=Reachability.ENDED)
    driver.hear(DirectoryChanged(job_id="job-1", entries=[ended]))
    assert driver.notable() == [TellWorker(life=W1, message=DirectoryNews(entries=[ended]))]


def test_the_end_of_a_worker_that_was_stopped_is_left_to_the_master_to_tell(driver: Driver) -> None:
    driver.desire(wanted(W1))
    driver.take()
    driver.step(WorkerExited(life=W0, code=0))
    assert driver.notable() == []


def encode(names: dict[str, int]) -> bytes:
    return msgspec.msgpack.encode({"type": "claimed", "claims": {"number": 1, "names": names}})


@pytest.mark.parametrize("names", [{"": 1}, {"x" * 201: 1}, {str(number): 1 for number in range(1001)}])
def test_more_or_longer_names_than_allowed_are_no_message(names: dict[str, int]) -> None:
    worker_to_agent.decode(encode({str(number).zfill(200): 1 for number in range(1000)}))
    with pytest.raises(msgspec.ValidationError):
        worker_to_agent.decode(encode(names))
