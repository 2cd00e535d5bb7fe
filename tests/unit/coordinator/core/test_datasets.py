"""Datasets of a coordinator: registration, owners of shards, what was read, and what a restart knows of it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.support.coordinator import Story, dataset, done, four, get, spread, worker
from unified.coordinator.core.dataset import MAX_MARKS
from unified.coordinator.core.messages import SpaceClosed, WorkerGone
from unified.coordinator.core.records import MAX_PAST_SESSIONS
from unified.data.shard_cache import ShardCache
from unified.protocol.client_master import Done
from unified.protocol.coordinator import (
    AdvanceEpoch,
    CheckpointResponse,
    DatasetRegistration,
    Datasets,
    DataShards,
    DeregisterWorker,
    DescribeSpaces,
    FileRun,
    GetDatasets,
    GetDataShard,
    Heartbeat,
    MarkDone,
    NotifyCheckpoint,
    SetDataWorker,
    ShardAssignment,
    ShardsDone,
    SpaceList,
    WaitBarrier,
)

NAMES = ["w0", "w1", "w2", "w3"]
ALL = list(range(10))


def everything(story: Story, *workers: str, epoch: int = 0) -> list[int]:
    return sorted(shard_id for name in workers for shard_id in story.shards("d", name, epoch))


def num_rows(story: Story, kind: str) -> int:
    return sum(each == kind for each, _ in story.store)


@pytest.fixture
def story() -> Story:
    return spread(four(), *NAMES)


def test_registering_again_changes_nothing_and_is_not_persisted_again() -> None:
    story = Story()
    first = story.ask(dataset(), DatasetRegistration)
    assert first == DatasetRegistration(dataset_id="d", num_shards=10, epoch=0)
    writes = story.num_writes
    assert story.ask(dataset(), DatasetRegistration) == first
    assert story.num_writes == writes


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"path": "/elsewhere"}, "path is '/data/d', not '/elsewhere'"),
        ({"shard_size": 20}, "shard_size is 10, not 20"),
        ({"shuffle": True, "seed": 1}, "shuffle is False, not True; seed is 0, not 1"),
        ({"files": [FileRun(path="c", num_samples=100)]}, "its 2 files differ from the 1 given"),
    ],
)
def test_another_dataset_of_the_same_name_is_refused_with_what_differs(fields: dict[str, Any], words: str) -> None:
    story = Story()
    story.send(dataset(files=[FileRun(path="a", num_samples=50), FileRun(path="b", num_samples=50)]))
    story.refuses(dataset(**fields), "name-taken", words)
    story.ask(dataset(), DatasetRegistration)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dataset_id": ""}, "dataset_id"),
        ({"path": ""}, "path"),
        ({"total_samples": -1}, "-1 samples"),
        ({"shard_size": 0}, "shards of 0 samples"),
        ({"files": [FileRun(path="a", num_samples=99)]}, "100 samples, and its 1 files have 99"),
        ({"files": [FileRun(path="a", num_samples=101), FileRun(path="b", num_samples=-1)]}, "less than 0"),
    ],
)
def test_dataset_that_is_none_is_refused_and_leaves_nothing(fields: dict[str, Any], words: str) -> None:
    story = Story()
    story.refuses(dataset(**fields), "bad-request", words)
    assert story.store == {}


def test_assignment_says_which_rows_of_which_files() -> None:
    sizes = {"a": 15, "empty": 0, "b": 3, "c": 82}
    story = spread(Story(), "w0", files=[FileRun(path=path, num_samples=size) for path, size in sizes.items()])
    shards = story.ask(get("w0"), DataShards).shards
    assert shards[:3] == [
        ShardAssignment(shard_id=0, file_paths=["a"], start_sample=0, end_sample=10, first_row=0),
        ShardAssignment(shard_id=1, file_paths=["a", "b", "c"], start_sample=10, end_sample=20, first_row=10),
        ShardAssignment(shard_id=2, file_paths=["c"], start_sample=20, end_sample=30, first_row=2),
    ]


def test_without_files_the_path_itself_is_the_file() -> None:
    story = spread(Story(), "w0", total_samples=25)
    last = story.ask(get("w0"), DataShards).shards[-1]
    assert last == ShardAssignment(shard_id=2, file_paths=["/data/d"], start_sample=20, end_sample=25, first_row=20)


def test_dataset_without_samples_has_no_shards() -> None:
    assert spread(Story(), "w0", total_samples=0).ask(get("w0"), DataShards).shards == []


def test_each_shard_is_one_workers_and_every_look_gives_the_same() -> None:
    story = spread(Story(), *NAMES)
    assert everything(story, *NAMES) == ALL
    first = story.ask(get("w1"), DataShards)
    assert story.ask(get("w1"), DataShards) is first


def test_what_was_read_is_not_served_again() -> None:
    story = spread(Story(), "w0", "w1")
    mine = story.shards("d", "w0")
    assert story.ask(done("w0", *mine[:2]), ShardsDone).shard_ids == mine[:2]
    assert story.shards("d", "w0") == mine[2:]
    assert story.ask(done("w0", mine[0]), ShardsDone).shard_ids == []
    assert story.ask(done("w1", mine[3]), ShardsDone).shard_ids == []
    assert everything(story, "w0", "w1") == sorted(set(ALL) - set(mine[:2]))


def test_revision_tells_when_to_ask_again(story: Story) -> None:
    shards = story.ask(get("w0"), DataShards)
    beat = Heartbeat(worker_id="w0", session="w0/0")
    assert story.ask(done("w0", shards.shards[0].shard_id), ShardsDone).revision == shards.revision
    assert story.core.heartbeat(story.now, beat).revision == shards.revision
    story.ask(SetDataWorker(dataset_id="d", worker_id="w9"), Done)
    assert story.core.heartbeat(story.now, beat).revision > shards.revision
    assert story.ask(done("w0"), ShardsDone).revision > shards.revision
    assert story.ask(get("w0"), DataShards).revision > shards.revision


def test_look_has_the_newest_revision_though_nothing_moved(story: Story) -> None:
    first = story.ask(get("w0"), DataShards)
    story.send(worker("other", rank=-1))
    second = story.ask(get("w0"), DataShards)
    assert (second.shards, second.revision) == (first.shards, story.core.spaces[""].revision)
    assert second.revision > first.revision


def test_joining_or_leaving_twice_changes_nothing() -> None:
    story = spread(Story(), "w0", "w1")
    revision, writes = story.core.spaces[""].revision, story.num_writes
    story.ask(SetDataWorker(dataset_id="d", worker_id="w1"), Done)
    story.ask(SetDataWorker(dataset_id="d", worker_id="w7", is_member=False), Done)
    assert (story.core.spaces[""].revision, story.num_writes) == (revision, writes)


def test_unfinished_shards_of_a_lost_worker_go_to_others_until_it_is_back(story: Story) -> None:
    mine = story.shards("d", "w3")
    story.send(done("w3", mine[0]))
    story.tell(WorkerGone(space="", worker_id="w3", reason="it was killed"))
    assert everything(story, "w0", "w1", "w2") == sorted(set(ALL) - {mine[0]})
    story.refuses(get("w3"), "unknown-worker", "it was killed")
    assert story.refused(done("w3", mine[1])).code == "unknown-worker"
    story.send(worker("w3", incarnation=1))
    assert everything(story, *NAMES) == sorted(set(ALL) - {mine[0]})
    assert story.ask(GetDatasets(), Datasets).datasets[0].workers == NAMES


def test_new_incarnation_reads_on_where_the_old_one_was(story: Story) -> None:
    mine = {name: story.shards("d", name) for name in NAMES}
    story.send(done("w3", mine["w3"][0]))
    story.send(worker("w3", incarnation=1))
    assert story.shards("d", "w3") == mine["w3"][1:]
    assert story.shards("d", "w0") == mine["w0"]


def test_a_shard_that_is_being_read_stays_its_readers_over_a_restart() -> None:
    """Though nothing of its epoch is done."""
    story = spread(Story(), "w2", shuffle=True, seed=2)
    first = story.shards("d", "w2")[0]
    writes = story.num_writes
    assert story.shards("d", "w2")[0] == first
    assert story.num_writes == writes, "an epoch is persisted when it is opened, and not with each look"
    story.restart()
    story.ask(SetDataWorker(dataset_id="d", worker_id="w0"), Done)
    assert story.shards("d", "w2")[0] == first
    assert everything(story, "w0", "w2") == ALL


def test_a_look_may_ask_for_the_first_ones_and_tells_how_many_are_left_in_all() -> None:
    story = spread(Story(), "w0", "w1")
    mine = story.shards("d", "w0")
    few = story.ask(replace(get("w0"), limit=2), DataShards)
    assert ([each.shard_id for each in few.shards], few.num_left) == (mine[:2], 10)
    assert story.shards("d", "w0") == mine, "what was asked without a limit is another answer"
    story.send(done("w1", *story.shards("d", "w1")))
    assert story.ask(replace(get("w0"), limit=100), DataShards).num_left == len(mine)
    story.send(done("w0", *mine))
    assert story.ask(replace(get("w0"), limit=2), DataShards).num_left == 0
    assert story.refused(replace(get("w0"), limit=-1)).code == "bad-request"


def test_worker_that_left_in_order_is_in_its_datasets_no_more(story: Story) -> None:
    story.send(DeregisterWorker(worker_id="w3", session="w3/0"))
    story.send(worker("w3", incarnation=1))
    story.refuses(get("w3", incarnation=1), "not-found", "over w0, w1, w2")


def test_nobody_gives_shards_to_a_worker_that_is_lost(story: Story) -> None:
    story.tell(WorkerGone(space="", worker_id="w3", reason="it was killed"))
    note = story.ask(SetDataWorker(dataset_id="d", worker_id="w3"), Done).note
    assert "joins when it registers again" in note
    assert everything(story, "w0", "w1", "w2") == ALL
    story.ask(SetDataWorker(dataset_id="d", worker_id="w3", is_member=False), Done)
    story.restart()
    story.send(worker("w3", incarnation=1))
    assert story.refused(get("w3", incarnation=1)).code == "not-found"


def test_an_incarnation_that_was_replaced_can_neither_ask_nor_mark_nor_leave(story: Story) -> None:
    mine = story.shards("d", "w3")
    story.send(worker("w3", incarnation=1))
    writes = story.num_writes
    for is_restarted in (False, True):
        if is_restarted:
            story.restart()
        for request in (
            get("w3"),
            done("w3", mine[0]),
            SetDataWorker(dataset_id="d", worker_id="w3", session="w3/0", is_member=False),
        ):
            story.refuses(request, "replaced", "newer incarnation")
    assert story.num_writes == writes
    assert story.ask(done("w3", mine[0], incarnation=1), ShardsDone).shard_ids == [mine[0]]


def test_only_a_registered_worker_itself_says_what_it_has_read_and_anybody_may_ask(story: Story) -> None:
    mine = story.shards("d", "w3")
    story.refuses(
        MarkDone(dataset_id="d", worker_id="w3", epoch=0, shard_ids=mine), "bad-request", "only that incarnation"
    )
    assert story.shards("d", "w3") == mine
    story.ask(SetDataWorker(dataset_id="d", worker_id="w3", is_member=False), Done)
    assert everything(story, "w0", "w1", "w2") == ALL


def test_a_worker_that_registered_elsewhere_is_known_here_by_its_id() -> None:
    story = spread(Story(), "w0", "w1")
    mine = [each.shard_id for each in story.ask(get("w0"), DataShards).shards]
    assert story.ask(done("w0", *mine), ShardsDone).shard_ids == mine


def test_another_run_may_count_on_workers_of_which_the_last_one_was_lost(story: Story) -> None:
    for name in NAMES:
        story.tell(WorkerGone(space="", worker_id=name, reason="it was killed"))
    story.send(worker("w0", incarnation=1))
    for name in NAMES:
        assert story.ask(SetDataWorker(dataset_id="d", worker_id=name), Done) == Done()
    assert everything(story, *NAMES) == ALL
    story.send(worker("w1", incarnation=1))
    assert everything(story, *NAMES) == ALL


def test_epochs_go_forward_only() -> None:
    story = spread(Story(), "w0", "w1")
    story.send(done("w0", story.shards("d", "w0")[0]))
    assert everything(story, "w0", "w1", epoch=1) == ALL
    assert story.ask(AdvanceEpoch(dataset_id="d", epoch=1), Done) == Done()
    assert "in epoch 1" in story.ask(AdvanceEpoch(dataset_id="d", epoch=0), Done).note
    story.refuses(get("w0", epoch=0), "ended", "the current one is 1")
    assert story.ask(done("w0", 0, epoch=0), ShardsDone).shard_ids == []
    assert story.ask(dataset(), DatasetRegistration).epoch == 1


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (GetDataShard(dataset_id="dd", worker_id="w0", epoch=0), "not-found", "Did you mean 'd'?"),
        (MarkDone(dataset_id="x", worker_id="w0", epoch=0, shard_ids=[]), "not-found", "no dataset 'x'"),
        (SetDataWorker(dataset_id="x", worker_id="w0"), "not-found", "no dataset 'x'"),
        (AdvanceEpoch(dataset_id="x", epoch=1), "not-found", "no dataset 'x'"),
        (SetDataWorker(dataset_id="d", worker_id=""), "bad-request", "worker_id"),
        (AdvanceEpoch(dataset_id="d", epoch=-1), "bad-request", "no epoch -1"),
        (GetDataShard(dataset_id="d", worker_id="w0", epoch=-1), "bad-request", "no epoch -1"),
        (GetDataShard(dataset_id="d", worker_id="w9", epoch=0), "not-found", "not spread over worker w9, but over w0"),
        (MarkDone(dataset_id="d", worker_id="w0", epoch=0, shard_ids=[10]), "bad-request", "no shard 10"),
        (MarkDone(dataset_id="d", worker_id="w0", epoch=-1, shard_ids=[1]), "bad-request", "no epoch -1"),
    ],
)
def test_bad_requests_change_nothing(request_: Any, code: str, words: str) -> None:
    story = spread(Story(), "w0")
    store = dict(story.store)
    story.refuses(request_, code, words)
    assert story.store == store


def test_listing_shows_progress_and_spaces_keep_apart() -> None:
    story = spread(four(), "w0", "w1")
    story.send(done("w0", story.shards("d", "w0")[0]))
    listing = story.ask(GetDatasets(), Datasets)
    assert listing.workers == NAMES
    (status,) = listing.datasets
    assert (status.dataset_id, status.num_shards, status.epoch, status.num_done) == ("d", 10, 0, 1)
    assert status.workers == ["w0", "w1"]
    assert story.ask(GetDatasets(space="job"), Datasets) == Datasets(datasets=[], workers=[])
    story.tell(SpaceClosed(space=""))
    assert story.store == {}


def test_all_of_a_space_is_told_to_those_who_look() -> None:
    story = spread(four(), "w0", "w1")
    story.send(WaitBarrier(barrier_id="b", worker_id="w1", session="w1/0", arrival=1, world_size=4))
    story.ask(NotifyCheckpoint(worker_id="w0", step=7, path="/c/7", size_bytes=5, world_size=4), CheckpointResponse)
    (found,) = story.ask(DescribeSpaces(is_every_space=True), SpaceList).spaces
    assert (found.space, [worker.worker_id for worker in found.workers]) == ("", NAMES)
    assert [(dataset.dataset_id, dataset.workers) for dataset in found.datasets] == [("d", ["w0", "w1"])]
    (barrier,) = found.barriers
    assert (barrier.barrier_id, barrier.arrived, barrier.missing) == ("b", ["w1"], ["w0", "w2", "w3"])
    (checkpoint,) = found.checkpoints
    assert (checkpoint.name, checkpoint.step, checkpoint.size_bytes, checkpoint.world_size) == ("default", 7, 5, 4)
    (nothing,) = story.ask(DescribeSpaces(space="job"), SpaceList).spaces
    assert (nothing.space, nothing.datasets, nothing.workers) == ("job", [], [])
    assert "job" not in story.core.spaces


def test_restarted_coordinator_knows_membership_and_progress() -> None:
    story = spread(four(), *NAMES, shuffle=True, seed=3)
    shards = {name: story.shards("d", name) for name in NAMES}
    story.send(done("w1", shards["w1"][0]))
    story.send(done("w2", *shards["w2"]))
    revision = story.core.spaces[""].revision
    story.restart()
    assert {name: story.shards("d", name) for name in NAMES} == {**shards, "w1": shards["w1"][1:], "w2": []}
    assert story.ask(get("w0"), DataShards).revision > revision
    assert story.ask(done("w2", shards["w2"][0]), ShardsDone).shard_ids == []
    assert story.ask(dataset(shuffle=True, seed=3), DatasetRegistration).num_shards == 10
    assert story.ask(done("w3", shards["w3"][0]), ShardsDone).shard_ids == [shards["w3"][0]]
    story.restart()
    assert story.shards("d", "w3") == shards["w3"][1:]


def test_marks_are_gathered_now_and_then_and_with_each_change_of_members() -> None:
    story = spread(Story(), "w0", total_samples=MAX_MARKS + 10, shard_size=1)
    for shard_id in range(MAX_MARKS):
        story.send(done("w0", shard_id))
    assert num_rows(story, "coordinator-mark") == MAX_MARKS
    story.send(done("w0", MAX_MARKS))
    assert num_rows(story, "coordinator-mark") == 0
    story.send(done("w0", MAX_MARKS + 1))
    story.restart()
    assert story.shards("d", "w0") == list(range(MAX_MARKS + 2, MAX_MARKS + 10))
    story.send(done("w0", MAX_MARKS + 2))
    assert num_rows(story, "coordinator-mark") == 2
    story.send(SetDataWorker(dataset_id="d", worker_id="w1"))
    assert num_rows(story, "coordinator-mark") == 0
    story.restart()
    assert everything(story, "w0", "w1") == list(range(MAX_MARKS + 3, MAX_MARKS + 10))


STEPS = ["begin", "end", "begin", "end", "join", "crash", "leave", "replace", "haunt", "restart"]
EPOCHS = 2
SHARDS = 12


class Reader:
    """A worker that reads as it should: it reports each shard before it begins the next, and goes on to the next epoch
    when nothing is left of this one, whoever had it."""

    def __init__(self, story: Story, name: str, incarnation: int, at_once: int) -> None:
        self.story = story
        self.name = name
        self.incarnation = incarnation
        story.send(worker(name, incarnation, world_size=0))
        story.send(SetDataWorker(dataset_id="d", worker_id=name, session=f"{name}/{incarnation}"))
        self.known = ShardCache(at_once)
        self.epoch = 0
        self.reading: int | None = None

    @property
    def place(self) -> tuple[int, int] | None:
        """Epoch and shard that it is reading."""
        return None if self.reading is None else (self.epoch, self.reading)

    def begin(self) -> tuple[int, int] | None:
        if self.reading is not None:
            return None
        shards = self.known.take(self.epoch)
        if shards is None:
            request = replace(get(self.name, self.epoch, self.incarnation), limit=self.known.at_once)
            answer = self.story.ask(request, DataShards)
            shards = self.known.learn(self.epoch, answer)
            self.epoch += answer.num_left == 0 and self.epoch + 1 < EPOCHS
        self.reading = shards[0].shard_id if shards else None
        return self.place

    def end(self) -> list[tuple[int, int]]:
        if self.reading is None:
            return []
        answer = self.story.ask(
            done(self.name, self.reading, epoch=self.epoch, incarnation=self.incarnation), ShardsDone
        )
        self.known.finish(self.epoch, [self.reading], answer)
        self.reading = None
        return [(self.epoch, shard_id) for shard_id in answer.shard_ids]

    def go_on_after_the_end(self) -> None:
        """Its incarnation is over, and it does not know: whatever it does changes nothing."""
        known = list(self.story.store.items())
        for request in (
            get(self.name, incarnation=self.incarnation),
            done(self.name, *range(SHARDS), incarnation=self.incarnation),
            SetDataWorker(
                dataset_id="d", worker_id=self.name, session=f"{self.name}/{self.incarnation}", is_member=False
            ),
        ):
            assert self.story.refused(request).code in ("replaced", "unknown-worker")
        assert list(self.story.store.items()) == known


@settings(max_examples=100)
@given(
    st.booleans(),
    st.sampled_from([4, 100]),
    st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 3)), min_size=20, max_size=80),
)
def test_each_shard_is_read_once_but_for_what_the_lost_had_begun(
    shuffle: bool, at_once: int, script: list[tuple[str, int]]
) -> None:
    story = spread(Story(), shuffle=shuffle, total_samples=SHARDS * 10)
    readers: dict[str, Reader] = {}
    incarnations: dict[str, int] = {}
    begun: list[tuple[int, int]] = []
    counted: list[tuple[int, int]] = []
    given_up: list[tuple[int, int]] = []
    ghosts: list[Reader] = []

    def play(what: str, name: str) -> None:
        reader = readers.get(name)
        if what == "restart":
            story.restart()
        elif what == "join" and reader is None:
            incarnations[name] = incarnations.get(name, -1) + 1
            readers[name] = Reader(story, name, incarnations[name], at_once)
        elif what == "haunt":
            for ghost in ghosts:
                if incarnations[ghost.name] - ghost.incarnation <= MAX_PAST_SESSIONS:
                    ghost.go_on_after_the_end()
        elif reader is None:
            return
        elif what == "begin" and (place := reader.begin()) is not None:
            begun.append(place)
        elif what == "end":
            counted.extend(reader.end())
        elif what in ("crash", "leave", "replace"):
            if reader.place is not None:
                given_up.append(reader.place)
            ghosts.append(reader)
            if what == "replace":
                incarnations[name] += 1
                readers[name] = Reader(story, name, incarnations[name], at_once)
                return
            session = f"{name}/{incarnations[name]}"
            if what == "crash":
                story.tell(WorkerGone(space="", worker_id=name, reason="it was killed"))
            else:
                story.send(DeregisterWorker(worker_id=name, session=session))
            del readers[name]

    for what, number in script:
        play(what, f"w{number}")
    play("join", "w0")
    play("haunt", "w0")
    every = [(epoch, shard_id) for epoch in range(EPOCHS) for shard_id in range(SHARDS)]
    for _ in range(len(every) + 2 * EPOCHS):
        for name in list(readers):
            play("begin", name)
            play("end", name)
    assert sorted(counted) == every
    for place in given_up:
        begun.remove(place)
    assert sorted(begun) == every
