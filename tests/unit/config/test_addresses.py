"""Addresses as people write them, and where a process looks for its coordinator."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from unified.checkpoint import CheckpointManager
from unified.client.connection import connect_master
from unified.config import addresses
from unified.config.addresses import find_master, parse_address, parse_coordinator, parse_flag, split_address
from unified.coordinator.client import RemoteCoordinator
from unified.coordinator.embedded import embedded_coordinator
from unified.coordinator.orchestrator import TrainingOrchestrator
from unified.coordinator.worker_identity import discover, open_coordinator
from unified.data.registry import DatasetRegistry
from unified.errors import UsageError

VARIABLES = ("COORDINATOR_URL", "WORKER_ID", "RANK", "WORLD_SIZE")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("parse", "text", "address"),
    [
        (parse_coordinator, "tcp://10.0.0.1:5", "tcp://10.0.0.1:5"),
        (parse_coordinator, "http://coordinator:50051", "tcp://coordinator:50051"),
        (parse_coordinator, "HTTP://coordinator:50051/", "tcp://coordinator:50051"),
        (parse_coordinator, "http://coordinator", "tcp://coordinator:7077"),
        (parse_coordinator, "localhost:50051", "tcp://localhost:50051"),
        (parse_coordinator, "tcp://[::1]:5", "tcp://[::1]:5"),
        (parse_coordinator, " head ", "tcp://head:7077"),
        (parse_coordinator, "local", None),
        (parse_coordinator, "LOCAL", None),
        (parse_address, "tcp://10.0.0.1:5000", "tcp://10.0.0.1:5000"),
        (parse_address, "host-1.example:80", "tcp://host-1.example:80"),
        (parse_address, "localhost", "tcp://localhost:7077"),
        (parse_address, "tcp://[::1]:9", "tcp://[::1]:9"),
    ],
)
def test_forms_of_an_address(parse: Callable[[str], str | None], text: str, address: str | None) -> None:
    assert parse(text) == address


@pytest.mark.parametrize(
    "text", ["", "https://a:1", "grpc://a:1", "a:0", "a:65536", "http://a:1/path", "a b", "http://"]
)
def test_what_is_no_address_is_named(text: str) -> None:
    with pytest.raises(UsageError, match=r"tcp://HOST:PORT"):
        parse_coordinator(text)


def test_a_local_cluster_of_this_process_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIFIED_MASTER", "tcp://a:1")
    monkeypatch.setattr(addresses, "own_masters", ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"])
    assert find_master(None) == "tcp://127.0.0.1:2"
    assert find_master("tcp://b:1") == "tcp://b:1"
    assert find_master("local") is None


def test_the_argument_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_coordinator(None) == (embedded_coordinator(), False)
    monkeypatch.setenv("COORDINATOR_URL", "http://somewhere:50051")
    found, is_mine = open_coordinator(None)
    assert isinstance(found, RemoteCoordinator)
    assert (found.address, is_mine) == ("tcp://somewhere:50051", True)
    given, _ = open_coordinator("elsewhere:1")
    assert isinstance(given, RemoteCoordinator)
    assert given.address == "tcp://elsewhere:1"
    assert open_coordinator("local") == (embedded_coordinator(), False)


def test_a_worker_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WORKER_ID", "gpu-host"), ("RANK", "3"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    worker = TrainingOrchestrator(coordinator_url="local")
    assert (worker.worker_id, worker.rank, worker.world_size) == ("gpu-host", 3, 8)
    registry = DatasetRegistry("local")
    assert (registry.rank, registry.world_size) == (3, 8)
    with pytest.raises(UsageError, match="rank 8 is not in a world of 8"):
        registry.get_shard("d", 8, 0)


def test_a_worker_of_nothing_at_all_is_alone() -> None:
    worker = TrainingOrchestrator(coordinator_url="local")
    assert (worker.worker_id, worker.rank, worker.world_size) == ("worker-0", 0, 1)
    with pytest.raises(UsageError, match="RANK"):
        DatasetRegistry("local").get_shard("d", epoch=0)


def test_one_of_several_without_a_coordinator_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them would wait for the others in a process of its own."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(UsageError, match=r"rank 3 of 8 has no coordinator .* set COORDINATOR_URL"):
        TrainingOrchestrator()
    monkeypatch.setenv("COORDINATOR_URL", "local")
    assert TrainingOrchestrator().world_size == TrainingOrchestrator(coordinator_url="local").world_size == 8
    monkeypatch.setenv("COORDINATOR_URL", "head:5")
    TrainingOrchestrator().close()


@pytest.mark.parametrize("address", ["http://head:50051", "tcp://10.0.0.1:7077", "grpc://head", "head:7077", "local"])
def test_the_address_of_a_coordinator_is_no_name_of_a_worker(address: str) -> None:
    """Taken for one, the worker would be alone, and pass every barrier."""
    with pytest.raises(UsageError, match=r"is the address of a coordinator.*coordinator_url="):
        TrainingOrchestrator(address)


@pytest.mark.parametrize("name", ["host-1:4242", "10.0.0.1:8080", "step:3"])
def test_a_worker_may_be_called_by_its_own_address(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert TrainingOrchestrator(name, "local").worker_id == name
    monkeypatch.setenv("COORDINATOR_URL", "local")
    assert TrainingOrchestrator(name).worker_id == name
    with pytest.raises(UsageError, match="address of a coordinator"):
        TrainingOrchestrator(f"tcp://{name}")


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "one"}, "RANK='one'"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "rank 4 is not in a world of 4"),
        ({"RANK": "-1"}, "RANK='-1': it must be at least 0"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0': it must be at least 1"),
    ],
)
def test_variables_that_cannot_be(env: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        discover(env)


def test_a_rank_may_be_said_without_its_world() -> None:
    assert (discover({"RANK": "3"}).rank, discover({"RANK": "3"}).world_size) == (3, None)


def test_what_the_environment_calls_a_coordinator_is_checked_as_an_argument_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COORDINATOR_URL", "HTTP://head")
    found, _ = open_coordinator(None)
    assert isinstance(found, RemoteCoordinator)
    assert found.address == "tcp://head:7077"
    monkeypatch.setenv("COORDINATOR_URL", "https://head:5")
    for make in (TrainingOrchestrator, DatasetRegistry):
        with pytest.raises(UsageError, match=r"COORDINATOR_URL='https://head:5': .*tcp://HOST:PORT"):
            make()


def test_the_settings_say_how_long_a_worker_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIFIED_COORDINATOR_HEARTBEAT_TIMEOUT_MS", "5000")
    monkeypatch.setenv("UNIFIED_COORDINATOR_HEARTBEAT_INTERVAL_MS", "250")
    worker = TrainingOrchestrator(coordinator_url="local")
    assert (worker.heartbeat_interval_s, worker.heartbeat_timeout_s) == (0.25, 5.0)
    worker = TrainingOrchestrator(coordinator_url="local", heartbeat_interval_s=2, heartbeat_timeout_s=9)
    assert (worker.heartbeat_interval_s, worker.heartbeat_timeout_s) == (2, 9)
    monkeypatch.delenv("UNIFIED_COORDINATOR_HEARTBEAT_TIMEOUT_MS")
    monkeypatch.delenv("UNIFIED_COORDINATOR_HEARTBEAT_INTERVAL_MS")
    worker = TrainingOrchestrator(coordinator_url="local")
    assert (worker.heartbeat_interval_s, worker.heartbeat_timeout_s) == (None, None)


def test_settings_that_say_what_is_the_default_have_said_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As document 5's file does; a coordinator may say something else to those that do not."""
    monkeypatch.setenv("UNIFIED_COORDINATOR_HEARTBEAT_TIMEOUT_MS", "30000")
    worker = TrainingOrchestrator(coordinator_url="local")
    assert (worker.heartbeat_interval_s, worker.heartbeat_timeout_s) == (None, 30.0)


