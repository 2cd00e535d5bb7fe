"""Real gateway processes of a test, which it ends."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.deadlines import met

DEADLINE_S = met(100.0)
TOKEN = "trainer-demo-token"
PAYLOAD: dict[str, Any] = {
    "framework": "meta",
    "model_id": 'config:{"hidden_size": 16}',
    "run_id": "tiny",
    "cpus_per_node": 1,
    "memory_per_node_gb": 1,
    "checkpoint_base_uri": "file:///tmp/never-written",
    "dataset_uri": "file:///tmp/never-read.jsonl",
}
"""Payload of a run that waits for a node for as long as there is none."""


class GatewayUnderTest:
    """`unified-gateway` in a process of its own, and a client that shows its token."""

    def __init__(self, folder: Path, *flags: str, port: int = 0, env: dict[str, str] | None = None) -> None:
        self.address_file = folder / f"gateway-{time.monotonic_ns()}.address"
        self.log = folder / "gateway.log"
        command = [sys.executable, "-P", "-m", "unified_gateway", "--port", str(port), *flags]
        command += ["--address-file", str(self.address_file)]
        own = {"TRAINER_API_TOKEN": TOKEN, "UNIFIED_CONNECT_S": "2", **(env or {})}
        inherited = {name: text for name, text in os.environ.items() if name != "UNIFIED_MASTER"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log, env={**inherited, **own})
        self._client: httpx.Client | None = None

    @property
    def url(self) -> str:
        deadline = time.monotonic() + DEADLINE_S
        while not self.address_file.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the gateway is not ready: {self.log.read_text()}")
            time.sleep(0.01)  # a file that another process writes: there is nothing to wait on
        return self.address_file.read_text().strip()

    @property
    def client(self) -> httpx.Client:
        if self._client is None:
            self._client = httpx.Client(base_url=self.url, headers={"X-TRAINER-TOKEN": TOKEN}, timeout=100)
        return self._client

    def stop(self) -> None:
        if self._client is not None:
            self._client.close()
        self.process.terminate()
        try:
            self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(100)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(100)


StartGateway = Callable[..., GatewayUnderTest]


@pytest.fixture
def start_gateway(tmp_path: Path) -> Iterator[StartGateway]:
    """Starts gateways; those that are left at the end of the test are stopped."""
    started: list[GatewayUnderTest] = []

    def start(*flags: str, port: int = 0, env: dict[str, str] | None = None) -> GatewayUnderTest:
        started.append(GatewayUnderTest(tmp_path, *flags, port=port, env=env))
        return started[-1]

    yield start
    for gateway in started:
        gateway.stop()
