"""Registration, heartbeats, silence, new incarnations, and what of it outlives the coordinator."""

from typing import Any

import msgspec
import pytest

from tests.support.coordinator import Story, dataset, four, wait, worker
from unified.coordinator.core.coordinator import CoordinatorCore
from unified.coordinator.core.messages import CoordinatorTick, RequestCame, SpaceClosed, WorkerGone
from unified.coordinator.core.records import MAX_GONE
from unified.errors import CoordinatorError
from unified.protocol.client_master import Done
from unified.protocol.coordinator import (
    CoordinatorRequest,
    Datasets,
    DeregisterWorker,
    GetDatasets,
    Heartbeat,
    HeartbeatResponse,
    SetDataWorker,
    WorkerRegistration,
)


def registered(story: Story, request: CoordinatorRequest) -> WorkerRegistration:
    return story.ask(request, WorkerRegistration)


def there(story: Story, space: str = "") -> list[str]:
    return story.ask(GetDatasets(space=space), Datasets).workers


@pytest.fixture
def story() -> Story:
    return Story()


def test_worker_is_there_until_it_was_not_heard_of_for_its_time_out(story: Story) -> None:
    answer = registered(story, worker("w0"))
    assert answer == WorkerRegistration(assigned_id="w0", heartbeat_interval_s=1.0, incarnation=0, timeout_s=30.0)
    story.after(29)
    assert story.beat("w0") == [True]
    story.after(29)
    assert there(story) == ["w0"]
    story.after(1)
    assert there(story) == []
    assert story.beat("w0") == [False]
    assert [(each.event, each.worker_id) for each in story.reports][-1] == ("worker-lost", "w0")
    assert "30.0 s" in story.reports[-1].reason
    assert story.core.next_deadline is None


def test_time_out_is_the_workers_own_and_heartbeats_are_asked_for_three_times_in_it(story: Story) -> None:
    assert registered(story, worker("w0", timeout_s=0.6)).heartbeat_interval_s == pytest.approx(0.2)
    story.send(worker("w1", timeout_s=5))
    story.after(1)
    assert there(story) == ["w1"]


def test_registering_again_changes_nothing_and_is_not_persisted_again(story: Story) -> None:
    first = registered(story, worker("w0"))
    writes, revision = story.num_writes, story.core.spaces[""].revision
    assert registered(story, worker("w0")) == first
    assert (story.num_writes, story.core.spaces[""].revision) == (writes, revision)


def test_same_incarnation_may_correct_what_it_said_and_frees_its_rank(story: Story) -> None:
    story.send(worker("w0"))
    assert registered(story, worker("w0", rank=1)).incarnation == 0
    assert registered(story, worker("other", rank=0)).incarnation == 0
    assert story.refused(worker("third", rank=1)).code == "name-taken"


def test_heartbeats_are_answered_by_one_object_and_never_persisted() -> None:
    story = four()
    writes = story.num_writes
    answers = [story.core.heartbeat(story.now, Heartbeat(worker_id=f"w{i}", session=f"w{i}/0")) for i in range(4)]
    assert len({id(answer) for answer in answers}) == 1
    assert story.ask(Heartbeat(worker_id="w0", session="w0/0"), HeartbeatResponse) is answers[0]
    assert story.num_writes == writes
    story.send(worker("w9", world_size=0))
    assert story.core.heartbeat(story.now, Heartbeat(worker_id="w0", session="w0/0")).revision > answers[0].revision


def test_heartbeat_of_a_space_or_worker_that_nobody_knows(story: Story) -> None:
    assert story.beat("w0", space="nowhere") == [False]
    story.send(worker("w0"))
    assert story.beat("w1") == [False]
    assert not story.core.heartbeat(story.now, Heartbeat(worker_id="w0", session="another")).is_known


def test_new_incarnation_takes_the_place_of_the_old_which_can_not_come_back(story: Story) -> None:
    story.send(worker("w0"))
    assert registered(story, worker("w0", incarnation=1)).incarnation == 1
    assert story.beat("w0") == [False]
    story.refuses(worker("w0"), "replaced", "newer incarnation")
    assert there(story) == ["w0"]
    story.restart()
    assert story.refused(worker("w0")).code == "replaced"
    assert registered(story, worker("w0", incarnation=1)).incarnation == 1
    assert registered(story, worker("w0", incarnation=2)).incarnation == 2
    assert [story.refused(worker("w0", incarnation=incarnation)).code for incarnation in (0, 1)] == [
        "replaced",
        "replaced",
    ]


@pytest.mark.parametrize("incarnation", [0, 1])
def test_lost_incarnation_may_register_again_with_its_session_but_not_after_a_newer_one(
    story: Story, incarnation: int
) -> None:
    story.send(worker("w0"))
    story.after(30)
    assert registered(story, worker("w0", incarnation=incarnation)).incarnation == 1
    if incarnation:
        assert story.refused(worker("w0")).code == "replaced"
    else:
        assert story.beat("w0") == [True]


def test_deregistering_twice_is_done_twice_and_a_stranger_can_not_do_it() -> None:
    story = four()
    stranger = story.ask(DeregisterWorker(worker_id="w0", session="another"), Done)
    assert "not registered any more" in stranger.note
    assert there(story) == ["w0", "w1", "w2", "w3"]
    assert story.ask(DeregisterWorker(worker_id="w0", session="w0/0"), Done) == Done()
    assert there(story) == ["w1", "w2", "w3"]
    assert story.ask(DeregisterWorker(worker_id="w0", session="w0/0"), Done).note


