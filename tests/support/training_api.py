"""The training API as its users have it: the gateway as a process, an HTTP client, payloads, and what a run leaves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.support.s3 import S3Server, use_store
from unified.client.daemons import Daemon
from unified.storage import open_storage
from unified.testing import Belongings, LocalCluster, eventually
from unified.training.layout import RunLayout

TOKEN = "token-of-the-tests"
LIVING = ("submitted", "running")
TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
LARGE = 100_000
"""More steps than any test waits for."""
START_S = 100.0
END_S = 100.0


class TrainingApi(httpx.Client):
    """A gateway in a process of its own, and a client of it.

    Args:
        home: for its log.
        master: address of the master; empty: a cluster of the gateway's own.
        env: more environment.
    """

    def __init__(self, home: Path, master: str, env: Mapping[str, str] | None = None) -> None:
        self._home = home
        self._master = master
        self._env = {**os.environ, "TRAINER_API_TOKEN": TOKEN, **(env or {})}
        self._daemon: Daemon | None = None
        home.mkdir(parents=True, exist_ok=True)
        super().__init__(base_url=self.start(), headers={"X-TRAINER-TOKEN": TOKEN}, timeout=START_S, trust_env=False)

    @property
    def pid(self) -> int:
        assert self._daemon is not None
        return self._daemon.pid

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, port: int = 0) -> str:
        """Start the gateway, and wait until it listens; return its URL."""
        address = self._home / "gateway.address"
        address.unlink(missing_ok=True)
        arguments = ["--port", str(port), "--address-file", str(address), "--die-with-parent", str(os.getpid())]
        arguments += ["--master", self._master] if self._master else []
        self._daemon = daemon = Daemon("unified_gateway", arguments, self._home / "gateway.log", self._env)
        eventually(lambda: daemon.is_ended or address.exists(), START_S, "the gateway wrote no address")
        assert not daemon.is_ended, daemon.last_words()
        return address.read_text().strip()

    def kill_and_start_again(self) -> None:
        """Kill -9 of the gateway; another one takes its port."""
        os.kill(self.pid, signal.SIGKILL)
        assert self._daemon is not None
        assert self._daemon.wait(100)
        assert self.start(self.base_url.port or 80) == str(self.base_url).rstrip("/")

    def stop(self) -> None:
        """End the gateway in order."""
        self.close()
        if self._daemon is not None:
            Daemon.end_all([self._daemon], 10.0)

    def submit(self, payload: Mapping[str, Any], status: int = 201) -> dict[str, Any]:
        """POST /train."""
        return answered(self.post("/train", json=payload), status)

    def status(self, name: str) -> dict[str, Any]:
        return answered(self.get(f"/train/{name}"))

    def metrics(self, name: str) -> list[dict[str, Any]]:
        points: list[dict[str, Any]] = answered(self.get(f"/train/{name}/metrics"))["items"]
        return points

    def steps(self, name: str) -> list[int]:
        """Complete steps of the run."""
        return [checkpoint["step"] for checkpoint in answered(self.get(f"/train/{name}/checkpoints"))["items"]]

    def ended(self, name: str, timeout: float = END_S) -> dict[str, Any]:
        """Wait until a run has ended; return its status."""
        return eventually(
            lambda: status if (status := self.status(name))["status"] not in LIVING else {},
            timeout,
            f"{name} has not ended",
        )

    @contextlib.contextmanager
    def run_until_killed(self, payload: Mapping[str, Any]) -> Iterator[str]:
        """A run of many steps, by name; it is killed at the end of the block."""
        name = self.submit(payload)["name"]
        try:
            yield name
        finally:
            answered(self.delete(f"/train/{name}", params={"force": "true"}), 202)
            self.ended(name)

    def log(self, name: str) -> str:
        """Follow the run's log to its end; return all lines."""
        return "\n".join(data for event, data in self.followed(name) if event == "line")

    def followed(self, name: str) -> Iterator[tuple[str, str]]:
        """Events of the log as they come: type and data."""
        event = ""
        with self.stream("GET", f"/train/{name}/logs", params={"follow": "true"}, timeout=END_S) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            for line in answer.iter_lines():
                field, _, value = line.partition(": ")
                if field == "event":
                    event = value
                elif field == "data":
                    yield event, value


