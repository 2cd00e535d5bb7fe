"""What a coordinator has still to be told of checkpoints."""

from __future__ import annotations

from unified.checkpoint.coordinator_notify import MAX_EVENTS, Unsaid
from unified.protocol.coordinator import NotifyCheckpoint, TellEvent


def notice(step: int, path: str = "p") -> NotifyCheckpoint:
    return NotifyCheckpoint(worker_id="w", step=step, path=path)


def event(reason: str) -> TellEvent:
    return TellEvent(worker_id="w", event="checkpoint-failed", reason=reason)


def test_of_the_checkpoints_the_latest_is_said_once() -> None:
    unsaid = Unsaid()
    for each in (notice(5), notice(7), notice(7, "again"), notice(6)):
        unsaid.add(each)
    assert unsaid.take() == notice(7, "again")
    assert not unsaid
    assert unsaid.take() is None


def test_going_back_is_said_whatever_was_unsaid() -> None:
    back = NotifyCheckpoint(worker_id="w", step=3, path="p", goes_back=True)
    unsaid = Unsaid()
    unsaid.add(notice(7))
    unsaid.add(back)
    unsaid.put_back(notice(6))
    assert unsaid.take() == back
    unsaid.add(notice(4))
    unsaid.put_back(back)
    found = unsaid.take()
    assert isinstance(found, NotifyCheckpoint)
    assert (found.step, found.goes_back) == (4, True)
    unsaid.add(back)
    unsaid.add(notice(4))
    found = unsaid.take()
    assert isinstance(found, NotifyCheckpoint)
    assert (found.step, found.goes_back) == (4, True)


def test_events_come_first_and_the_oldest_of_too_many_go() -> None:
    unsaid = Unsaid()
    unsaid.add(notice(1))
    for number in range(MAX_EVENTS + 2):
        unsaid.add(event(str(number)))
    said = [unsaid.take() for _ in range(MAX_EVENTS + 1)]
    assert said == [*(event(str(number)) for number in range(2, MAX_EVENTS + 2)), notice(1)]


def test_what_is_put_back_is_said_unless_something_newer_came() -> None:
    unsaid = Unsaid()
    unsaid.add(notice(1))
    unsaid.put_back(event("first"))
    unsaid.put_back(notice(9))
    assert [unsaid.take(), unsaid.take()] == [event("first"), notice(9)]
    unsaid.add(notice(9, "newer"))
    unsaid.put_back(notice(9, "older"))
    assert unsaid.take() == notice(9, "newer")
    for number in range(MAX_EVENTS):
        unsaid.add(event(str(number)))
    unsaid.put_back(event("too old"))
    assert unsaid.take() == event("0")
