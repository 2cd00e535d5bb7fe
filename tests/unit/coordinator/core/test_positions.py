"""Data that go on from a position in a checkpoint: what was read after it comes again, once, for all who go back."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.coordinator import Story, done, four, spread, worker
from unified.coordinator.core.messages import SpaceClosed, WorkerGone
from unified.protocol.client_master import Done
from unified.protocol.coordinator import (
    AdvanceEpoch,
    GetDatasets,
    GetDataShard,
    MarkDone,
    RestorePosition,
    SetDataWorker,
    ShardsDone,
)
from unified.protocol.coordinator import Datasets as Listing

NAMES = ["w0", "w1", "w2"]


def load(name: str, *shard_ids: int, process: str = "", number: int = 1, **fields: Any) -> RestorePosition:
    """By a worker of which nobody knows whether it runs."""
    values = {"epoch": 0, "dataset_id": "d", "worker_id": name, **fields}
    return RestorePosition(done=list(shard_ids), process=process or name, number=number, **values)


def mark(name: str, *shard_ids: int, incarnation: int = -1) -> MarkDone:
    return MarkDone(dataset_id="d", worker_id=name, epoch=0, shard_ids=list(shard_ids), incarnation=incarnation)


def left(story: Story, *names: str, epoch: int = 0) -> list[int]:
    return sorted(shard for name in names for shard in story.shards("d", name, epoch))


def without(*shard_ids: int) -> list[int]:
    return [shard_id for shard_id in range(10) if shard_id not in shard_ids]


def test_what_was_read_after_the_position_comes_again_and_a_restart_knows_it() -> None:
    story = spread(Story(), "w0", "w1")
    for name in ("w0", "w1"):
        story.send(mark(name, *story.shards("d", name)))
    story.ask(AdvanceEpoch(dataset_id="d", epoch=1), Done)
    story.ask(load("w0", 2, 4), Done)
    for _ in range(2):
        assert left(story, "w0", "w1") == without(2, 4)
        assert left(story, "w0", "w1", epoch=1) == without()
        assert story.ask(GetDatasets(), Listing).datasets[0].epoch == 0
        story.restart()
    assert [report.event for report in story.reports][-1] == "dataset-restored"
    story.tell(SpaceClosed(space=""))
    assert story.store == {}


@pytest.mark.parametrize("is_restarted", [False, True])
def test_who_loads_later_undoes_nothing_and_another_position_is_refused(is_restarted: bool) -> None:
    story = spread(Story(), *NAMES)
    story.ask(load("w0", 2), Done)
    mine = story.shards("d", "w0")[0]
    story.send(mark("w0", mine))
    if is_restarted:
        story.restart()
    for wrong in (load("w1", 3), load("w1", 2, epoch=1), load("w1", 2, begun=[(3, 1)]), load("w1")):
        story.refuses(wrong, "bad-request", "w0 loaded another position")
    story.ask(load("w1", 2, 2), Done)
    story.ask(load("w2", 2), Done)
    assert left(story, *NAMES) == without(2, mine)


def test_asked_again_it_is_the_same_and_loaded_again_it_is_another_time() -> None:
    story = spread(Story(), *NAMES)
    for name in NAMES:
        story.ask(load(name, 2, number=4), Done)
    mine = story.shards("d", "w0")[0]
    story.send(mark("w0", mine))
    store = dict(story.store)
    for again in (load("w0", 2, number=4), load("w0", 5, number=0)):
        assert "already" in story.ask(again, Done).note
    assert story.store == store
    story.ask(load("w0", 2, number=5), Done)  # all go back once more, in these same processes
    assert left(story, *NAMES) == without(2)
    story.send(mark("w0", mine))
    for name in NAMES[1:]:
        story.ask(load(name, 2, number=5), Done)
    assert left(story, *NAMES) == without(2, mine)


def test_where_nobody_knows_who_runs_a_new_process_of_one_is_a_new_round_of_all() -> None:
    story = spread(Story(), *NAMES)
    for name in NAMES:
        story.ask(load(name, 2), Done)
        story.send(mark(name, *story.shards("d", name)[:1]))
    story.ask(load("w1", 2, process="next of w1"), Done)
    assert left(story, *NAMES) == without(2)
    mine = story.shards("d", "w1")[0]
    story.send(mark("w1", mine))
    story.ask(load("w0", 2, process="next of w0"), Done)
    assert left(story, *NAMES) == without(2, mine)


def test_a_new_incarnation_of_one_joins_those_that_run_and_cannot_take_the_data_back_from_them() -> None:
    incarnations = {"w0": 0, "w1": 0}
    story = spread(Story(), "w0", "w1")
    for name in incarnations:
        story.ask(load(name, 2, incarnation=0), Done, incarnations)
    mine = story.shards("d", "w0")[0]
    story.send(mark("w0", mine, incarnation=0))
    incarnations["w1"] = 1
    assert "w0 loaded another" in story.refused(load("w1", process="1 of w1", incarnation=1), incarnations).reason
    story.ask(load("w1", 2, process="1 of w1", incarnation=1), Done, incarnations)
    assert left(story, "w0", "w1") == without(2, mine)
    incarnations = {"w1": 2}  # w0 has come to its end
    story.ask(load("w1", 7, process="2 of w1", incarnation=2), Done, incarnations)
    assert left(story, "w0", "w1") == without(7)


def test_who_reads_on_without_a_position_is_not_taken_back_by_another() -> None:
    incarnations = {"w0": 0, "w1": 1}
    story = spread(Story(), "w0", "w1")
    mine = story.shards("d", "w0")[0]
    story.send(mark("w0", mine, incarnation=0))
    story.refuses(load("w1", incarnation=1), "bad-request", "alone: w0 read on", incarnations=incarnations)
    assert left(story, "w0", "w1") == without(mine)
    story.ask(load("w1", incarnation=1), Done, {"w0": 1, "w1": 1})
    assert left(story, "w0", "w1") == without()


def test_reading_on_counts_from_the_last_time_that_all_went_back() -> None:
    incarnations = {"w0": 0, "w1": 0}
    story = spread(Story(), "w0", "w1")
    for name in incarnations:
        story.send(mark(name, story.shards("d", name)[0], incarnation=0))
    story.ask(load("w0", 2, incarnation=0), Done, incarnations)
    incarnations["w0"] = 1
    story.ask(load("w0", 2, process="1 of w0", incarnation=1), Done, incarnations)
    story.send(mark("w1", story.shards("d", "w1")[0], incarnation=0))
    incarnations["w0"] = 2
    assert "w1 read on" in story.refused(load("w0", 2, process="2 of w0", incarnation=2), incarnations).reason


def test_registered_workers_are_known_to_run_until_they_are_lost() -> None:
    story = spread(four(), "w0", "w1")
    for name in ("w0", "w1"):
        story.ask(load(name, 2, session=f"{name}/0"), Done)
    mine = story.shards("d", "w0")[0]
    story.ask(done("w0", mine), ShardsDone)
    story.send(worker("w1", incarnation=1))
    story.ask(load("w1", 2, session="w1/1", process="1 of w1"), Done)
    assert left(story, "w0", "w1") == without(2, mine)
    assert story.refused(load("w1", session="w1/0")).code == "replaced"
    story.tell(WorkerGone(space="", worker_id="w0", reason="it was killed"))
    story.send(worker("w1", incarnation=2))
    story.ask(load("w1", 5, session="w1/2", process="2 of w1"), Done)
    assert left(story, "w1") == without(5)


def test_a_smaller_world_takes_over_and_those_that_run_stay() -> None:
    story = spread(Story(), *NAMES, "other")
    story.ask(load("w0", world=["w0", "w1"], incarnation=1), Done, {"w0": 1, "w1": 1, "other": 0})
    assert story.ask(GetDatasets(), Listing).datasets[0].workers == ["other", "w0", "w1"]
    assert left(story, "other", "w0", "w1") == without()


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (load("w0", 10), "no shard 10"),
        (load("w0", begun=[(11, 2)]), "no shard 11"),
        (load("w0", epoch=-1), "no epoch -1"),
    ],
)
def test_a_position_that_cannot_be_changes_nothing(request_: RestorePosition, words: str) -> None:
    story = spread(Story(), "w0")
    store = dict(story.store)
    story.refuses(request_, "bad-request", words)
    assert story.store == store


STEPS = st.tuples(st.sampled_from(["read", "load", "save", "crash", "restart"]), st.integers(0, 2))


@settings(max_examples=120)
@given(st.booleans(), st.lists(STEPS, max_size=60))
def test_a_model_that_goes_back_with_its_data_learns_from_every_shard_once(
    shuffle: bool, script: list[tuple[str, int]]
) -> None:
    """Ranks of an elastic role: each incarnation loads when it comes to it, reads, and dies with all others."""
    story = spread(Story(), *NAMES, shuffle=shuffle)
    saved: list[int] = []
    model: Counter[int] = Counter()
    incarnation, loaded = 0, set[str]()

    def play(what: str, name: str) -> None:
        nonlocal saved, model, incarnation, loaded
        if what == "restart":
            story.restart()
        elif what == "save" and len(loaded) == len(NAMES):
            saved = sorted(model)
        elif what == "crash":
            incarnation, loaded, model = incarnation + 1, set(), Counter(saved)
        elif what in ("load", "read") and name not in loaded:
            request = load(
                name, *saved, process=f"{name}/{incarnation}", number=incarnation % 2, incarnation=incarnation
            )
            story.ask(request, Done, dict.fromkeys(NAMES, incarnation))
            loaded.add(name)
        elif what == "read":
            about: dict[str, Any] = {"dataset_id": "d", "worker_id": name, "incarnation": incarnation, "epoch": 0}
            if shards := story.shards("d", name):
                model.update(story.ask(MarkDone(shard_ids=shards[:1], **about), ShardsDone).shard_ids)
            story.send(GetDataShard(**about))

    for what, number in script:
        play(what, NAMES[number])
        story.send(SetDataWorker(dataset_id="d", worker_id=NAMES[number]))
    for _ in range(11):
        for name in NAMES:
            play("read", name)
    assert model == Counter(range(10))
