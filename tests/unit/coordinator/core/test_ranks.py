"""Members of a dataset are ranks: one a rank whatever its worker calls itself, and none that never comes."""

import pytest
from msgspec.structs import replace

from tests.support.coordinator import Story, dataset, killed, worker
from unified.coordinator.core.shards.assignment import spread_files
from unified.protocol.client_master import Done
from unified.protocol.coordinator import (
    DatasetRegistration,
    Datasets,
    DataShards,
    DeregisterWorker,
    FileRun,
    GetDatasets,
    GetDataShard,
    GetRankFiles,
    MarkDone,
    RankFiles,
    RegisterWorker,
    RestorePosition,
    SetDataWorker,
    ShardsDone,
)

ALL = list(range(10))
AWAIT_S = 30.0


def calls_itself(name: str, rank: int, world_size: int = 2) -> RegisterWorker:
    """A worker of rank `rank`, which datasets have as ``r0``, ``r1`` …"""
    return worker(name, rank=rank, world_size=world_size, member=f"r{rank}")


def joins(name: str, *, is_awaited: bool = False) -> SetDataWorker:
    return SetDataWorker(dataset_id="d", worker_id=name, is_awaited=is_awaited)


def begun_by_rank_0(story: Story) -> Story:
    """As a registry of a world of two does it: it joins, and names the other."""
    story.ask(dataset(), DatasetRegistration)
    story.ask(joins("r0"), Done)
    story.ask(joins("r1", is_awaited=True), Done)
    return story


def members(story: Story) -> list[str]:
    return story.ask(GetDatasets(), Datasets).datasets[0].workers


def asks(member: str, name: str) -> GetDataShard:
    return GetDataShard(dataset_id="d", worker_id=member, session=f"{name}/0", epoch=0)


def shards(story: Story, request: GetDataShard) -> list[int]:
    return [each.shard_id for each in story.ask(request, DataShards).shards]


def test_a_rank_is_one_member_whatever_its_worker_calls_itself() -> None:
    story = begun_by_rank_0(Story())
    assert members(story) == ["r0", "r1"]
    story.send(calls_itself("alpha", 0))
    story.send(calls_itself("beta", 1))
    assert members(story) == ["alpha", "beta"]
    mine, others = shards(story, asks("r0", "alpha")), shards(story, asks("r1", "beta"))
    assert sorted(mine + others) == ALL
    assert shards(story, GetDataShard(dataset_id="d", worker_id="beta", is_id=True, epoch=0)) == others
    story.after(10 * AWAIT_S)
    assert not [each for each in story.reports if each.event == "data-worker-absent"]


def test_names_may_be_those_of_other_ranks() -> None:
    """As where ids count from 1."""
    story = begun_by_rank_0(Story())
    story.send(calls_itself("r1", 0))
    story.send(calls_itself("r2", 1))
    mine, others = shards(story, asks("r0", "r1")), shards(story, asks("r1", "r2"))
    assert sorted(mine + others) == ALL
    assert shards(story, GetDataShard(dataset_id="d", worker_id="r1", is_id=True, epoch=0)) == mine
    story.tell(killed("r1"))  # as its job calls the worker of rank 1
    assert story.ask(GetDatasets(), Datasets).workers == ["r1"]
    assert shards(story, asks("r0", "r1")) == ALL


def test_shards_of_one_that_never_comes_go_to_others_and_that_is_said() -> None:
    story = begun_by_rank_0(Story())
    mine = shards(story, GetDataShard(dataset_id="d", worker_id="r0", epoch=0))
    story.after(AWAIT_S - 1)
    story.restart()
    assert members(story) == ["r0", "r1"]
    story.after(AWAIT_S)
    assert members(story) == ["r0"]
    assert sorted(shards(story, GetDataShard(dataset_id="d", worker_id="r0", epoch=0))) == ALL
    (said,) = [each for each in story.reports if each.event == "data-worker-absent"]
    assert said.worker_id == "r1"
    assert "dataset 'd' was spread over it, and for 30 s it neither registered nor asked" in said.reason
    assert f"its {10 - len(mine)} shards of epoch 0 go to others" in said.reason
    story.restart()
    assert members(story) == ["r0"]
    story.ask(joins("r1"), Done)  # it was slow to start
    assert members(story) == ["r0", "r1"]
    story.after(10 * AWAIT_S)
    assert members(story) == ["r0", "r1"]


@pytest.mark.parametrize(
    "request_",
    [
        calls_itself("beta", 1),
        joins("r1"),
        GetDataShard(dataset_id="d", worker_id="r1", epoch=0),
        MarkDone(dataset_id="d", worker_id="r1", epoch=0, shard_ids=[]),
        RestorePosition(dataset_id="d", worker_id="r1", epoch=0, done=[], process="p", number=1),
    ],
    ids=lambda request: type(request).__name__,
)
def test_one_that_registers_or_asks_is_awaited_no_more(request_: object) -> None:
    story = begun_by_rank_0(Story())
    story.send(request_)  # type: ignore[arg-type]
    story.restart()
    story.beat("beta")
    assert story.core.spaces[""].datasets["d"].awaited == set()
    assert not story.core.timers.awaited.next_deadline


