"""Registry and orchestrators against a coordinator in this process, and the same against the master's process."""

import asyncio
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.deadlines import missed
from tests.support.master_process import StartMaster
from unified.coordinator.client import Coordinator, RemoteCoordinator
from unified.coordinator.worker_identity import session_of
from unified.data import DatasetRegistry, EmbeddedCoordinator, TrainingOrchestrator
from unified.errors import (
    BarrierError,
    BarrierTimeoutError,
    CoordinatorError,
    DataFileNotFoundError,
    UnifiedError,
    UsageError,
    WorkerUnknownError,
)
from unified.protocol.coordinator import Heartbeat, HeartbeatResponse, MarkDone, ShardAssignment, ShardsDone
from unified.testing import eventually

Join = Callable[..., TrainingOrchestrator]


@pytest.fixture(params=["embedded", "master"])
def coordinator(request: pytest.FixtureRequest, start_master: StartMaster) -> Iterator[Coordinator]:
    before = set(threading.enumerate())
    if request.param == "embedded":
        with EmbeddedCoordinator() as found:
            yield found
    else:
        with RemoteCoordinator(start_master().address.replace("tcp", "http")) as remote:
            yield remote
    eventually(lambda: set(threading.enumerate()) <= before, message="a thread is left")


@pytest.fixture
def join(coordinator: Coordinator) -> Iterator[Join]:
    made: list[TrainingOrchestrator] = []

    def _join(rank: int, world_size: int, **options: Any) -> TrainingOrchestrator:
        made.append(TrainingOrchestrator(f"worker-{rank}", coordinator, world_size, rank, **options))
        return made[-1]

    yield _join
    for each in made:
        each.close()


def write_jsonl(folder: Path, *counts: int) -> None:
    number = 0
    folder.mkdir()
    for index, count in enumerate(counts):
        lines = [json.dumps({"x": number + each}) for each in range(count)]
        number += count
        (folder / f"part-{index}.jsonl").write_text("\n".join(lines) + "\n")


def samples(shards: list[ShardAssignment]) -> list[int]:
    return [number for shard in shards for number in range(shard.start_sample, shard.end_sample)]


async def test_all_go_on_together_and_can_meet_again(join: Join) -> None:
    workers = [join(rank, 3) for rank in range(3)]
    name = await workers[0].register_worker("10.0.0.1", 8080, gpu_count=8, memory_bytes=1 << 39, zone=3)
    assert name == "worker-0"
    for generation in range(3):
        answers = await asyncio.gather(*[each.wait_barrier("epoch") for each in workers])
        assert [answer.arrived for answer in answers] == [["worker-0", "worker-1", "worker-2"]] * 3
        assert answers[0].generation == generation
    await asyncio.gather(*[each.deregister() for each in workers])
    assert not any(each.is_registered for each in workers)


async def test_nobody_passes_before_the_last(join: Join) -> None:
    first, last = join(0, 2), join(1, 2)
    waiting = asyncio.create_task(first.wait_barrier("b"))
    await last.register_worker()
    await last.heartbeat()
    assert not waiting.done()
    await last.wait_barrier("b")
    await waiting


async def test_a_timeout_names_who_is_missing(join: Join) -> None:
    first, second = join(0, 3), join(1, 3)
    await second.register_worker()
    with pytest.raises(BarrierTimeoutError, match=r"worker-1.*rank 2") as caught:
        await first.wait_barrier("b", timeout=missed(0.05))
    assert (caught.value.missing, caught.value.arrived) == (["worker-1"], ["worker-0"])


@pytest.mark.parametrize("on_loss", ["fail", "shrink"])
async def test_a_silent_worker_does_not_hold_the_others(join: Join, on_loss: Any) -> None:
    here, silent = join(0, 2), join(1, 2, heartbeat_timeout_s=missed(0.3))
    await silent.register_worker()
    waiting = asyncio.create_task(here.wait_barrier("b", on_loss=on_loss))
    await here.heartbeat()
    silent.close()  # The coordinator fixture stays open, so this is as good as its process being killed.
    if on_loss == "shrink":
        assert (await waiting).lost == ["worker-1"]
    else:
        with pytest.raises(BarrierError, match="worker-1") as caught:
            await waiting
        assert caught.value.lost == ["worker-1"]


