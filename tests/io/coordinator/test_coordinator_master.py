"""What the master's process keeps of its workers, datasets, barriers and checkpoints, and what a killed one loses."""

import asyncio
import contextlib
import sqlite3
import time
from pathlib import Path

import pytest
import zmq

from tests.support.data_files import samples, write_jsonl
from tests.support.deadlines import met, missed
from tests.support.master_process import StartMaster
from unified.coordinator.client import RemoteCoordinator
from unified.coordinator.core.coordinator import CoordinatorCore
from unified.data import DatasetRegistry, TrainingOrchestrator
from unified.errors import BarrierTimeoutError, CoordinatorError, InvariantError, MasterUnreachableError
from unified.protocol.coordinator import (
    BarrierResponse,
    CheckpointResponse,
    GetLatestCheckpoint,
    NotifyCheckpoint,
    RecoveryInfo,
    WaitBarrier,
)
from unified.testing import eventually
from unified_master.core.master import MasterCore
from unified_master.daemon import MasterDaemon, MasterOptions
from unified_master.store import Store


async def test_a_killed_master_knows_all_of_it_again(start_master: StartMaster, tmp_path: Path) -> None:
    master = start_master()
    address = master.address
    data = tmp_path / "data.jsonl"
    write_jsonl(data, samples(0, 40))
    with RemoteCoordinator(address) as remote, DatasetRegistry(remote, rank=0, world_size=2) as registry:
        workers = [TrainingOrchestrator(f"worker-{rank}", remote, 2, rank) for rank in range(2)]
        await asyncio.gather(*[each.wait_barrier("b") for each in workers])
        registry.register("d", data, "jsonl", shard_size=4, shuffle=True, seed=3)
        registry.advance_epoch("d", 2)
        mine = registry.get_assignment("d")
        registry.mark_done("d", mine[0].shard_id, 2)
        told = remote.ask(NotifyCheckpoint(worker_id="worker-0", step=7, path="s3://b/step"), CheckpointResponse)
        assert told.is_latest
        waiting = asyncio.create_task(workers[0].wait_barrier("b"))
        await workers[1].heartbeat()
        master.kill()
        start_master(bind=address)
        shards = await asyncio.to_thread(registry.get_assignment, "d")
        assert shards == mine[1:]
        assert not waiting.done()
        answers = await asyncio.gather(waiting, workers[1].wait_barrier("b"))
        assert [answer.generation for answer in answers] == [1, 1]
        (status,) = registry.datasets()
        assert (status.epoch, status.num_done, status.seed, status.path) == (2, 1, 3, str(data))
        assert registry.active_workers() == ["worker-0", "worker-1"]
        found = remote.ask(GetLatestCheckpoint(), RecoveryInfo)
        assert (found.is_found, found.step, found.path) == (True, 7, "s3://b/step")
        for each in workers:
            each.close()


