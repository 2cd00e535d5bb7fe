"""How the agent ends: its workers move elsewhere first, or are stopped here."""

import pytest

from tests.support.agent_core import W0, W1, Driver, launched, next_incarnation, sent, wanted
from unified.config.settings import Intervals
from unified.protocol.agent_master import (
    AgentHeartbeat,
    AgentLeaving,
    HeartbeatSeen,
    MasterStopping,
    ObservedWorker,
    ObservedWorkers,
)
from unified.protocol.records import WorkerState
from unified.protocol.worker_agent import Finished, Running, Saving, Stop
from unified_agent.core.lease import request_id_at
from unified_agent.core.messages import (
    AgentEvent,
    Exit,
    MasterSaid,
    PersistHeld,
    SendMaster,
    SignalWorker,
    SnapshotsReported,
    StopAsked,
    TellWorker,
    WorkerExited,
    WorkerSaid,
)
from unified_agent.core.shutdown import ANSWER_S

VACATE_S = Intervals().vacate_s


def stop(driver: Driver) -> None:
    """Stop an agent whose master does not answer, so that its workers have nowhere to go."""
    driver.step(StopAsked(reason="SIGTERM"))
    driver.pass_time(ANSWER_S)


def vacating() -> Driver:
    """An agent that stops, with a worker, as its master has heard."""
    driver = launched(wanted(W0))
    driver.step(StopAsked(reason="SIGTERM"))
    (beat,) = (action for action in driver.take() if isinstance(action, SendMaster))
    assert beat.message == AgentHeartbeat(
        node="n1", incarnation="abc", generation=driver.generation, stops="SIGTERM", stops_in_s=VACATE_S
    )
    driver.step(MasterSaid(message=HeartbeatSeen(), request_id=beat.request_id))
    return driver


def stopped(driver: Driver) -> bool:
    return SignalWorker(incarnation=W0, how="terminate") in driver.take()


def test_workers_go_on_until_the_master_has_moved_them() -> None:
    driver = vacating()
    driver.pass_time(ANSWER_S + 1)
    beats = [each.message for each in driver.take() if isinstance(each, SendMaster)]
    told = [beat for beat in beats if isinstance(beat, AgentHeartbeat)]
    assert told
    assert all(beat.stops == "SIGTERM" and 0 < beat.stops_in_s < VACATE_S for beat in told), "it is said again"
    driver.desire()
    assert stopped(driver)
    driver.step(WorkerExited(incarnation=W0, code=0))
    assert driver.take()[-1] == Exit(code=0, reason="SIGTERM")


def test_workers_that_are_not_moved_in_time_are_stopped() -> None:
    driver = vacating()
    driver.pass_time(VACATE_S - 0.1)
    assert not stopped(driver)
    driver.pass_time(0.2)
    assert stopped(driver)


def test_a_master_that_stops_too_moves_nobody() -> None:
    driver = vacating()
    driver.hear(MasterStopping(away_s=300))
    assert stopped(driver)


def test_a_master_that_does_not_answer_is_not_waited_for() -> None:
    driver = launched(wanted(W0))
    driver.step(StopAsked(reason="SIGTERM"))
    driver.step(MasterSaid(message=HeartbeatSeen(), request_id=request_id_at(driver.now - 1)))  # of an earlier one
    driver.pass_time(ANSWER_S - 0.1)
    assert not stopped(driver)
    driver.pass_time(0.2)
    assert stopped(driver)


def test_it_leaves_when_its_workers_are_gone() -> None:
    driver = launched(wanted(W0), wanted(W1))
    stop(driver)
    assert sum(action == SignalWorker(incarnation=W0, how="terminate") for action in driver.take()) == 1
    driver.step(WorkerExited(incarnation=W0, code=0))
    driver.desire(wanted(W0), wanted(next_incarnation(W0)))
    assert driver.notable() == []
    driver.step(WorkerExited(incarnation=W1, code=0))
    actions = driver.take()
    assert sent(actions)[-2:] == ["ObservedWorkers", "AgentLeaving"]
    assert actions[-1] == Exit(code=0, reason="SIGTERM")


def test_an_idle_agent_leaves_at_once() -> None:
    driver = Driver()
    driver.step(StopAsked(reason="SIGTERM"))
    leaving, end = driver.take()[-2:]
    assert leaving == SendMaster(message=AgentLeaving(node="n1", incarnation="abc", reason="SIGTERM"))
    assert end == Exit(code=0, reason="SIGTERM")


@pytest.mark.parametrize("events", [[StopAsked(reason="SIGINT")] * 2, [StopAsked(reason="orphan", at_once=True)]])
def test_a_stop_at_once_kills(events: list[AgentEvent]) -> None:
    driver = launched(wanted(W0))
    for event in events:
        driver.step(event)
    assert driver.notable()[-1] == SignalWorker(incarnation=W0, how="kill")