async def test_heartbeats_go_on_while_the_loop_is_busy(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    busy, watcher = join(0, 2, heartbeat_interval_s=0.05), join(1, 2)
    await busy.register_worker()
    await watcher.register_worker()
    assert busy._heartbeats is not None
    answered, say = list[UnifiedError | None](), busy._heartbeats._say

    def heard() -> UnifiedError | None:
        answered.append(say())
        return answered[-1]

    monkeypatch.setattr(busy._heartbeats, "_say", heard)
    eventually(lambda: len(answered) >= 3)  # a training step that does not let the event loop go on
    assert answered[:3] == [None] * 3
    releases = await asyncio.gather(busy.wait_barrier("b"), watcher.wait_barrier("b"))
    assert busy.is_registered
    assert [release.released_by for release in releases] == ["arrived"] * 2


async def test_a_worker_that_was_replaced_is_told(join: Join) -> None:
    old, new = join(0, 1), join(0, 1)
    await old.register_worker()
    await new.register_worker()
    with pytest.raises(WorkerUnknownError, match="worker-0"):
        await old.heartbeat()
    assert not old.is_registered
    with pytest.raises(WorkerUnknownError, match="worker-0"):
        await old.wait_barrier("b")
    await new.wait_barrier("b")


async def test_who_waits_is_told_when_it_is_replaced(join: Join) -> None:
    old, other, new = join(0, 2, heartbeat_interval_s=0.05), join(1, 2), join(0, 2)
    await other.register_worker()
    waiting = asyncio.create_task(old.wait_barrier("b"))
    await other.heartbeat()
    await new.register_worker()
    with pytest.raises((WorkerUnknownError, BarrierError), match="worker-0"):
        await waiting
    await asyncio.gather(new.wait_barrier("b"), other.wait_barrier("b"))


async def test_waiting_can_be_given_up(join: Join) -> None:
    first, second = join(0, 2), join(1, 2)
    await first.register_worker()
    await second.register_worker()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(first.wait_barrier("b"), missed(0.05))
    waiting = asyncio.create_task(second.wait_barrier("b"))
    for _ in range(2):  # by the second answer the coordinator has heard of that arrival, too
        await second.heartbeat()
    assert not waiting.done(), "released by an arrival behind which nobody waits"
    release = await first.wait_barrier("b")
    assert (await waiting).generation == release.generation == 0


async def test_async_with_deregisters(join: Join, coordinator: Coordinator) -> None:
    async with join(0, 1) as worker:
        await worker.wait_barrier("b")
        assert DatasetRegistry(coordinator).active_workers() == ["worker-0"]
    assert DatasetRegistry(coordinator).active_workers() == []


async def test_the_latest_checkpoint_is_known_to_all(join: Join) -> None:
    first, second = join(0, 2), join(1, 2)
    assert await second.checkpoints.latest() is None
    assert await first.checkpoints.notify(20, "s3://b/step-000020.json", size_bytes=5, checksum="ab", loss=0.5)
    assert not await second.checkpoints.notify(10, "s3://b/step-000010.json")
    found = await second.checkpoints.latest()
    assert found is not None
    assert (found.step, found.path, found.size_bytes, found.checksum) == (20, "s3://b/step-000020.json", 5, "ab")
    assert (found.world_size, found.worker_id, found.metadata) == (2, "worker-0", {"loss": "0.5"})
    assert found.saved_at > 1e9
    assert await second.checkpoints.latest("other") is None


async def test_two_of_one_rank_are_refused(join: Join, coordinator: Coordinator) -> None:
    """The second is refused, and the first goes on."""
    first, other = join(0, 1), TrainingOrchestrator("somebody", coordinator, 1, 0)
    await first.register_worker()
    with pytest.raises(CoordinatorError, match="rank 0 of 1 is held by worker worker-0") as caught:
        await other.register_worker()
    assert caught.value.code == "name-taken"
    other.close()
    assert (await first.wait_barrier("b")).arrived == ["worker-0"]


def test_every_sample_is_somebodys(coordinator: Coordinator, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "data", 7, 0, 20, 8)
    registries = [DatasetRegistry(coordinator, rank=rank, world_size=2) for rank in range(2)]
    for registry in registries:
        registry.register("d", tmp_path / "data", "jsonl", shard_size=4, shuffle=True, seed=7)
    (status,) = registries[0].datasets()
    assert (status.total_samples, status.num_shards, status.workers) == (35, 9, ["worker-0", "worker-1"])
    shares = [registry.get_assignment("d", epoch=0) for registry in registries]
    assert sorted(samples(shares[0] + shares[1])) == list(range(35))
    assert {len(share) for share in shares} == {4, 5}
    assert registries[0].get_assignment("d", 1, 0) == registries[1].get_assignment("d", worker_rank="worker-1", epoch=0)
    spanning = next(shard for shard in shares[0] + shares[1] if shard.start_sample == 4)
    files = [str(tmp_path / "data" / f"part-{number}.jsonl") for number in (0, 2)]
    assert (spanning.file_paths, spanning.first_row) == (files, 4)
    assert set(registries[0].get_shard("d", 0, 0)) | set(registries[0].get_shard("d", 1, 0)) == {
        str(tmp_path / "data" / f"part-{number}.jsonl") for number in (0, 2, 3)
    }


def test_what_was_read_is_served_no_more_and_the_rest_goes_to_others(coordinator: Coordinator, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "data", 40)
    with DatasetRegistry(coordinator, rank=0, world_size=2) as registry:
        registry.register("d", tmp_path / "data", "jsonl", shard_size=4)
        done = [shard.shard_id for shard in registry.get_assignment("d", 1, 0)[:2]]
        assert registry.mark_done("d", done, 0, 1) == done
        assert registry.mark_done("d", done[0], 0, 1) == []
        registry.remove_worker("d", 1)
        assert registry.active_workers("d") == ["worker-0"]
        left = [shard.shard_id for shard in registry.get_assignment("d", 0, 0)]
        assert sorted(left + done) == list(range(10))
        with pytest.raises(CoordinatorError, match="worker-1"):
            registry.get_assignment("d", 1, 0)
        registry.register_worker("d", 1)
        assert len(registry.get_assignment("d", 1, 0)) in (3, 4, 5)


async def test_a_lost_workers_shards_go_to_others(join: Join, coordinator: Coordinator, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "data", 40)
    registry = DatasetRegistry(coordinator, rank=0, world_size=2)
    stays, goes = join(0, 2), join(1, 2, heartbeat_timeout_s=missed(0.3))
    await stays.register_worker()
    await goes.register_worker()
    registry.register("d", tmp_path / "data", "jsonl", shard_size=4)
    assert len(registry.get_assignment("d", 0, 0)) == 5
    goes.close()
    eventually(lambda: len(registry.get_assignment("d", 0, 0)) == 10)


async def test_an_incarnation_that_was_replaced_marks_nothing(
    join: Join, coordinator: Coordinator, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "data", 12)
    registry = DatasetRegistry(coordinator, rank=0, world_size=1)
    await join(0, 1).register_worker()
    registry.register("d", tmp_path / "data", "jsonl", shard_size=4)
    mine = [shard.shard_id for shard in registry.get_assignment("d", epoch=0)]
    old = session_of("", "worker-0")
    await join(0, 1).register_worker()
    late = MarkDone(dataset_id="d", worker_id="worker-0", session=old, epoch=0, shard_ids=mine)
    with pytest.raises(WorkerUnknownError, match="worker worker-0 has a newer incarnation") as caught:
        coordinator.ask(late, ShardsDone)
    assert caught.value.code == "replaced"
    with pytest.raises(CoordinatorError, match="another process"):
        coordinator.ask(replace(late, session=""), ShardsDone)
    assert registry.mark_done("d", mine, 0) == mine


async def test_a_rank_is_the_worker_that_registered_for_it(coordinator: Coordinator, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "data", 12)
    worker = TrainingOrchestrator("somebody", coordinator, 2, 1)
    registry = DatasetRegistry(coordinator, rank=1, world_size=2)
    await worker.register_worker()
    registry.register("d", tmp_path / "data", "jsonl", shard_size=4)
    assert registry.active_workers("d") == ["somebody", "worker-0"]
    await worker.deregister()
    assert registry.active_workers("d") == ["worker-0"]
    worker.close()


@pytest.mark.parametrize("names", [("alpha", "beta"), ("worker-1", "worker-2")], ids=["own", "from-1"])
@pytest.mark.parametrize("comes_first", ["registry", "orchestrator"])
async def test_workers_with_names_of_their_own_read_all_of_it(
    coordinator: Coordinator, tmp_path: Path, names: tuple[str, str], comes_first: str
) -> None:
    """One member a rank, whatever it is called, and whenever it registers."""
    write_jsonl(tmp_path / "data", 12, 12)
    registries = [DatasetRegistry(coordinator, rank=rank, world_size=2) for rank in range(2)]
    workers = [TrainingOrchestrator(name, coordinator, 2, rank) for rank, name in enumerate(names)]
    for worker, registry in zip(workers, registries, strict=True):
        if comes_first == "orchestrator":
            await worker.register_worker()
        registry.register("d", tmp_path / "data", "jsonl", shard_size=4)
        await worker.register_worker()
    assert registries[0].active_workers("d") == list(names)
    shares = [registry.get_assignment("d", epoch=0) for registry in registries]
    assert sorted(samples(shares[0] + shares[1])) == list(range(24))
    assert registries[0].get_assignment("d", names[1], 0) == shares[1]
    assert registries[1].mark_done("d", shares[1][0].shard_id, 0) == [shares[1][0].shard_id]
    for each in workers:
        each.close()


async def test_a_registry_is_told_its_rank_and_world_by_the_orchestrator(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "data", 4, 4, 4)
    registry = DatasetRegistry(coordinator)
    registry.register("d", tmp_path / "data", "jsonl", shard_size=4)
    with pytest.raises(CoordinatorError, match=r"Set WORLD_SIZE .*nobody has yet") as caught:
        registry.get_shard("d", worker_rank=1, epoch=0)
    assert caught.value.code == "world-unknown"
    worker = TrainingOrchestrator("alpha", coordinator, 2, 1)
    await worker.register_worker()
    assert registry.get_shard("d") == registry.get_shard("d", "alpha") == [str(tmp_path / "data" / "part-1.jsonl")]
    registry.register("e", tmp_path / "data", "jsonl", shard_size=4)
    assert registry.active_workers("e") == ["alpha", "worker-0"]
    worker.close()


def test_files_of_the_ranks_are_each_named_once(
    coordinator: Coordinator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where shards are larger than files, and after some were read."""
    write_jsonl(tmp_path / "data", 25, 25, 25, 25)
    paths = [str(tmp_path / "data" / f"part-{number}.jsonl") for number in range(4)]
    registries = [DatasetRegistry(coordinator, rank=rank, world_size=4) for rank in range(4)]
    for registry in registries:
        registry.register("d", tmp_path / "data", "jsonl", shard_size=40)
    assert [registry.get_shard("d", epoch=0) for registry in registries] == [[path] for path in paths]
    registries[0].mark_done("d", [shard.shard_id for shard in registries[0].get_assignment("d")], 0)
    assert registries[1].get_shard("d", 0, 0) == paths[:1]
    assert not caplog.records
    wide = DatasetRegistry(coordinator, rank=0, world_size=6)
    assert [wide.get_shard("d", rank, 0) for rank in range(6)] == [*([path] for path in paths), [], []]
    assert [record.getMessage() for record in caplog.records] == [
        "dataset 'd' has 4 files, too few for the ranks: get_shard gives none to rank 4, 5. Write it as more files, or "
        "spread its rows: get_assignment with iter_samples, or ShardedDataset."
    ]


def test_epochs_go_forward(coordinator: Coordinator, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "data", 12)
    registries = [DatasetRegistry(coordinator, rank=rank, world_size=2) for rank in range(2)]
    for registry in registries:
        registry.register("d", tmp_path / "data", "jsonl", shard_size=4)
    assert [registry.advance_epoch("d") for registry in registries] == [1, 1]
    assert registries[0].advance_epoch("d", 5) == registries[1].current_epoch("d") == 5
    assert registries[0].advance_epoch("d", 2) == 5
    with pytest.raises(CoordinatorError, match=r"epoch 1 .* past"):
        registries[0].get_shard("d", 0, 1)
    with pytest.raises(CoordinatorError, match="no epoch -1"):
        registries[0].get_shard("d", 0, -1)


def test_bad_requests_say_what_is_wrong(coordinator: Coordinator, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "data", 12, 1)
    registry = DatasetRegistry(coordinator, rank=0, world_size=2)
    registry.register("imagenet", tmp_path / "data", "jsonl", shard_size=4)
    registry.register("imagenet", str(tmp_path / "data"), "jsonl", shard_size=4, total_samples=13)
    with pytest.raises(CoordinatorError, match=r"imagenet.*shard_size"):
        registry.register("imagenet", tmp_path / "data", "jsonl", shard_size=5)
    with pytest.raises(UsageError, match="hold 13 samples, not total_samples=20"):
        registry.register("other", tmp_path / "data", "jsonl", total_samples=20)
    with pytest.raises(DataFileNotFoundError, match="nowhere"):
        registry.register("other", tmp_path / "nowhere", "jsonl")
    with pytest.raises(UsageError, match=r"'json'.*Did you mean 'jsonl'"):
        registry.register("other", tmp_path / "data", "json")
    with pytest.raises(CoordinatorError, match="shard"):
        registry.register("other", tmp_path / "data", "jsonl", shard_size=0)
    with pytest.raises(CoordinatorError, match="imagenet"):
        registry.get_shard("imagnet", 0, 0)
    with pytest.raises(UsageError, match="rank 2 is not in a world of 2"):
        registry.get_shard("imagenet", 2, 0)
    with pytest.raises(CoordinatorError) as caught:
        registry.mark_done("imagenet", [99], 0, 0)
    assert caught.value.code == "bad-request"


def test_values_of_the_wrong_kind_are_refused(coordinator: Coordinator) -> None:
    wrong: Any = Heartbeat(worker_id="w", session=5)  # type: ignore[arg-type]
    with pytest.raises(CoordinatorError):
        coordinator.ask(wrong, HeartbeatResponse)


async def test_a_closed_coordinator_says_so() -> None:
    coordinator = EmbeddedCoordinator()
    worker = TrainingOrchestrator("w", coordinator, 2, 0)
    waiting = asyncio.create_task(worker.wait_barrier("b"))
    await worker.heartbeat()
    coordinator.close()
    with pytest.raises(CoordinatorError, match="closed"):
        await waiting
    worker.close()
    with pytest.raises(CoordinatorError, match="closed"):
        DatasetRegistry(coordinator).datasets()


async def test_the_embedded_timekeeper_ends_when_nobody_is_there() -> None:
    before = set(threading.enumerate())
    coordinator = EmbeddedCoordinator()
    async with TrainingOrchestrator("w", coordinator, 1, 0) as worker:
        await worker.wait_barrier("b")
        assert any(thread.name == "unified-coordinator" for thread in threading.enumerate())
    eventually(lambda: set(threading.enumerate()) <= before, message="a thread is left")


def test_a_registry_can_be_pickled() -> None:
    registry = pickle.loads(pickle.dumps(DatasetRegistry("http://127.0.0.1:9/", rank=1, world_size=4)))
    assert (registry.rank, registry.world_size) == (1, 4)
