"""An agent whose master has another cluster key."""

from __future__ import annotations

from tests.support.agent_core import W0, Driver, wanted
from unified.protocol.agent_master import AgentRegistered, HeartbeatSeen, RegisterAgain
from unified_agent.core.messages import Exit, KeyRefused, Reconnect, WriteLog

REFUSED = KeyRefused(reason="the master has another key.")


def notes(driver: Driver) -> list[tuple[str, str]]:
    return [(note.event, note.level) for note in driver.take() if isinstance(note, WriteLog)]


def test_an_agent_that_never_belonged_ends_with_the_reason() -> None:
    driver = Driver(registered=False)
    driver.pass_time(0)
    driver.take()
    driver.step(REFUSED)
    assert driver.take() == [Exit(code=1, reason="the master has another key.")]


def test_a_member_keeps_its_workers_says_so_once_and_tries_again() -> None:
    driver = Driver()
    driver.desire(wanted(W0))
    driver.start(W0)
    driver.take()
    driver.step(REFUSED)
    assert notes(driver) == [("key-refused", "error")]
    driver.step(REFUSED)
    assert notes(driver) == []
    driver.pass_time(30)
    actions = driver.take()
    assert any(isinstance(action, Reconnect) for action in actions)
    assert {action.event for action in actions if isinstance(action, WriteLog)} == {
        "master-silent",
        "master-unreachable",
    }
    driver.hear(RegisterAgain())
    driver.hear(AgentRegistered(lease_s=5, heartbeat_s=1))
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