def test_an_interval_is_shorter_than_the_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="lost between two heartbeats"):
        TrainingOrchestrator(coordinator_url="local", heartbeat_interval_s=3, heartbeat_timeout_s=3)
    monkeypatch.setenv("UNIFIED_COORDINATOR_HEARTBEAT_TIMEOUT_MS", "30000")
    with pytest.raises(UsageError, match="heartbeat_interval_s is 60 and heartbeat_timeout_s 30"):
        TrainingOrchestrator(coordinator_url="local", heartbeat_interval_s=60)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_times_that_cannot_be(seconds: float) -> None:
    with pytest.raises(UsageError, match="heartbeat_timeout_s"):
        TrainingOrchestrator(coordinator_url="local", heartbeat_timeout_s=seconds)
    with pytest.raises(UsageError, match="heartbeat_interval_s"):
        TrainingOrchestrator(coordinator_url="local", heartbeat_interval_s=seconds)


@pytest.mark.parametrize("backend", ["local", "s3"])
def test_the_address_of_a_coordinator_is_no_place_of_checkpoints(
    backend: Literal["local", "s3"], tmp_path: Path
) -> None:
    with contextlib.chdir(tmp_path), pytest.raises(UsageError, match=r"'http://head:50051' is neither"):
        CheckpointManager("http://head:50051", backend)
    assert not list(tmp_path.iterdir())


