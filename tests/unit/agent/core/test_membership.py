"""What the agent tells whom, names included, and how it stands with its master."""

import os

import msgspec
import pytest

from tests.support.agent_core import FACTS, SPEC, STORE, W0, W1, Driver, launched, next_incarnation, sent, wanted
from unified.protocol.agent_master import (
    AgentHeartbeat,
    AgentRefused,
    AgentRegistered,
    DesiredJob,
    DesiredWorkers,
    DirectoryChanged,
    HeartbeatSeen,
    RegisterAgain,
    RegisterAgent,
)
from unified.protocol.records import DirectoryEntry, Inbox, NameClaims, NameRefusal, Progress, Reachability
from unified.protocol.worker_agent import Claimed, DirectoryNews, Reported, Running, worker_to_agent
from unified_agent.core.messages import (
    Exit,
    KeepZygotes,
    KeyRefused,
    MasterReached,
    MasterUnreadable,
    Reconnect,
    SendMaster,
    StartWorker,
    TellWorker,
    WorkerExited,
    WriteLog,
)
from unified_agent.environment import ZygoteKey

# The directory


def entry(worker: str, incarnation: int, state: Reachability = Reachability.ALIVE) -> DirectoryEntry:
    return DirectoryEntry(worker=worker, incarnation=incarnation, state=state)


def test_news_of_the_directory_reach_every_worker_of_the_job_once() -> None:
    driver = Driver()
    driver.desire(wanted(W0), wanted(STORE))
    driver.start(W0)
    driver.take()
    news = DirectoryChanged(job_id="job-1", entries=[entry("x", 0)])
    driver.hear(news)
    assert driver.notable() == [TellWorker(incarnation=W0, message=DirectoryNews(entries=[entry("x", 0)]))]
    driver.hear(news)
    driver.hear(DirectoryChanged(job_id="job-2", entries=[entry("y", 0)]))
    assert driver.notable() == []


def test_a_worker_begins_with_the_newest_of_the_directory() -> None:
    driver = Driver()
    driver.desire()
    entries = [entry("x", 1), entry("x", 0, Reachability.ENDED), entry("y", 0, Reachability.DEAD), entry("y", 0)]
    driver.hear(DirectoryChanged(job_id="job-1", entries=entries))
    driver.desire(wanted(W0))
    (start,) = driver.notable()
    assert isinstance(start, StartWorker)
    assert start.launch.directory == [entry("x", 1), entry("y", 0, Reachability.DEAD)]


# Interpreters


def test_an_interpreter_is_kept_while_its_job_or_a_worker_of_it_lives() -> None:
    driver = Driver()
    job = DesiredJob(job_id="job-1", spec=msgspec.structs.replace(SPEC, python="/venv/bin/python"))
    driver.desire(wanted(W0), jobs=[job])
    assert KeepZygotes(keys=[ZygoteKey("/venv/bin/python")]) in driver.take()
    driver.hear(DesiredWorkers(generation=9, workers=[], jobs=[]))
    assert not any(isinstance(action, KeepZygotes) for action in driver.take())
    driver.step(WorkerExited(incarnation=W0, code=-9))
    assert KeepZygotes(keys=[]) in driver.take()


def test_a_preload_is_kept_while_its_job_or_a_worker_of_it_lives() -> None:
    driver = Driver()
    job = DesiredJob(job_id="job-1", spec=msgspec.structs.replace(SPEC, preload=["transformers"]))
    driver.desire(wanted(W0), jobs=[job])
    key = ZygoteKey(FACTS.python, ("transformers",))
    actions = driver.take()
    assert KeepZygotes(keys=[key]) in actions
    assert [action.zygote for action in actions if isinstance(action, StartWorker)] == [key]
    driver.hear(DesiredWorkers(generation=9, workers=[], jobs=[]))
    assert not any(isinstance(action, KeepZygotes) for action in driver.take())
    driver.step(WorkerExited(incarnation=W0, code=-9))
    assert KeepZygotes(keys=[]) in driver.take()


