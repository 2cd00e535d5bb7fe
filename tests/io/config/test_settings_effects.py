"""What each setting changes: by the file and by its variable, in the classes that users meet.

The settings that are tried are all there are, so that one without an effect is a failure.
"""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

from tests.io.config.test_runtime_settings_master import Start, start  # noqa: F401 - a fixture
from tests.support.data_files import samples, write_jsonl
from tests.support.master_process import StartMaster
from tests.support.s3 import Asked, S3Server, faulty
from unified.checkpoint import CheckpointManager
from unified.config.runtime import FILE_VARIABLE, SECTIONS, VARIABLES, variable_of
from unified.coordinator.client import RemoteCoordinator
from unified.data import DatasetRegistry, EmbeddedCoordinator, ShardedDataset, TrainingOrchestrator
from unified.protocol.coordinator import CoordinatorRequest, Heartbeat
from unified.storage import S3Backend
from unified.testing import eventually

A = TypeVar("A")
Set = Callable[..., None]


class Place(NamedTuple):
    folder: Path
    set: Set
    """Give settings these values: ``set(checkpoint_keep_last_n=2)``."""
    request: pytest.FixtureRequest
    """For what only some need."""


@pytest.fixture(params=["file", "variables"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    names = {f"{section}_{key}": (section, key) for section, kind in SECTIONS.items() for key in kind.__struct_fields__}

    def in_file(**values: object) -> None:
        lines = [f"{'.'.join(names[name])} = {json.dumps(value)}\n" for name, value in values.items()]
        (tmp_path / "run.toml").write_text("".join(lines))
        monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "run.toml"))

    def in_variables(**values: object) -> None:
        for name, value in values.items():
            monkeypatch.setenv(variable_of(*names[name]), str(value))

    return Place(tmp_path, in_file if request.param == "file" else in_variables, request)


def a_dataset(coordinator: EmbeddedCoordinator, place: Place) -> DatasetRegistry:
    write_jsonl(place.folder / "data.jsonl", samples(0, 12))
    registry = DatasetRegistry(coordinator, rank=0, world_size=1)
    registry.register("d", place.folder / "data.jsonl", "jsonl")
    return registry


class Counting(EmbeddedCoordinator):
    """How many heartbeats came from each worker."""

    def __init__(self) -> None:
        super().__init__()
        self.beats: dict[str, int] = {}

    def submit(self, request: CoordinatorRequest, expected: type[A], *, timeout_s: float | None = None) -> Future[A]:
        if isinstance(request, Heartbeat):
            self.beats[request.worker_id] = self.beats.get(request.worker_id, 0) + 1
        return super().submit(request, expected, timeout_s=timeout_s)


def address(place: Place) -> None:
    begin: Start = place.request.getfixturevalue("start")
    place.set(coordinator_address="127.0.0.2:0")
    assert begin()[0].startswith("tcp://127.0.0.2:")


def heartbeat_interval_ms(place: Place) -> None:
    """A worker is heard from as often."""
    with Counting() as coordinator:
        slow = TrainingOrchestrator("slow", coordinator, 2, 0)
        place.set(coordinator_heartbeat_interval_ms=10)
        fast = TrainingOrchestrator("fast", coordinator, 2, 1)
        for each in (slow, fast):
            asyncio.run(each.register_worker())
        eventually(lambda: coordinator.beats.get("fast", 0) >= 10)
        assert coordinator.beats.get("slow", 0) < 10
        for each in (slow, fast):
            each.close()


def heartbeat_timeout_ms(place: Place) -> None:
    """A silent worker is lost after so long, and not before others are."""
    with EmbeddedCoordinator() as coordinator:
        slow = TrainingOrchestrator("slow", coordinator, 2, 0)
        place.set(coordinator_heartbeat_interval_ms=50, coordinator_heartbeat_timeout_ms=100)
        fast = TrainingOrchestrator("fast", coordinator, 2, 1)
        for each in (slow, fast):
            asyncio.run(each.register_worker())
            each.close()
        registry = DatasetRegistry(coordinator)
        eventually(lambda: registry.active_workers() == ["slow"])


def backend(place: Place) -> None:
    """A plain path is a prefix in the bucket."""
    name = place.request.getfixturevalue("s3_environment").make_bucket()
    place.set(storage_bucket=name, storage_backend="s3")
    with CheckpointManager("/run") as manager:
        manager.save_bytes(b"x", 1)
    with S3Backend(name, "us-east-1") as store:
        assert store.exists("run/step-000001.json")
    with CheckpointManager(place.folder / "run", "local") as manager:
        manager.save_bytes(b"x", 1)
    assert (place.folder / "run/step-000001.json").exists(), "what is said to the class itself is above it"


def bucket(place: Place) -> None:
    """Of a path in S3 that names none."""
    name = place.request.getfixturevalue("s3_environment").make_bucket()
    place.set(storage_bucket=name)
    with CheckpointManager("/run", "s3") as manager:
        manager.save_bytes(b"x", 1)
    with S3Backend(name, "us-east-1") as store:
        assert store.exists("run/step-000001.json")


