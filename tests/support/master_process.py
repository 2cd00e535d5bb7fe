"""Real master processes of a test, which it ends."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import unused_port

DEADLINE_MS = 60_000


class MasterProcess:
    def __init__(
        self,
        directory: Path,
        *flags: str,
        bind: str = "",
        lease_s: float = 15.0,
        program: Sequence[str] = ("-m", "unified_master"),
    ) -> None:
        self.address_file = directory / "address"
        self.address_file.unlink(missing_ok=True)
        self.log = directory / "master.log"
        bind = bind or f"tcp://127.0.0.1:{unused_port()}"  # a test that starts it again finds the port free
        command = [sys.executable, *program, "--bind", bind, "--state-dir", str(directory / "state")]
        command += ["--address-file", str(self.address_file), *flags]
        env = {**os.environ, "UNIFIED_HEARTBEAT_S": "0.1", "UNIFIED_LEASE_S": str(lease_s)}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log, env=env)

    @property
    def address(self) -> str:
        deadline = time.monotonic() + DEADLINE_MS / 1000
        while not self.address_file.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the master is not ready: {self.log.read_text()}")
            time.sleep(0.005)  # a file that another process writes: there is nothing to wait on
        return self.address_file.read_text().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(100)


StartMaster = Callable[..., MasterProcess]


@pytest.fixture
def start_master(tmp_path: Path) -> Iterator[StartMaster]:
    """Starts masters that have one state; those that are left at the end of the test are killed."""
    started: list[MasterProcess] = []

    def start(*flags: str, **options: Any) -> MasterProcess:
        started.append(MasterProcess(tmp_path, *flags, **options))
        return started[-1]

    yield start
    for master in started:
        master.kill()