def test_nobody_is_given_up_while_nobody_has_come() -> None:
    """As where a launcher registers the dataset long before its workers begin."""
    story = Story()
    story.ask(dataset(), DatasetRegistration)
    for name in ("r0", "r1"):
        story.ask(joins(name, is_awaited=True), Done)
    story.after(100 * AWAIT_S)
    assert members(story) == ["r0", "r1"]
    story.ask(joins("r1"), Done)
    story.after(2 * AWAIT_S)
    assert members(story) == ["r1"]


def test_one_that_has_registered_is_not_awaited_by_datasets_made_later() -> None:
    story = Story()
    story.send(calls_itself("beta", 1))
    begun_by_rank_0(story)
    assert story.core.spaces[""].datasets["d"].awaited == set()
    story.tell(killed("r1"))
    assert members(story) == ["r0"]


def test_a_rank_that_comes_back_under_another_name_reads_on() -> None:
    story = begun_by_rank_0(Story())
    story.send(calls_itself("alpha", 0))
    story.send(calls_itself("beta", 1))
    shards(story, asks("r1", "beta"))
    story.tell(killed("r1"))
    assert members(story) == ["alpha"]
    story.send(calls_itself("gamma", 1))
    story.ask(replace(joins("r1"), session="gamma/0"), Done)
    assert members(story) == ["alpha", "gamma"]
    assert sorted(shards(story, asks("r0", "alpha")) + shards(story, asks("r1", "gamma"))) == ALL
    mine = shards(story, asks("r1", "gamma"))
    assert story.refused(MarkDone(dataset_id="d", worker_id="r1", epoch=0, shard_ids=mine)).code == "bad-request"
    done = MarkDone(dataset_id="d", worker_id="r1", session="gamma/0", epoch=0, shard_ids=mine)
    assert story.ask(done, ShardsDone).shard_ids == mine
    story.restart()
    assert members(story) == ["alpha", "gamma"]
    story.send(DeregisterWorker(worker_id="gamma", session="gamma/0"))
    assert members(story) == ["alpha"]


def files(**sizes: int) -> list[FileRun]:
    return [FileRun(path=path, num_samples=size) for path, size in sizes.items()]


def rank_files(story: Story, rank: int, world_size: int, epoch: int = 0) -> RankFiles:
    request = GetRankFiles(dataset_id="d", worker_id=f"r{rank}", epoch=epoch, rank=rank, world_size=world_size)
    return story.ask(request, RankFiles)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world_size", [1, 3, 4, 7])
def test_each_file_is_one_ranks(shuffle: bool, world_size: int) -> None:
    story = Story()
    sizes = {f"f{number}": 10 for number in range(10)}
    story.ask(dataset(files=files(**sizes, empty=0), shuffle=shuffle, seed=3), DatasetRegistration)
    epochs = []
    for epoch in range(3):
        lists = [rank_files(story, rank, world_size, epoch).file_paths for rank in range(world_size)]
        assert sorted(path for each in lists for path in each) == sorted(sizes)
        assert max(map(len, lists)) - min(map(len, lists)) <= 1
        epochs.append(lists)
    assert (epochs[0] == epochs[1] == epochs[2]) is not shuffle
    story.restart()
    assert [rank_files(story, rank, world_size, 2).file_paths for rank in range(world_size)] == epochs[2]


def test_ranks_have_as_many_rows_as_each_other_as_far_as_files_allow() -> None:
    assert spread_files([50, 10, 10, 10, 20, 0, 10, 10], 3, range(8)) == [[0], [3, 4, 7], [1, 2, 6]]


def test_ranks_without_a_file_are_named() -> None:
    story = Story()
    story.ask(dataset(files=files(a=60, b=40)), DatasetRegistration)
    assert rank_files(story, 0, 4) == RankFiles(file_paths=["a"], num_files=2, idle=[2, 3])
    assert rank_files(story, 3, 4).file_paths == []
    story = Story()
    story.ask(dataset(), DatasetRegistration)
    assert rank_files(story, 0, 2) == RankFiles(file_paths=["/data/d"], num_files=1, idle=[1])


def test_the_world_is_as_workers_have_registered_or_an_error_says_what_to_set() -> None:
    story = Story()
    story.ask(dataset(files=files(a=60, b=40)), DatasetRegistration)
    request = GetRankFiles(dataset_id="d", worker_id="r1", epoch=0, rank=1)
    story.refuses(request, "world-unknown", "Set WORLD_SIZE", "nobody has yet")
    story.send(calls_itself("beta", 1))
    assert story.ask(request, RankFiles).file_paths == ["b"]
    by_id = GetRankFiles(dataset_id="d", worker_id="beta", is_id=True, epoch=0)
    assert story.ask(by_id, RankFiles).file_paths == ["b"]
    assert "has registered no rank" in story.refused(replace(by_id, worker_id="nobody")).reason
    assert "rank 2 is not in a world of 2" in story.refused(replace(request, rank=2)).reason
    story.send(calls_itself("other", 0, world_size=3))
    assert "world sizes 2, 3" in story.refused(request).reason