class Service(NamedTuple):
    """The training API in front of a cluster, and a bucket."""

    api: TrainingApi
    cluster: LocalCluster
    bucket: str
    s3: S3Server


@pytest.fixture(scope="module")
def service(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A store, a master, two agents with four virtual devices each, and the gateway, for all tests of a module."""
    before = Belongings()
    home = tmp_path_factory.mktemp("training-api")
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_store(s3_server, monkeypatch, home)
        cluster = LocalCluster(2, 4, home=home / "cluster")
        try:
            with TrainingApi(home, cluster.start().address) as api:
                bucket = s3_server.make_bucket()
                write_rows(bucket)
                yield Service(api, cluster, bucket, s3_server)
        finally:
            left = cluster.stop()
    # The timer of the test that is running belongs to pytest.
    left += [thing for thing in Belongings().left_since(before) if not thing.startswith("thread pytest_timeout")]
    assert not left, left


def answered(answer: httpx.Response, status: int = 200) -> dict[str, Any]:
    """Return the JSON object of an answer that has to have this status."""
    assert answer.status_code == status, f"{answer.request.url}: {answer.status_code}: {answer.text[:2000]}"
    found: dict[str, Any] = answer.json()
    return found


def payload_of(document: Mapping[str, Any], bucket: str, run_id: str, **changes: Any) -> dict[str, Any]:
    """Return the document's payload with its sizes cut, its addresses in `bucket`, and a model from scratch.

    Args:
        changes: fields in the place of those; `extra_args` come on top of the document's.
    """
    small = {"max_steps": 6, "lr": 1e-3, "batch_size": 4, "max_seq_len": 32, "save_steps": 2, "logging_steps": 1}
    return {
        **document,
        "model_id": f"config:{json.dumps(TINY)}",
        "run_id": run_id,
        "num_nodes": 2,
        "gpus_per_node": 1,
        "cpus_per_node": 1,
        "memory_per_node_gb": 1,
        "checkpoint_base_uri": f"s3://{bucket}/runs",
        "dataset_uri": f"s3://{bucket}/fraud/aml_ruleset.jsonl",
        **changes,
        "extra_args": {**small, **changes.get("extra_args", {})},
    }


def write_rows(bucket: str, key: str = "fraud/aml_ruleset.jsonl", number: int = 64) -> str:
    """Write a dataset of that many rows; return its address."""
    rows = [{"text": f"rule {index}: amounts above {index * 100} EUR are looked at"} for index in range(number)]
    return write_text(bucket, key, "".join(json.dumps(row) + "\n" for row in rows))


def write_text(bucket: str, key: str, text: str | bytes) -> str:
    """Write an object; return its address."""
    store, _ = open_storage(f"s3://{bucket}")
    store.write(key, text if isinstance(text, bytes) else text.encode())
    store.close()
    return f"s3://{bucket}/{key}"


def keys_of(payload: Mapping[str, Any]) -> list[str]:
    """Names of the objects below the folder of a run and framework, sorted."""
    layout = RunLayout(payload["checkpoint_base_uri"], payload["run_id"], payload["framework"])
    store, prefix = open_storage(layout.prefix)
    keys = [stat.key.removeprefix(f"{prefix}/") for stat in store.list(f"{prefix}/")]
    store.close()
    return keys


def document(root: Path) -> dict[str, Any]:
    """The reference document's payload, as the repository has it."""
    found: dict[str, Any] = json.loads((root / "scripts/sample-unified-request.json").read_text())
    return found