def test_the_agents_own_interpreter_is_no_other() -> None:
    driver = Driver()
    job = DesiredJob(job_id="job-1", spec=msgspec.structs.replace(SPEC, python=FACTS.python, start_method="spawn"))
    driver.desire(wanted(W0), jobs=[job])
    actions = driver.take()
    assert not any(isinstance(action, KeepZygotes) for action in actions)
    (start,) = (action for action in actions if isinstance(action, StartWorker))
    assert (start.zygote, start.is_fresh) == (FACTS.zygote, True)


# Telling the master


def test_changes_close_together_are_told_together() -> None:
    driver = launched(wanted(W0), wanted(W1))
    driver.pass_time(0.01)
    assert sent(driver.take()) == ["ObservedWorkers"]
    driver.pass_time(0.5)
    assert "ObservedWorkers" not in sent(driver.take())


def test_progress_is_told_five_times_a_second() -> None:
    driver = launched(wanted(W0, run=1))
    driver.say(W0, Running(round=1))
    driver.pass_time(0.5)
    driver.take()
    for step in range(200):
        driver.say(W0, Reported(progress=Progress(step=step)))
        driver.pass_time(0.01, answered=True)
    driver.pass_time(0.2)
    assert 9 <= sent(driver.take()).count("ObservedWorkers") <= 12


def test_the_whole_set_is_told_now_and_then_even_when_nothing_happens() -> None:
    driver = Driver()
    driver.pass_time(25, answered=True)
    assert sent(driver.take()).count("ObservedWorkers") == 2


# Membership


def test_it_registers_again_and_again_until_it_is_heard() -> None:
    driver = Driver(registered=False)
    driver.pass_time(3.5)
    assert sent(driver.take()) == ["RegisterAgent"] * 4
    driver.step(MasterReached())
    assert sent(driver.take()) == ["RegisterAgent"]


def test_it_beats_once_registered() -> None:
    driver = Driver()
    driver.desire()
    driver.take()
    driver.pass_time(3, answered=True)
    beats = [action.message for action in driver.take() if isinstance(action, SendMaster)]
    assert AgentHeartbeat(node="n1", incarnation="abc", generation=1) in beats
    assert sum(isinstance(message, AgentHeartbeat) for message in beats) == 3
    assert not any(isinstance(message, RegisterAgent) for message in beats)


def test_a_silent_master_costs_no_worker() -> None:
    driver = launched(wanted(W0))
    driver.pass_time(60)
    actions = driver.take()
    assert {type(action) for action in actions} == {SendMaster, WriteLog, Reconnect}
    assert 10 <= sum(isinstance(action, Reconnect) for action in actions) <= 12
    driver.hear(RegisterAgain())
    assert sent(driver.take()) == ["RegisterAgent"]
    driver.hear(AgentRegistered(lease_s=15, heartbeat_s=1))
    assert f"{W0.worker}#0" in driver.observed()


def test_a_reached_master_hears_at_once() -> None:
    driver = Driver()
    driver.step(MasterReached())
    driver.pass_time(0.01)
    assert sent(driver.take()) == ["AgentHeartbeat", "ObservedWorkers"]


def test_an_unreachable_master_is_complained_of_first_soon_and_then_seldom() -> None:
    driver = Driver(registered=False)
    driver.pass_time(75)
    complaints = [action.reason for action in driver.take() if isinstance(action, WriteLog)]
    assert complaints == [
        f"cannot reach the master at tcp://m:7077: no answer for {waited} s; keeps trying" for waited in (10, 40, 70)
    ]


def test_it_gives_up_only_if_told_so_and_never_once_it_belonged() -> None:
    driver = Driver(registered=False, give_up_s=5)
    driver.pass_time(4.9)
    assert not any(isinstance(action, Exit) for action in driver.take())
    driver.pass_time(1)
    end = driver.take()[-1]
    assert end == Exit(code=1, reason="cannot reach the master at tcp://m:7077: no answer for 5 s.")
    member = Driver(give_up_s=5)
    member.hear(RegisterAgain())
    member.pass_time(100)
    assert not any(isinstance(action, Exit) for action in member.take())


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_it_leaves_a_cluster_whose_master_is_silent_for_too_long_if_told_so(is_cut_off: bool) -> None:
    """SLURM does not end a step of an allocation that it has given up."""
    member = Driver(leave_after_s=60)
    member.pass_time(50, answered=True)
    member.take()
    if is_cut_off:
        member.hear(RegisterAgain())
    member.pass_time(59)
    assert not any(isinstance(action, Exit) for action in member.take())
    member.pass_time(20)
    end = next(action for action in member.take() if isinstance(action, Exit))
    assert end.code == 1
    assert end.reason.startswith("cannot reach the master at tcp://m:7077: no answer for 6")
    newcomer = Driver(registered=False, leave_after_s=60)
    newcomer.pass_time(70)
    assert any(isinstance(action, Exit) for action in newcomer.take())