def test_rank_has_one_worker_and_is_free_again_when_that_is_gone() -> None:
    story = four()
    story.after(2)
    story.refuses(worker("w9", rank=2), "name-taken", "rank 2 of 4 is held by worker w2, heard from 2.0 s ago")
    story.tell(WorkerGone(space="", worker_id="w2", reason="it was killed"))
    assert registered(story, worker("w9", rank=2)).incarnation == 0
    assert registered(story, worker("w8", rank=2, world_size=8)).incarnation == 0
    assert registered(story, worker("w7", rank=2, world_size=0)).incarnation == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"worker_id": ""}, "worker_id"),
        ({"session": ""}, "session"),
        ({"rank": 4}, "rank 4"),
        ({"rank": -2}, "negative"),
        ({"world_size": -1, "rank": -1}, "negative"),
        ({"timeout_s": 0.0}, "timeout_s=0"),
        ({"timeout_s": float("nan")}, "timeout_s=nan"),
        ({"timeout_s": float("inf")}, "timeout_s=inf"),
    ],
)
def test_bad_registration_is_refused_and_leaves_nothing(fields: dict[str, Any], words: str, story: Story) -> None:
    story.refuses(worker("w0", **fields), "bad-request", words)
    assert (story.store, story.core.spaces) == ({}, {})


def test_unknown_request_is_refused() -> None:
    class Odd(CoordinatorRequest, tag="odd", frozen=True, kw_only=True):
        pass

    assert Story().refused(Odd()).code == "bad-request"


def test_who_runs_a_worker_can_tell_of_its_end() -> None:
    story = four()
    story.tell(WorkerGone(space="", worker_id="w1", reason="it was killed by signal 9"))
    assert story.tell(WorkerGone(space="", worker_id="w1", reason="again")) == []
    assert story.tell(WorkerGone(space="nowhere", worker_id="w1", reason="elsewhere")) == []
    assert there(story) == ["w0", "w2", "w3"]
    assert "signal 9" in story.refused(wait("w1")).reason


def test_coordinator_that_was_stopped_hears_what_was_said_meanwhile() -> None:
    story = four()
    story.now += 100
    assert story.tell(CoordinatorTick()) == []
    assert there(story) == ["w0", "w1", "w2", "w3"]
    assert story.beat("w0", "w1", "w2") == [True] * 3
    story.now += 30
    story.beat("w0", "w1", "w2")
    story.tell(CoordinatorTick())
    assert there(story) == ["w0", "w1", "w2"]


def test_coordinator_that_is_always_late_spares_a_silence_once(story: Story) -> None:
    story.send(worker("w0"))
    story.now += 100
    story.tell(CoordinatorTick())
    assert there(story) == ["w0"]
    story.now += 100
    story.tell(CoordinatorTick())
    assert there(story) == []


def test_loss_of_all_at_once_spreads_their_datasets_once() -> None:
    story = four()
    story.send(dataset())
    for name in ("w0", "w1", "w2", "w3", "other"):
        story.send(SetDataWorker(dataset_id="d", worker_id=name))
    ledger, writes = story.core.spaces[""].datasets["d"].ledger, story.num_writes
    revision = ledger.revision
    story.after(30)
    assert (list(ledger.workers), ledger.revision, story.num_writes) == (["other"], revision + 1, writes + 1)
    assert len(story.shards("d", "other")) == 10


def test_restarted_coordinator_knows_who_is_there_and_gives_them_their_time() -> None:
    story = four()
    story.tell(WorkerGone(space="", worker_id="w1", reason="it was killed"))
    revision = story.core.heartbeat(story.now, Heartbeat(worker_id="w0", session="w0/0")).revision
    story.restart(after_s=100)
    assert there(story) == ["w0", "w2", "w3"]
    assert story.core.heartbeat(story.now, Heartbeat(worker_id="w0", session="w0/0")).revision > revision
    story.after(29)
    story.beat("w0")
    story.after(2)
    assert there(story) == ["w0"]
    assert registered(story, worker("w1", incarnation=1)).incarnation == 1


def test_spaces_see_nothing_of_each_other_and_are_forgotten_whole() -> None:
    story = four()
    for i in range(4):
        story.send(worker(f"w{i}", space="job/1"))
    kept = dict(story.store)
    story.send(worker("w0", space="job", incarnation=7))
    assert there(story, "job") == ["w0"]
    assert len(story.store) == len(kept) + 1
    story.tell(SpaceClosed(space="job"))
    assert story.store == kept
    assert there(story, "job") == []
    assert there(story, "job/1") == ["w0", "w1", "w2", "w3"]
    assert story.tell(SpaceClosed(space="job")) == []
    story.after(31)
    assert there(story, "job/1") == []


def test_those_who_are_gone_are_remembered_up_to_a_limit(story: Story) -> None:
    for i in range(MAX_GONE + 5):
        story.core.step(story.now, RequestCame(token=(b"", i), request=worker(f"x{i}", rank=-1)))
        gone = WorkerGone(space="", worker_id=f"x{i}", reason="it ended")
        if i < MAX_GONE:
            story.core.step(story.now, gone)
        else:
            story.store[("coordinator-worker", f"0//x{i - MAX_GONE}")] = b""
            story.tell(gone)
            assert ("coordinator-worker", f"0//x{i - MAX_GONE}") not in story.store
    assert len(story.core.spaces[""].gone) == MAX_GONE


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode({"info": 1})])
def test_rows_that_can_not_be_read_are_named(data: bytes) -> None:
    with pytest.raises(CoordinatorError, match="cannot be read"):
        CoordinatorCore().restore(0.0, [("coordinator-worker", "0//w0", data)])
