"""Each message between workers and their coordinator: what it does, by the classes that users meet, on a real master.

What is enumerated here is enumerated by the protocol, so that a message without a case is a failure.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar, get_args

import msgspec
import pytest

from tests.support.data_files import samples, write_jsonl
from tests.support.deadlines import met, missed
from tests.support.master_process import MasterProcess
from unified.checkpoint import CheckpointManager
from unified.coordinator.client import Coordinator, RemoteCoordinator
from unified.core.backoff import Backoff
from unified.data import DatasetRegistry, TrainingOrchestrator
from unified.errors import BarrierError, CheckpointSaveError, CoordinatorError, WorkerUnknownError
from unified.protocol.client_master import Done, Refused
from unified.protocol.coordinator import (
    AdvanceEpoch,
    BarrierResponse,
    CheckpointResponse,
    CoordinatorRequest,
    CoordinatorToWorker,
    DatasetRegistration,
    Datasets,
    DataShards,
    DeregisterWorker,
    DescribeSpaces,
    GetDatasets,
    GetDataShard,
    GetLatestCheckpoint,
    GetRankFiles,
    Heartbeat,
    HeartbeatResponse,
    LeaveBarrier,
    MarkDone,
    NotifyCheckpoint,
    RankFiles,
    RecoveryInfo,
    RegisterDataset,
    RegisterWorker,
    RestorePosition,
    SetDataWorker,
    ShardsDone,
    SpaceList,
    TellEvent,
    WaitBarrier,
    WorkerRegistration,
    WorkerToCoordinator,
)
from unified.testing import eventually

A = TypeVar("A")


class Listener(Coordinator):
    """A coordinator, and the kinds of messages that went there and came back."""

    def __init__(self, master: MasterProcess) -> None:
        self.master = master
        self.seen: set[type] = set()
        self._behind = RemoteCoordinator(master.address)

    def submit(self, request: CoordinatorRequest, expected: type[A], *, timeout_s: float | None = None) -> Future[A]:
        self.seen.add(type(request))
        future = self._behind.submit(request, expected, timeout_s=timeout_s)
        future.add_done_callback(self._note)
        return future

    def close(self) -> None:
        self._behind.close()

    def _note(self, future: Future[A]) -> None:
        if not future.cancelled():
            self.seen.add(Refused if future.exception() else type(future.result()))


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterProcess]:
    started = MasterProcess(tmp_path_factory.mktemp("master"))
    yield started
    started.kill()


@pytest.fixture
def coordinator(master: MasterProcess) -> Iterator[Listener]:
    with Listener(master) as listener:
        yield listener


def a_dataset(coordinator: Listener, folder: Path, name: str, num_workers: int = 2) -> list[DatasetRegistry]:
    """Its registries, by rank; 12 samples in shards of 2."""
    write_jsonl(folder / "data.jsonl", samples(0, 12))
    registries = [DatasetRegistry(coordinator, rank=rank, world_size=num_workers) for rank in range(num_workers)]
    for registry in registries:
        registry.register(name, folder / "data.jsonl", "jsonl", shard_size=2)
    return registries


def shards_of(registry: DatasetRegistry, name: str, epoch: int = 0) -> list[int]:
    return [shard.shard_id for shard in registry.get_assignment(name, epoch=epoch)]


async def register_worker(coordinator: Listener, folder: Path) -> None:
    """Makes it known to all, with what it says of itself; and nobody else may have its rank."""
    worker = TrainingOrchestrator("reg", coordinator, 7, 3)
    assert await worker.register_worker("10.0.0.1", 8080, gpu_count=8, memory_bytes=1, zone="a") == "reg"
    assert "reg" in DatasetRegistry(coordinator).active_workers()
    other = TrainingOrchestrator("reg-2", coordinator, 7, 3)
    with pytest.raises(CoordinatorError, match=r"rank 3 .*reg"):
        await other.register_worker()
    worker.close()


async def heartbeat(coordinator: Listener, folder: Path) -> None:
    """Keeps a worker; without them it is lost."""
    quiet = TrainingOrchestrator("quiet", coordinator, 2, 0, heartbeat_timeout_s=missed(0.3))
    lively = TrainingOrchestrator(
        "lively", coordinator, 2, 1, heartbeat_interval_s=0.05, heartbeat_timeout_s=met(100.0)
    )
    await quiet.register_worker()
    assert quiet._heartbeats is not None
    quiet._heartbeats.stop()
    await lively.register_worker()
    registry = DatasetRegistry(coordinator)
    await asyncio.to_thread(eventually, lambda: "quiet" not in registry.active_workers())
    with pytest.raises(WorkerUnknownError, match="quiet"):
        await quiet.heartbeat()
    await lively.heartbeat()
    assert "lively" in registry.active_workers()
    await lively.deregister()
    for each in (quiet, lively):
        each.close()


async def deregister_worker(coordinator: Listener, folder: Path) -> None:
    """Takes it away at once, and gives its shards to others."""
    registry, other = a_dataset(coordinator, folder, "left")
    assert len(shards_of(other, "left")) == 3
    async with TrainingOrchestrator("worker-0", coordinator, 2, 0) as worker:
        await worker.register_worker()
        assert "worker-0" in registry.active_workers()
    assert "worker-0" not in registry.active_workers()
    assert sorted(shards_of(other, "left")) == [0, 1, 2, 3, 4, 5]


async def register_dataset(coordinator: Listener, folder: Path) -> None:
    """Is the same for all who say the same, and refused to who says something else."""
    registry, _ = a_dataset(coordinator, folder, "made")
    (made,) = [each for each in registry.datasets() if each.dataset_id == "made"]
    assert (made.format, made.total_samples, made.shard_size, made.num_shards) == ("jsonl", 12, 2, 6)
    with pytest.raises(CoordinatorError, match="shard_size is 2, not 3"):
        registry.register("made", folder / "data.jsonl", "jsonl", shard_size=3)


async def get_data_shard(coordinator: Listener, folder: Path) -> None:
    """Tells each worker its shards, with files and rows; together they are all."""
    registries = a_dataset(coordinator, folder, "shards")
    shards = [shard for registry in registries for shard in registry.get_assignment("shards")]
    assert sorted((shard.start_sample, shard.end_sample) for shard in shards) == [(n, n + 2) for n in range(0, 12, 2)]
    assert {path for shard in shards for path in shard.file_paths} == {str(folder / "data.jsonl")}
    assert registries[0].get_assignment("shards", limit=1) == shards[:1]


async def get_rank_files(coordinator: Listener, folder: Path) -> None:
    """Gives each rank files of its own; the last has none, as there is one file alone."""
    registries = a_dataset(coordinator, folder, "files")
    assert [registry.get_shard("files") for registry in registries] == [[str(folder / "data.jsonl")], []]


async def mark_done(coordinator: Listener, folder: Path) -> None:
    """Has a shard served to nobody again; of two reports of one shard only the first counts."""
    registry, _ = a_dataset(coordinator, folder, "done")
    first, *rest = shards_of(registry, "done")
    assert registry.mark_done("done", first, 0) == [first]
    assert registry.mark_done("done", first, 0) == []
    assert shards_of(registry, "done") == rest
    assert [each.num_done for each in registry.datasets() if each.dataset_id == "done"] == [1]


async def restore_position(coordinator: Listener, folder: Path) -> None:
    """Brings back what was read after the position; for those who join later it undoes nothing."""
    registry, other = a_dataset(coordinator, folder, "restored")
    mine, others = shards_of(registry, "restored"), shards_of(other, "restored")
    registry.mark_done("restored", mine, 0)
    position = {"epoch": 0, "done": mine[:1], "begun": [[mine[1], 1]]}
    registry.restore_position("restored", position)
    assert shards_of(registry, "restored") == mine[1:]
    registry.mark_done("restored", mine[1], 0)
    other.restore_position("restored", position)
    assert (shards_of(registry, "restored"), shards_of(other, "restored")) == (mine[2:], others)
    with pytest.raises(CoordinatorError, match="no shard 6"):
        other.restore_position("restored", {"epoch": 0, "done": [6], "begun": []})


async def set_data_worker(coordinator: Listener, folder: Path) -> None:
    """Spreads the shards over one more, and over one less."""
    registry, _ = a_dataset(coordinator, folder, "spread")
    registry.register_worker("spread", "third")
    assert registry.active_workers("spread") == ["third", "worker-0", "worker-1"]
    assert len(shards_of(registry, "spread")) == 2
    registry.remove_worker("spread", "third")
    assert registry.active_workers("spread") == ["worker-0", "worker-1"]


async def advance_epoch(coordinator: Listener, folder: Path) -> None:
    """Begins another epoch with all shards; the one before is past."""
    registry, _ = a_dataset(coordinator, folder, "epochs")
    mine = shards_of(registry, "epochs")
    registry.mark_done("epochs", mine[0], 0)
    assert registry.advance_epoch("epochs") == registry.current_epoch("epochs") == 1
    assert shards_of(registry, "epochs", 1) == mine
    with pytest.raises(CoordinatorError, match="past"):
        registry.get_shard("epochs", epoch=0)


async def get_datasets(coordinator: Listener, folder: Path) -> None:
    """Tells what is there, in the order of its names."""
    a_dataset(coordinator, folder, "list-b")
    registry, _ = a_dataset(coordinator, folder, "list-a")
    names = [each.dataset_id for each in registry.datasets()]
    assert names == sorted(names)
    assert {"list-a", "list-b"} <= {*names}


async def describe_spaces(coordinator: Listener, folder: Path) -> None:
    """Tells people what is there: datasets, who waits at barriers, checkpoints and workers of one space."""
    a_dataset(coordinator, folder, "described")
    spaces = coordinator.ask(DescribeSpaces(), SpaceList).spaces
    assert "described" in [each.dataset_id for space in spaces for each in space.datasets]


async def wait_barrier(coordinator: Listener, folder: Path) -> None:
    """Lets nobody pass before all are there, and says who is missing when the time is over."""
    workers = [TrainingOrchestrator(f"met-{rank}", coordinator, 2, rank) for rank in range(2)]
    first = asyncio.create_task(workers[0].wait_barrier("meet"))
    await workers[1].register_worker()
    assert not first.done()
    met = [await workers[1].wait_barrier("meet"), await first]
    assert [answer.arrived for answer in met] == [["met-0", "met-1"]] * 2
    with pytest.raises(BarrierError, match="met-1"):
        await workers[0].wait_barrier("meet", timeout=missed(0.05))
    for each in workers:  # the cases have one master in common
        await each.deregister()
        each.close()


async def leave_barrier(coordinator: Listener, folder: Path) -> None:
    """Who gave up waiting counts as arrived no more."""
    workers = [TrainingOrchestrator(f"left-{rank}", coordinator, 2, rank) for rank in range(2)]
    await workers[0].register_worker()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(workers[0].wait_barrier("leave"), missed(0.05))
    with pytest.raises(BarrierError, match="left-0") as caught:
        await workers[1].wait_barrier("leave", timeout=missed(0.05))
    assert caught.value.arrived == ["left-1"]
    for each in workers:
        await each.deregister()
        each.close()


async def notify_checkpoint(coordinator: Listener, folder: Path) -> None:
    """Is said by each save, and known to all; an older one does not take the place of the latest."""
    worker = TrainingOrchestrator("saver", coordinator, 1, 0)
    with CheckpointManager(folder / "run", coordinator_url=coordinator, series="told") as manager:
        manager.save_bytes(b"state", 8)
    assert await worker.checkpoints.notify(7, "elsewhere", name="told") is False
    latest = await worker.checkpoints.latest("told")
    assert latest is not None
    assert (latest.step, latest.path) == (8, f"{folder}/run/step-000008.json")
    worker.close()


async def get_latest_checkpoint(coordinator: Listener, folder: Path) -> None:
    """Finds what was told of its series, with all that was told; and nothing in another."""
    worker = TrainingOrchestrator("finder", coordinator, 1, 0)
    told = worker.checkpoints.notify(3, "s3://b/3", name="found", size_bytes=9, checksum="crc32:0", loss=0.5)
    assert await told
    assert await worker.checkpoints.latest("nothing") is None
    latest = await worker.checkpoints.latest("found")
    assert latest is not None
    assert (latest.path, latest.size_bytes, latest.checksum, latest.worker_id, latest.metadata) == (
        ("s3://b/3", 9, "crc32:0", "finder", {"loss": "0.5"})
    )
    worker.close()


async def tell_event(coordinator: Listener, folder: Path) -> None:
    """Brings a save that failed into the master's event log."""
    manager = CheckpointManager(
        folder / "file/below", coordinator_url=coordinator, max_tries=1, backoff=Backoff(first_s=0.0)
    )
    (folder / "file").touch()
    manager.save_bytes(b"state", 41)
    with pytest.raises(CheckpointSaveError):
        manager.close()
    eventually(lambda: "event=checkpoint-failed" in coordinator.master.log.read_text())
    assert "step 41" in coordinator.master.log.read_text()