def test_a_refusal_for_good_ends_it_and_a_refusal_for_now_does_not() -> None:
    driver = Driver(registered=False)
    driver.pass_time(0)
    driver.take()
    driver.hear(AgentRefused(reason="the old incarnation's lease runs", retry_after_s=3))
    driver.pass_time(2.9)
    assert sent(driver.take()) == []
    driver.pass_time(0.2)
    assert sent(driver.take()) == ["RegisterAgent"]
    driver.hear(AgentRefused(reason="not you"))
    assert driver.take() == [Exit(code=78, reason="not you")]
    driver.hear(AgentRegistered(lease_s=15, heartbeat_s=1))
    assert driver.take() == []


def test_a_member_whose_master_cannot_be_read_says_so_once_and_leaves_its_workers_to_the_lease() -> None:
    driver = launched(wanted(W0))
    for _ in range(3):
        driver.step(MasterUnreadable(reason="version 2."))
        assert driver.core.membership.lease(driver.now).is_locked_out
    text = "version 2. The agent tries again; the workers end with this node's lease."
    assert driver.take() == [WriteLog(event="master-unreadable", reason=text, level="error")]
    assert f"{W0.worker}#0" in driver.observed()
    driver.hear(HeartbeatSeen())
    assert not driver.core.membership.lease(driver.now).is_locked_out


REFUSED = KeyRefused(reason="the master has another key.")


def notes(driver: Driver) -> list[tuple[str, str]]:
    return [(note.event, note.level) for note in driver.take() if isinstance(note, WriteLog)]


@pytest.mark.parametrize("event", [MasterUnreadable(reason="version 2"), REFUSED])
def test_an_agent_that_never_belonged_ends_with_the_reason(event: MasterUnreadable | KeyRefused) -> None:
    driver = Driver(registered=False)
    driver.pass_time(0)
    driver.take()
    driver.step(event)
    assert driver.take() == [Exit(code=os.EX_CONFIG, reason=event.reason)], "no restart mends it"


def test_an_agent_ends_so_that_it_is_started_again_where_the_master_met_a_defect() -> None:
    driver = Driver(registered=False)
    driver.pass_time(0)
    driver.take()
    driver.step(MasterUnreadable(reason="a defect", may_pass=True))
    assert driver.take() == [Exit(code=1, reason="a defect")]


def test_a_member_keeps_its_workers_says_so_once_and_tries_again() -> None:
    driver = launched(wanted(W0))
    driver.step(REFUSED)
    assert notes(driver) == [("key-refused", "error")]
    driver.step(REFUSED)
    assert notes(driver) == []
    driver.pass_time(30)
    actions = driver.take()
    assert any(isinstance(action, Reconnect) for action in actions)
    found = {action.event for action in actions if isinstance(action, WriteLog)}
    assert found == {"master-silent", "master-unreachable"}
    driver.hear(RegisterAgain())
    driver.hear(AgentRegistered(lease_s=15, heartbeat_s=1))
    assert f"{W0.worker}#0" in driver.observed()
    driver.step(REFUSED)
    assert notes(driver) == [("key-refused", "error")], "it is news again"


def test_an_agent_that_the_master_forgot_meanwhile_tries_again_too() -> None:
    driver = Driver()
    driver.hear(RegisterAgain())
    driver.take()
    driver.step(REFUSED)
    driver.pass_time(20)
    reconnects = sum(isinstance(action, Reconnect) for action in driver.take())
    assert reconnects == 1, "the shell reports what comes of it, and that is what it waits for"


