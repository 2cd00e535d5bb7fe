"""What the gateway's benchmark asks: a gateway before a master whose queries are counted, and a bare FastAPI route."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from benchmarks.coordinator.master import master
from unified.protocol.client_master import client_to_master

START_S = 60.0
TOKEN = "benchmark-token"
RUNS = 20
ROOT = Path(__file__).parents[2]
_PAYLOAD = {
    "framework": "meta",
    "model_id": "config:{}",
    "checkpoint_base_uri": "s3://bench/runs",
    "dataset_uri": "s3://bench/data.jsonl",
}


class CountedMaster:
    """A relay before a master, which counts the requests by kind. It has one client."""

    def __init__(self, address: str) -> None:
        self.requests: Counter[str] = Counter()
        self.num_bytes = 0
        """Bytes of its answers."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._front, self._back = self._context.socket(zmq.ROUTER), self._context.socket(zmq.DEALER)
        self._front.bind("tcp://127.0.0.1:*")
        self._back.connect(address)
        self.address = self._front.get_string(zmq.LAST_ENDPOINT)
        self._is_closed = False
        self._thread = threading.Thread(target=self._relay, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()
        self._context.destroy(0)

    def _relay(self) -> None:
        poller, client = zmq.Poller(), b""
        poller.register(self._front, zmq.POLLIN)
        poller.register(self._back, zmq.POLLIN)
        while not self._is_closed:
            for socket, _ in poller.poll(100):
                if socket is self._front:
                    client, *frames = self._front.recv_multipart()
                    self.requests[type(client_to_master.decode(frames).message).__name__] += 1
                    self._back.send_multipart(frames)
                else:
                    frames = self._back.recv_multipart()
                    self.num_bytes += sum(map(len, frames))
                    self._front.send_multipart([client, *frames])


class GatewayUnderLoad:
    """A gateway with `RUNS` runs that wait for a node.

    Attributes:
        master: the relay before its master.
        port: of its HTTP.
        name: of one run.
    """

    def __init__(self, counted: CountedMaster, port: int) -> None:
        self.master = counted
        self.port = port
        self.name = ""
        for number in range(RUNS):
            self.name = self._submit({**_PAYLOAD, "run_id": f"bench-{number}"})["name"]

    def _submit(self, payload: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/train",
            data=json.dumps(payload).encode(),
            headers={"X-TRAINER-TOKEN": TOKEN, "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


@contextmanager
def gateway(folder: Path) -> Iterator[GatewayUnderLoad]:
    """A gateway and a master, in processes of their own."""
    with master(folder) as address:
        counted = CountedMaster(address)
        command = ["-m", "unified_gateway", "--master", counted.address, "--port", "0"]
        command += ["--address-file", str(folder / "gateway"), "--die-with-parent"]
        try:
            with process(command, folder / "gateway", {"TRAINER_API_TOKEN": TOKEN}) as port:
                yield GatewayUnderLoad(counted, port)
        finally:
            counted.close()


@contextmanager
def bare_route(folder: Path, answer: bytes) -> Iterator[int]:
    """One FastAPI route that returns this answer, made anew each time, behind the same server. Yields the port."""
    command = ["-m", "benchmarks.gateway.bare", str(folder / "bare")]
    with process(command, folder / "bare", {"BARE_ANSWER": answer.decode()}) as port:
        yield port


@contextmanager
def process(command: list[str], address_file: Path, env: dict[str, str]) -> Iterator[int]:
    """A server that writes its address into a file once it is ready. Yields its port."""
    log = address_file.with_suffix(".log")
    with log.open("wb") as output:
        started = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env={**os.environ, **env}, stdout=output, stderr=output
        )
    try:
        deadline = time.monotonic() + START_S
        while not address_file.exists():
            if started.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[1]} did not start: {log.read_text()[-1000:]}")
            time.sleep(0.01)
        yield int(address_file.read_text().strip().rstrip("/").rpartition(":")[2])
    finally:
        started.terminate()
        started.wait(START_S)
