"""`unified-master` listens where the settings say, and logs as they say, unless its flags say something else."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unified.coordinator.client import RemoteCoordinator
from unified.protocol.coordinator import Datasets, GetDatasets, RegisterWorker, WorkerRegistration
from unified.testing import eventually

pytestmark = pytest.mark.processes

Start = Callable[..., tuple[str, str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(*flags: str, **env: str) -> tuple[str, str]:
        file, log = tmp_path / "address", tmp_path / "log"
        command = [sys.executable, "-m", "unified_master", "--address-file", str(file), "--state-dir", str(tmp_path)]
        with log.open("wb") as output:
            master = subprocess.Popen(
                [*command, "--relay-bind", "tcp://127.0.0.1:0", *flags], env={**os.environ, **env}, stderr=output
            )
        started.append(master)
        eventually(lambda: file.exists() or master.poll() is not None, message="the master did not start")
        return file.read_text().strip() if file.exists() else "", log.read_text()

    yield begin
    for master in started:
        master.terminate()
        master.wait(timeout=100)


@pytest.fixture
def settings(tmp_path: Path) -> str:
    file = tmp_path / "run.toml"
    file.write_text('[coordinator]\naddress = "127.0.0.2:0"')
    return str(file)


def test_address_of_the_settings(start: Start, settings: str) -> None:
    address, _ = start(UNIFIED_CONFIG=settings)
    assert address.startswith("tcp://127.0.0.2:")


def test_flag_is_above_the_settings(start: Start, settings: str) -> None:
    address, _ = start("--bind", "tcp://127.0.0.3:0", UNIFIED_CONFIG=settings)
    assert address.startswith("tcp://127.0.0.3:")


def test_settings_that_are_wrong_are_told(start: Start) -> None:
    address, log = start(UNIFIED_COORDINATOR_ADDRESS="everywhere")
    assert not address
    assert log == "unified-master: UNIFIED_COORDINATOR_ADDRESS='everywhere': host:port is expected.\n"


def test_log_level_is_that_of_rust_log(start: Start) -> None:
    _, log = start("--bind", "tcp://127.0.0.1:0", RUST_LOG="info")
    assert " master INFO " in log


def test_log_level_of_the_flag_is_above_it(start: Start) -> None:
    _, log = start("--bind", "tcp://127.0.0.1:0", "--log-level", "error", RUST_LOG="debug")
    assert "INFO" not in log


def test_rust_log_that_is_wrong_is_told(start: Start) -> None:
    _, log = start("--bind", "tcp://127.0.0.1:0", RUST_LOG="degub")
    assert log == "unified-master: RUST_LOG='degub': 'degub' is no log level. Did you mean 'debug'?\n"


def test_workers_that_do_not_say_it_are_told_its_heartbeats(start: Start) -> None:
    address, _ = start(
        "--bind",
        "tcp://127.0.0.1:0",
        UNIFIED_COORDINATOR_HEARTBEAT_INTERVAL_MS="50",
        UNIFIED_COORDINATOR_HEARTBEAT_TIMEOUT_MS="250",
    )
    with RemoteCoordinator(address) as coordinator:
        told = coordinator.ask(RegisterWorker(worker_id="w", session="s"), WorkerRegistration)
        assert (told.heartbeat_interval_s, told.timeout_s) == (0.05, 0.25)
        own = coordinator.ask(RegisterWorker(worker_id="v", session="s", timeout_s=100), WorkerRegistration)
        assert (own.heartbeat_interval_s, own.timeout_s) == (0.05, 100.0)
        eventually(lambda: coordinator.ask(GetDatasets(), Datasets).workers == ["v"])