def region(place: Place) -> None:
    """Requests are signed for it."""
    server: S3Server = place.request.getfixturevalue("s3_environment")
    name, signed = server.make_bucket(), list[str]()

    def note(asked: Asked) -> None:
        signed.append(asked.headers["authorization"])

    place.set(storage_region="eu-north-1")
    monkeypatch: pytest.MonkeyPatch = place.request.getfixturevalue("monkeypatch")
    with faulty(server, note) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        with CheckpointManager(f"s3://{name}") as manager:
            assert manager.steps() == []
    assert signed
    assert all("/eu-north-1/s3/" in each for each in signed)


def interval_steps(place: Place) -> None:
    """No other step is saved."""
    place.set(checkpoint_interval_steps=10)
    with CheckpointManager(place.folder / "run") as manager:
        assert [step for step in range(1, 31) if manager.save_bytes(b"x", step)] == [10, 20, 30]
        assert manager.steps() == [10, 20, 30]


def keep_last_n(place: Place) -> None:
    """So many stay."""
    place.set(checkpoint_keep_last_n=2)
    with CheckpointManager(place.folder / "run") as manager:
        for step in range(6):
            manager.save_bytes(b"x", step)
            manager.wait()
        assert manager.steps() == [4, 5]


def compression(place: Place) -> None:
    """Less is stored, and the same loads."""
    place.set(checkpoint_compression="gzip")
    with CheckpointManager(place.folder / "run") as manager:
        manager.save_bytes(b"weights " * 10_000, 1)
        assert manager.load_bytes() == b"weights " * 10_000
    (stored,) = (place.folder / "run").glob("*.bin")
    assert stored.read_bytes()[:2] == b"\x1f\x8b"
    assert stored.stat().st_size < 8_000


def default_shard_size(place: Place) -> None:
    """A dataset is cut into shards of it."""
    place.set(dataset_default_shard_size=5)
    with EmbeddedCoordinator() as coordinator:
        assert [each.end_sample for each in a_dataset(coordinator, place).get_assignment("d")] == [5, 10, 12]


def prefetch_shards(place: Place) -> None:
    """So many are read beside the one in use."""
    seen: list[int] = []
    place.set(dataset_prefetch_shards=1, dataset_default_shard_size=3)
    with EmbeddedCoordinator() as coordinator:
        dataset = ShardedDataset(a_dataset(coordinator, place), "d", transform=lambda row: seen.append(row["number"]))
        rows = iter(dataset)
        next(rows)
        eventually(lambda: len(seen) == 6)
        for _ in range(2):
            next(rows)
        assert seen == [*range(6)]
        next(rows)
        eventually(lambda: len(seen) == 9)
        del rows


CASES: dict[tuple[str, str], Callable[[Place], None]] = {
    ("coordinator", "address"): address,
    ("coordinator", "heartbeat_interval_ms"): heartbeat_interval_ms,
    ("coordinator", "heartbeat_timeout_ms"): heartbeat_timeout_ms,
    ("storage", "backend"): backend,
    ("storage", "bucket"): bucket,
    ("storage", "region"): region,
    ("checkpoint", "interval_steps"): interval_steps,
    ("checkpoint", "keep_last_n"): keep_last_n,
    ("checkpoint", "compression"): compression,
    ("dataset", "default_shard_size"): default_shard_size,
    ("dataset", "prefetch_shards"): prefetch_shards,
}


@pytest.mark.parametrize(
    "key", [(section, key) for section, kind in SECTIONS.items() for key in kind.__struct_fields__], ids=".".join
)
def test_each_key_has_its_effect(key: tuple[str, str], place: Place) -> None:
    assert key in CASES, f"write a case for {'.'.join(key)} here"
    CASES[key](place)


# Variables of a worker


def test_each_variable_of_a_worker_has_its_effect(
    start_master: StartMaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is registered at that address under that name with that rank, which no other can have; its shards are its. In
    other spaces nobody knows of it."""
    master = start_master()
    values = {"COORDINATOR_URL": master.address.replace("tcp", "http"), "WORKER_ID": "me", "RANK": "1"}
    values |= {"WORLD_SIZE": "3", "UNIFIED_SPACE": "mine"}
    elsewhere = DatasetRegistry(master.address)
    assert {*values} == {*VARIABLES.values()}, "try the new one here"
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    write_jsonl(tmp_path / "data.jsonl", samples(0, 12))
    with RemoteCoordinator(master.address) as remote, DatasetRegistry() as mine, DatasetRegistry(remote) as other:
        worker = TrainingOrchestrator()
        assert asyncio.run(worker.register_worker()) == "me"
        assert other.active_workers() == ["me"]
        mine.register("d", tmp_path / "data.jsonl", "jsonl", shard_size=1)
        assert other.active_workers("d") == ["me", "worker-0", "worker-2"]
        assert len(mine.get_assignment("d")) == 4
        assert mine.get_assignment("d") == other.get_assignment("d", "me")
        assert (elsewhere.active_workers(), elsewhere.datasets()) == ([], [])
        worker.close()
        elsewhere.close()


def test_what_the_log_level_of_the_environment_hides(
    start_master: StartMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUST_LOG", "error")
    quiet = start_master()
    assert quiet.address
    quiet.kill()
    assert quiet.log.read_text() == ""
    monkeypatch.setenv("UNIFIED_LOG_LEVEL", "info")
    loud = start_master()
    assert loud.address
    loud.kill()
    assert " INFO " in loud.log.read_text()
