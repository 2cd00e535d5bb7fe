"""Notifications of checkpoints that are still to be delivered."""

from msgspec.structs import replace

from unified.checkpoint.coordinator_notify import MAX_EVENTS, PendingNotifications
from unified.protocol.coordinator import NotifyCheckpoint, TellEvent


def notice(step: int, path: str = "p") -> NotifyCheckpoint:
    return NotifyCheckpoint(worker_id="w", step=step, path=path)


def event(reason: str) -> TellEvent:
    return TellEvent(worker_id="w", event="checkpoint-failed", reason=reason)


def test_of_the_checkpoints_the_latest_is_delivered_once() -> None:
    pending = PendingNotifications()
    for each in (notice(5), notice(7), notice(7, "again"), notice(6)):
        pending.add(each)
    assert pending.take() == notice(7, "again")
    assert not pending
    assert pending.take() is None


def test_a_rollback_is_delivered_whatever_was_pending() -> None:
    back = replace(notice(3), goes_back=True)
    pending = PendingNotifications()
    pending.add(notice(7))
    pending.add(back)
    pending.put_back(notice(6))
    assert pending.take() == back
    pending.add(notice(4))
    pending.put_back(back)
    assert pending.take() == replace(notice(4), goes_back=True)
    pending.add(back)
    pending.add(notice(4))
    assert pending.take() == replace(notice(4), goes_back=True)


def test_events_come_first_and_the_oldest_of_too_many_go() -> None:
    pending = PendingNotifications()
    pending.add(notice(1))
    for number in range(MAX_EVENTS + 2):
        pending.add(event(str(number)))
    said = [pending.take() for _ in range(MAX_EVENTS + 1)]
    assert said == [*(event(str(number)) for number in range(2, MAX_EVENTS + 2)), notice(1)]


def test_what_is_put_back_is_said_unless_something_newer_came() -> None:
    pending = PendingNotifications()
    pending.add(notice(1))
    pending.put_back(event("first"))
    pending.put_back(notice(9))
    assert [pending.take(), pending.take()] == [event("first"), notice(9)]
    pending.add(notice(9, "newer"))
    pending.put_back(notice(9, "older"))
    assert pending.take() == notice(9, "newer")
    for number in range(MAX_EVENTS):
        pending.add(event(str(number)))
    pending.put_back(event("too old"))
    assert pending.take() == event("0")