CASES: dict[type, tuple[Callable[[Listener, Path], Awaitable[None]], type]] = {
    RegisterWorker: (register_worker, WorkerRegistration),
    Heartbeat: (heartbeat, HeartbeatResponse),
    DeregisterWorker: (deregister_worker, Done),
    RegisterDataset: (register_dataset, DatasetRegistration),
    GetDataShard: (get_data_shard, DataShards),
    GetRankFiles: (get_rank_files, RankFiles),
    MarkDone: (mark_done, ShardsDone),
    RestorePosition: (restore_position, Done),
    SetDataWorker: (set_data_worker, Done),
    AdvanceEpoch: (advance_epoch, Done),
    GetDatasets: (get_datasets, Datasets),
    DescribeSpaces: (describe_spaces, SpaceList),
    WaitBarrier: (wait_barrier, BarrierResponse),
    LeaveBarrier: (leave_barrier, Done),
    NotifyCheckpoint: (notify_checkpoint, CheckpointResponse),
    GetLatestCheckpoint: (get_latest_checkpoint, RecoveryInfo),
    TellEvent: (tell_event, Done),
}
"""Of each request what it does, and its answer."""


@pytest.mark.parametrize("message", get_args(WorkerToCoordinator), ids=lambda message: message.__name__)
async def test_each_message_has_its_effect(
    message: type[msgspec.Struct], coordinator: Listener, tmp_path: Path
) -> None:
    assert message in CASES, f"write a case for {message.__name__} here"
    case, answer = CASES[message]
    await case(coordinator, tmp_path)
    assert {message, answer} <= coordinator.seen
    assert Refused in coordinator.seen or message is not RegisterDataset


def test_there_are_no_other_answers() -> None:
    assert {answer for _, answer in CASES.values()} | {Refused} == {*get_args(CoordinatorToWorker)}