@pytest.mark.parametrize(("stop_first", "category"), [(True, "node"), (False, None)])
def test_what_returns_because_the_agent_ends_has_not_done_its_work(stop_first: bool, category: str | None) -> None:
    driver = Driver()
    driver.desire(wanted(W0, run=1), wanted(W1))
    driver.start(W0)
    driver.start(W1)  # it keeps the agent from leaving meanwhile
    driver.say(W0, Running(round=1))
    events: list[AgentEvent] = [StopAsked(reason="SIGTERM"), WorkerSaid(incarnation=W0, word=Finished())]
    for event in events if stop_first else reversed(events):
        driver.step(event)
        if isinstance(event, StopAsked):
            driver.pass_time(ANSWER_S)
    driver.step(WorkerExited(incarnation=W0, code=0))
    failure = driver.observed()[f"{W0.worker}#0"].failure
    assert (failure.category if failure else None) == category


@pytest.mark.parametrize(("told", "grace"), [(2.0, 10.0), (None, 10.0), (0.0, None)])
def test_an_end_gives_workers_the_whole_grace_of_their_job(told: float | None, grace: float | None) -> None:
    driver = Driver()
    driver.desire(wanted(W0), grace_s=told)  # what a restart of the role would leave them, or a stop by force
    driver.start(W0)
    driver.take()
    stop(driver)
    if grace is None:
        assert driver.notable() == [SignalWorker(incarnation=W0, how="kill")]
        return
    order, signal = driver.notable()
    assert order == TellWorker(
        incarnation=W0, message=Stop(grace_s=grace, save_grace_s=60, reason="the agent stops: SIGTERM")
    )
    assert signal == SignalWorker(incarnation=W0, how="terminate")
    driver.pass_time(grace - 0.1, answered=True)
    assert driver.notable() == []
    driver.pass_time(0.2, answered=True)
    assert driver.notable() == [SignalWorker(incarnation=W0, how="kill")]


@pytest.mark.parametrize("is_suspended", [True, False])
def test_it_waits_for_a_checkpoint_that_is_being_written(is_suspended: bool) -> None:
    driver = launched(wanted(W0))
    driver.say(W0, Saving())
    if is_suspended:
        driver.desire()
    stop(driver)
    driver.pass_time(65, answered=True)
    assert not any(isinstance(action, Exit) for action in driver.take())
    driver.say(W0, Saving(is_over=True))
    driver.step(WorkerExited(incarnation=W0, code=0))
    assert [action.code for action in driver.take() if isinstance(action, Exit)] == [0]


def test_it_does_not_wait_for_ever_for_a_worker_that_cannot_die() -> None:
    driver = launched(wanted(W0))
    stop(driver)
    driver.pass_time(11.9, answered=True)
    assert not any(isinstance(action, Exit) for action in driver.take())
    driver.pass_time(0.2, answered=True)
    assert [action.code for action in driver.take() if isinstance(action, Exit)] == [1]


def test_it_leaves_once_what_its_workers_have_left_in_memory_is_on_storage() -> None:
    driver = launched(wanted(W0))
    driver.step(SnapshotsReported(is_to_persist=True))
    stop(driver)
    driver.take()
    driver.step(WorkerExited(incarnation=W0, code=0))
    driver.desire(wanted(W0), wanted(next_incarnation(W0)))
    assert driver.notable() == [PersistHeld()]
    driver.step(SnapshotsReported(is_to_persist=False))
    assert driver.take()[-1] == Exit(code=0, reason="SIGTERM")


@pytest.mark.parametrize("is_vacating", [True, False])
def test_the_master_hears_of_ends_once_what_workers_have_left_in_memory_is_on_storage(is_vacating: bool) -> None:
    """Else their ranks could go on elsewhere before there is something to go on from."""
    driver = launched(wanted(W0), wanted(W1))
    driver.step(SnapshotsReported(is_to_persist=True))
    if is_vacating:
        driver.step(StopAsked(reason="SIGTERM"))
    else:
        stop(driver)
    driver.take()
    driver.step(WorkerExited(incarnation=W0, code=0))
    driver.desire(wanted(W1))
    driver.pass_time(1.0, answered=True)
    driver.step(WorkerExited(incarnation=W1, code=1))
    driver.desire()
    driver.pass_time(1.0, answered=True)
    assert {worker.state for worker in reported(driver)[-1]} == {WorkerState.STOPPING}
    assert len(reported(driver)[-1]) == 2
    driver.step(SnapshotsReported(is_to_persist=False))
    assert {worker.state for worker in reported(driver)[-1]} == {WorkerState.EXITED}


def reported(driver: Driver) -> list[list[ObservedWorker]]:
    messages = [action.message for action in driver.actions if isinstance(action, SendMaster)]
    return [message.workers for message in messages if isinstance(message, ObservedWorkers)]


@pytest.mark.parametrize("is_hurried", [True, False])
def test_it_does_not_wait_for_ever_for_storage(is_hurried: bool) -> None:
    driver = launched(wanted(W0))
    driver.step(SnapshotsReported(is_to_persist=True))
    stop(driver)
    driver.step(WorkerExited(incarnation=W0, code=0))
    driver.pass_time(9.9, answered=True)
    assert not any(isinstance(action, Exit) for action in driver.take())
    if is_hurried:
        driver.step(StopAsked(reason="SIGTERM"))
    else:
        driver.pass_time(0.2, answered=True)
    assert [action.code for action in driver.take() if isinstance(action, Exit)] == [0 if is_hurried else 1]