@pytest.mark.slow
async def test_a_barriers_time_goes_on_while_the_master_is_away(
    start_master: StartMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is over when it would have been, and tells who is missing."""
    monkeypatch.setattr("unified.coordinator.client.BARRIER_GRACE_S", met(100.0))
    master = start_master()
    address = master.address
    with RemoteCoordinator(address) as remote:
        workers = [TrainingOrchestrator(f"worker-{rank}", remote, 2, rank) for rank in range(2)]
        for each in workers:
            await each.register_worker()
        begun_at = time.monotonic()
        waiting = asyncio.create_task(workers[0].wait_barrier("b", timeout=missed(8)))
        await workers[1].heartbeat()
        master.kill()
        await asyncio.to_thread(eventually, lambda: time.monotonic() - begun_at > 1.5)
        start_master(bind=address)
        with pytest.raises(BarrierTimeoutError, match=r"missing worker-1; arrived: worker-0") as caught:
            await waiting
        assert (caught.value.missing, caught.value.arrived) == (["worker-1"], ["worker-0"])
        for each in workers:
            each.close()


async def test_heartbeats_write_nothing(start_master: StartMaster, tmp_path: Path) -> None:
    master = start_master()
    with (
        RemoteCoordinator(master.address) as remote,
        contextlib.closing(sqlite3.connect(tmp_path / "state" / "master.sqlite")) as database,
    ):

        def version() -> int:
            found: int = database.execute("pragma data_version").fetchone()[0]
            return found

        async with TrainingOrchestrator("w", remote, 1, 0) as worker:
            await worker.register_worker()
            before = version()
            for _ in range(50):
                await worker.heartbeat()
            assert version() == before
            await worker.register_worker(port=1)
            assert version() > before


async def test_one_arrival_asked_for_on_two_connections_is_one(start_master: StartMaster) -> None:
    """As when a connection breaks and the question is put again on another."""
    master = start_master()
    with RemoteCoordinator(master.address) as first, RemoteCoordinator(master.address) as second:
        workers = [TrainingOrchestrator(f"worker-{rank}", first, 2, rank) for rank in range(2)]
        for each in workers:
            await each.register_worker()
        session = workers[0]._session
        arrival = WaitBarrier(barrier_id="b", worker_id="worker-0", session=session, arrival=9, world_size=2)
        lost = first.submit(arrival, BarrierResponse)
        again = second.submit(arrival, BarrierResponse)
        assert not again.done()
        await workers[1].wait_barrier("b")
        assert again.result(100).arrived == ["worker-0", "worker-1"]
        assert second.ask(arrival, BarrierResponse).generation == 0
        lost.cancel()
        for each in workers:
            each.close()


async def test_without_a_master_it_says_where_it_looked() -> None:
    worker = TrainingOrchestrator("w", RemoteCoordinator("127.0.0.1:9", timeout_s=missed(0.2)), 1, 0)
    with pytest.raises(MasterUnreachableError, match=r"127\.0\.0\.1:9"):
        await worker.register_worker()
    worker.close()


async def test_who_waits_is_told_when_the_master_stays_away(start_master: StartMaster) -> None:
    master = start_master()
    with RemoteCoordinator(master.address) as remote:
        worker = TrainingOrchestrator("w", remote, 2, 0, heartbeat_interval_s=0.05, heartbeat_timeout_s=met(100.0))
        await worker.register_worker()
        waiting = asyncio.create_task(worker.wait_barrier("b"))
        await worker.heartbeat()
        assert worker._heartbeats is not None
        remote.timeout_s = worker._heartbeats._timeout_s = missed(0.2)
        master.kill()
        with pytest.raises(MasterUnreachableError, match="worker w has heard nothing"):
            await waiting
        worker.close()


async def test_the_event_log_tells_of_losses(start_master: StartMaster) -> None:
    master = start_master()
    with RemoteCoordinator(master.address) as remote:
        worker = TrainingOrchestrator("silent", remote, 1, 0, heartbeat_timeout_s=missed(0.2))
        await worker.register_worker()
        worker.close()
        eventually(lambda: "event=worker-lost" in master.log.read_text())
    assert "worker=silent" in master.log.read_text()


def test_a_defect_of_the_coordinator_is_answered_and_it_goes_on_from_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = MasterDaemon(MasterOptions(bind="tcp://127.0.0.1:0", state_dir=tmp_path))
    store = Store(tmp_path)
    router = daemon._bind()

    def answer(core: MasterCore) -> MasterCore:
        assert router.poll(15_000)
        return daemon._handle(core, daemon._take_in(router), router, store)

    def broken(*_: object) -> None:
        raise InvariantError("a defect")

    told = NotifyCheckpoint(worker_id="w", step=7, path="p")
    with RemoteCoordinator(router.get_string(zmq.LAST_ENDPOINT)) as remote:
        first = remote.submit(told, CheckpointResponse)
        core = answer(daemon._begin_term(store, ""))
        assert first.result(100).is_latest
        with monkeypatch.context() as patch:
            patch.setattr(CoordinatorCore, "step", broken)
            refused = remote.submit(told, CheckpointResponse)
            core = answer(core)
        with pytest.raises(CoordinatorError, match="defect") as caught:
            refused.result(100)
        assert caught.value.code == "defect"
        found = remote.submit(GetLatestCheckpoint(), RecoveryInfo)
        answer(core)
        assert found.result(100).step == 7
    router.close()
    daemon._gatekeeper.close()
    daemon._context.term()
    store.close()
