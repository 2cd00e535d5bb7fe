"""Events that workers tell: a few words, so many a minute, so long, and of their own space."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.coordinator import Story
from unified.core.coordinator.checkpoints import MAX_REASON
from unified.core.coordinator.messages import SpaceClosed
from unified.core.coordinator.records import EVENTS_WINDOW_S, MAX_EVENTS
from unified.errors import ProtocolError
from unified.protocol.client_master import Done
from unified.protocol.coordinator import TellEvent, worker_to_coordinator


def trouble(**fields: Any) -> TellEvent:
    return TellEvent(**{"worker_id": "w0", "event": "checkpoint-failed", "reason": "step 3: disk full", **fields})


def test_an_event_is_reported_in_the_space_of_its_worker() -> None:
    story = Story()
    assert story.ask(trouble(space="job-1"), Done) == Done()
    (report,) = story.reports
    assert (report.event, report.reason, report.space, report.worker_id) == (
        "checkpoint-failed",
        "step 3: disk full",
        "job-1",
        "w0",
    )
    assert story.store == {}
    story.tell(SpaceClosed(space="job-1"))
    assert story.core.spaces == {}


def test_of_too_many_the_rest_is_not_kept_and_says_so() -> None:
    story = Story()
    notes = [story.ask(trouble(), Done).note for _ in range(MAX_EVENTS + 3)]
    assert notes[:MAX_EVENTS] == [""] * MAX_EVENTS
    assert all("not kept" in note for note in notes[MAX_EVENTS:])
    assert story.ask(trouble(space="other"), Done).note == ""
    story.now += EVENTS_WINDOW_S
    assert story.ask(trouble(), Done).note == ""
    assert len(story.reports) == MAX_EVENTS + 2


def test_a_long_reason_is_cut_off() -> None:
    story = Story()
    story.ask(trouble(reason="x" * 10_000_000), Done)
    assert len(story.reports[0].reason) == MAX_REASON + 1


@pytest.mark.parametrize("worker_id", ["", "w\nevent=job-failed", "w" * 201])
def test_a_name_that_would_spoil_the_log_is_refused(worker_id: str) -> None:
    story = Story()
    assert story.refused(trouble(worker_id=worker_id)).code == "bad-request"
    assert story.reports == []


def test_words_of_the_masters_own_decisions_cannot_be_told() -> None:
    with pytest.raises(ProtocolError, match="worker-failed"):
        worker_to_coordinator.decode(worker_to_coordinator.encode(trouble(event="worker-failed"), 1))
