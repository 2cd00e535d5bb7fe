"""Whose heartbeat times hold: a worker's own, those of its settings, or those of its coordinator."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.data_files import samples, write_jsonl
from tests.support.master_process import StartMaster
from tests.unit.config.test_runtime import DOCUMENT
from unified.coordinator.client import RemoteCoordinator
from unified.data import DatasetRegistry, ShardedDataset, TrainingOrchestrator
from unified.testing import eventually


@pytest.fixture
def remote(start_master: StartMaster, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteCoordinator]:
    """A master that takes workers for lost soon, if they say nothing else."""
    with monkeypatch.context() as patch:
        patch.setenv("UNIFIED_COORDINATOR_HEARTBEAT_INTERVAL_MS", "100")
        patch.setenv("UNIFIED_COORDINATOR_HEARTBEAT_TIMEOUT_MS", "600")
        master = start_master()
    with RemoteCoordinator(master.address) as found:
        yield found


async def test_the_documents_file_holds_though_it_says_the_defaults(
    remote: RemoteCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_the_master_says = TrainingOrchestrator("hasty", remote, 2, 0)
    file = tmp_path / "run.toml"
    file.write_text(DOCUMENT)
    monkeypatch.setenv("UNIFIED_CONFIG", str(file))
    as_the_file_says = TrainingOrchestrator("patient", remote, 2, 1)
    for each in (as_the_file_says, as_the_master_says):
        await each.register_worker()
        each.close()
    registry = DatasetRegistry(remote)
    eventually(lambda: "hasty" not in registry.active_workers())
    assert registry.active_workers() == ["patient"]


async def test_a_worker_of_long_intervals_is_not_lost_between_two_heartbeats(
    remote: RemoteCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    quiet = TrainingOrchestrator("quiet", remote, 2, 0, heartbeat_interval_s=60)
    gone = TrainingOrchestrator("gone", remote, 2, 1)
    with caplog.at_level(logging.WARNING, "unified.data"):
        await quiet.register_worker()
    assert "event=heartbeat-interval-shortened worker=quiet" in caplog.text
    assert "a heartbeat every 0.2 s" in caplog.text
    await gone.register_worker()
    gone.close()
    registry = DatasetRegistry(remote)
    eventually(lambda: "gone" not in registry.active_workers())
    assert registry.active_workers() == ["quiet"], "it came first"
    quiet.close()


def test_what_a_rank_that_never_comes_would_have_read_is_read_by_others(
    remote: RemoteCoordinator, tmp_path: Path
) -> None:
    write_jsonl(tmp_path / "data.jsonl", samples(0, 40))
    with DatasetRegistry(remote, rank=0, world_size=2) as registry:
        registry.register("d", tmp_path / "data.jsonl", "jsonl", shard_size=4)
        assert registry.active_workers("d") == ["worker-0", "worker-1"]
        rows = [row["number"] for row in ShardedDataset(registry, "d", wait_for_others=60)]
        assert sorted(rows) == list(range(40))
        assert registry.active_workers("d") == ["worker-0"]
    log = (tmp_path / "master.log").read_text()
    assert "event=data-worker-absent" in log
    assert "dataset 'd' was spread over it, and for 0.6 s it neither registered nor asked for its data" in log