def test_once_the_master_is_heard_nothing_is_tried_any_more() -> None:
    driver = Driver()
    driver.step(REFUSED)
    driver.hear(HeartbeatSeen())
    driver.take()
    driver.pass_time(6, answered=True)
    assert not any(isinstance(action, Reconnect) for action in driver.take())


def claims(number: int, *names: str) -> NameClaims:
    return NameClaims(number=number, names=dict.fromkeys(names, number))


@pytest.fixture
def driver() -> Driver:
    return launched(wanted(W0), wanted(W1))


def test_the_newest_claims_of_each_incarnation_are_told_with_its_state(driver: Driver) -> None:
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


def test_the_next_incarnation_claims_nothing_yet(driver: Driver) -> None:
    driver.say(W0, Claimed(claims=claims(5, "x")))
    driver.step(WorkerExited(incarnation=W0, code=-9))
    driver.desire(wanted(next_incarnation(W0)), wanted(W1))
    driver.start(next_incarnation(W0))
    assert driver.observed()[f"{W0.worker}#1"].claims == NameClaims()


def test_answers_are_news_and_older_ones_are_not(driver: Driver) -> None:
    first = DirectoryEntry(worker="a", incarnation=0, state=Reachability.ALIVE, inbox=Inbox(inbox_id="i"))
    refused = msgspec.structs.replace(first, refused={"x": NameRefusal(number=1, holder="b")}, revision=1)
    granted = msgspec.structs.replace(first, names={"x": 3}, revision=2)
    for entry in (first, refused, granted):
        driver.hear(DirectoryChanged(job_id="job-1", entries=[entry]))
        news = DirectoryNews(entries=[entry])
        assert driver.notable() == [TellWorker(incarnation=W0, message=news), TellWorker(incarnation=W1, message=news)]
    driver.hear(DirectoryChanged(job_id="job-1", entries=[refused, first, granted]))
    assert driver.notable() == []
    dead = DirectoryEntry(worker="a", incarnation=0, state=Reachability.DEAD)
    driver.hear(DirectoryChanged(job_id="job-1", entries=[dead]))
    assert len(driver.notable()) == 2
    driver.hear(DirectoryChanged(job_id="job-1", entries=[granted]))
    assert driver.notable() == []


def test_neighbours_hear_of_an_end_before_the_master_does(driver: Driver) -> None:
    driver.step(WorkerExited(incarnation=W0, code=-9))
    (told,) = driver.notable()
    assert isinstance(told, TellWorker)
    assert isinstance(told.message, DirectoryNews)
    (entry,) = told.message.entries
    assert told.incarnation == W1
    assert (entry.worker, entry.incarnation, entry.state) == (W0.worker, 0, Reachability.DEAD)
    assert entry.reason == "killed by SIGKILL"
    driver.hear(DirectoryChanged(job_id="job-1", entries=[msgspec.structs.replace(entry, reason="as the master says")]))
    assert driver.notable() == [], "it is no news"
    ended = msgspec.structs.replace(entry, state=Reachability.ENDED)
    driver.hear(DirectoryChanged(job_id="job-1", entries=[ended]))
    assert driver.notable() == [TellWorker(incarnation=W1, message=DirectoryNews(entries=[ended]))]


def test_the_end_of_a_worker_that_was_stopped_is_left_to_the_master_to_tell(driver: Driver) -> None:
    driver.desire(wanted(W1))
    driver.take()
    driver.step(WorkerExited(incarnation=W0, code=0))
    assert driver.notable() == []


def encode(names: dict[str, int]) -> bytes:
    return msgspec.msgpack.encode({"type": "claimed", "claims": {"number": 1, "names": names}})


@pytest.mark.parametrize("names", [{"": 1}, {"x" * 201: 1}, {str(number): 1 for number in range(1001)}])
def test_more_or_longer_names_than_allowed_are_no_message(names: dict[str, int]) -> None:
    worker_to_agent.decode(encode({str(number).zfill(200): 1 for number in range(1000)}))
    with pytest.raises(msgspec.ValidationError):
        worker_to_agent.decode(encode(names))