def test_data_are_in_no_other_store(tmp_path: Path) -> None:
    registry = DatasetRegistry("local", rank=0, world_size=1)
    for path in ("http://head:50051", "gs://bucket/x"):
        with pytest.raises(UsageError, match=r"here and in buckets of S3 .*, not at"):
            registry.register("d", path, "jsonl")
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n')
    registry.register("in-a-file", f"file://{tmp_path}/a.jsonl", "jsonl")
    assert registry.get_shard("in-a-file") == [str(tmp_path / "a.jsonl")]


def test_an_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIFIED_MASTER", "a:1")
    assert find_master("b:2") == "tcp://b:2"
    assert find_master(None) == "tcp://a:1"
    monkeypatch.setenv("UNIFIED_MASTER", "")
    assert find_master(None) is None


def test_without_an_address_the_error_says_how_to_give_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNIFIED_MASTER", raising=False)
    monkeypatch.setenv("UNIFIED_RUN_DIR", str(tmp_path))
    with pytest.raises(UsageError, match=r"--master tcp://HOST:PORT.*UNIFIED_MASTER"):
        connect_master(None)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("a", "a", None),
        ("GPU-1.example:0", "GPU-1.example", 0),
        ("tcp://10.0.0.1:65535/", "10.0.0.1", 65535),
        ("[fe80::1%eth0]:9", "[fe80::1%eth0]", 9),
        ("[::]", "[::]", None),
        ("*:7077", "*", 7077),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, host: str, port: int | None) -> None:
    assert split_address(text) == (host, port)
    assert split_address(text).bare_host == host.strip("[]")


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            ":1",
            "a:",
            "a:b",
            "a:1:2",
            "a:-1",
            "a b:1",
            "a\n:1",
            "::1",
            "[::1",
            "[::g]:1",
            "[::1]x:1",
            "[10.0.0.1]:1",
        ),
        *("u@a:1", "a:1/path", "a:1?q", "a:1#f", "tcp://", "udp://a:1", "tcp:a:1", "a:65536"),
    ],
)
def test_texts_that_are_no_address(text: str) -> None:
    with pytest.raises(ValueError, match=r"host:port is expected|a port is at most"):
        split_address(text)


def test_a_flag_of_a_daemon_names_a_port() -> None:
    assert parse_flag("--bind", "tcp://*:0").url == "tcp://*:0"
    for text in ("a", "tcp://a:b"):
        with pytest.raises(UsageError, match=rf"--bind '{text}' is not an address: write tcp://HOST:PORT"):
            parse_flag("--bind", text)


@pytest.mark.parametrize("text", ["*:7077", "a:0"])
def test_a_master_cannot_be_reached_at(text: str) -> None:
    with pytest.raises(UsageError, match="is not the address of a master"):
        parse_address(text)
