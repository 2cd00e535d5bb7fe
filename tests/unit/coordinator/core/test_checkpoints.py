"""The latest checkpoint of each series, and the events that workers tell: their size, number and space."""

from typing import Any

import pytest

from tests.support.coordinator import Story
from unified.coordinator.core.checkpoints import MAX_REASON
from unified.coordinator.core.messages import SpaceClosed
from unified.coordinator.core.records import EVENTS_WINDOW_S, MAX_EVENTS
from unified.errors import ProtocolError
from unified.protocol.client_master import Done
from unified.protocol.coordinator import (
    CheckpointResponse,
    GetLatestCheckpoint,
    NotifyCheckpoint,
    RecoveryInfo,
    TellEvent,
    worker_to_coordinator,
)


def notice(step: int, **fields: Any) -> NotifyCheckpoint:
    values = {"worker_id": "w0", "path": f"step-{step:06}.json", "size_bytes": 7, "checksum": "c", "world_size": 4}
    return NotifyCheckpoint(step=step, **{**values, **fields})


def tell(story: Story, request: NotifyCheckpoint) -> bool:
    return story.ask(request, CheckpointResponse).is_latest


def latest(story: Story, name: str = "default", space: str = "") -> RecoveryInfo:
    return story.ask(GetLatestCheckpoint(name=name, space=space), RecoveryInfo)


@pytest.fixture
def story() -> Story:
    return Story()


def test_there_is_none_at_first_and_asking_leaves_nothing(story: Story) -> None:
    assert latest(story) == RecoveryInfo(is_found=False)
    assert story.core.spaces == {}


def test_highest_step_is_the_latest_in_whatever_order_they_come(story: Story) -> None:
    assert tell(story, notice(200, metadata={"loss": "0.5"}))
    story.now += 50
    assert not tell(story, notice(100))
    assert latest(story) == RecoveryInfo(
        is_found=True,
        step=200,
        path="step-000200.json",
        size_bytes=7,
        checksum="c",
        world_size=4,
        worker_id="w0",
        metadata={"loss": "0.5"},
        saved_at=1000.0,
    )
    assert tell(story, notice(300))
    assert (latest(story).step, latest(story).saved_at) == (300, 1050.0)


def test_after_going_back_the_latest_is_a_lower_one(story: Story) -> None:
    tell(story, notice(200))
    assert tell(story, notice(100, goes_back=True))
    assert "training went back: step 100" in story.reports[-1].reason
    story.restart()
    assert not tell(story, notice(50))
    assert tell(story, notice(110))
    assert latest(story).step == 110


def test_telling_again_changes_nothing(story: Story) -> None:
    tell(story, notice(200))
    writes = story.num_writes
    story.now += 50
    assert tell(story, notice(200))
    assert (story.num_writes, latest(story).saved_at) == (writes, 1000.0)


def test_of_many_a_minute_the_event_log_has_one(story: Story) -> None:
    for step in range(30):
        story.now += 5
        tell(story, notice(step))
        tell(story, notice(step, name="critic"))
        if step == 12:
            story.restart()
    assert [report.reason.split()[1] for report in story.reports if "critic" in report.reason] == ["0", "12", "24"]
    assert latest(story).step == 29


def test_of_two_with_one_step_the_later_counts(story: Story) -> None:
    tell(story, notice(200))
    assert tell(story, notice(200, checksum="other"))
    assert latest(story).checksum == "other"


def test_series_and_spaces_keep_apart_and_outlive_the_coordinator(story: Story) -> None:
    tell(story, notice(200))
    tell(story, notice(5, name="critic"))
    tell(story, notice(1, space="job"))
    story.restart()
    assert [latest(story).step, latest(story, "critic").step, latest(story, space="job").step] == [200, 5, 1]
    assert not tell(story, notice(199))
    story.tell(SpaceClosed(space="job"))
    assert not latest(story, space="job").is_found
    assert len(story.store) == 2


@pytest.mark.parametrize("request_", [notice(-1), notice(1, path="")])
def test_checkpoint_that_is_none_is_refused(request_: NotifyCheckpoint, story: Story) -> None:
    assert story.refused(request_).code == "bad-request"
    assert story.store == {}


def trouble(**fields: Any) -> TellEvent:
    return TellEvent(**{"worker_id": "w0", "event": "checkpoint-failed", "reason": "step 3: disk full", **fields})


def test_an_event_is_reported_in_the_space_of_its_worker(story: Story) -> None:
    assert story.ask(trouble(space="job-1"), Done) == Done()
    (report,) = story.reports
    found = (report.event, report.reason, report.space, report.worker_id)
    assert found == ("checkpoint-failed", "step 3: disk full", "job-1", "w0")
    assert story.store == {}
    story.tell(SpaceClosed(space="job-1"))
    assert story.core.spaces == {}


def test_of_too_many_the_rest_is_not_kept_and_says_so(story: Story) -> None:
    notes = [story.ask(trouble(), Done).note for _ in range(MAX_EVENTS + 3)]
    assert notes[:MAX_EVENTS] == [""] * MAX_EVENTS
    assert all("not logged" in note for note in notes[MAX_EVENTS:])
    assert story.ask(trouble(space="other"), Done).note == ""
    story.now += EVENTS_WINDOW_S
    assert story.ask(trouble(), Done).note == ""
    assert len(story.reports) == MAX_EVENTS + 2


def test_a_long_reason_is_cut_off(story: Story) -> None:
    story.ask(trouble(reason="x" * 10_000_000), Done)
    assert len(story.reports[0].reason) == MAX_REASON + 1


@pytest.mark.parametrize("worker_id", ["", "w\nevent=job-failed", "w" * 201])
def test_a_name_that_would_spoil_the_log_is_refused(worker_id: str, story: Story) -> None:
    assert story.refused(trouble(worker_id=worker_id)).code == "bad-request"
    assert story.reports == []


def test_words_of_the_masters_own_decisions_cannot_be_told() -> None:
    with pytest.raises(ProtocolError, match="worker-failed"):
        worker_to_coordinator.decode(worker_to_coordinator.encode(trouble(event="worker-failed"), 1))
