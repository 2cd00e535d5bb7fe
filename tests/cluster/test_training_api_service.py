"""The training API as document 4 runs it: `uvicorn services.training_api.app:app`, with a cluster of its own."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from unified.process import every_process, is_alive
from unified.testing import eventually

ROOT = Path(__file__).parents[2]
TOKEN = "trainer-demo-token"
MODEL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}

pytestmark = pytest.mark.processes


@pytest.fixture
def service(tmp_path: Path) -> Iterator[httpx.Client]:
    """A client of the service; at its end nothing of the cluster is left."""
    command = [sys.executable, "-m", "uvicorn", "services.training_api.app:app", "--port", "0"]
    env = {name: text for name, text in os.environ.items() if name != "UNIFIED_MASTER"}
    env |= {"TRAINER_API_TOKEN": TOKEN, "TRAINER_API_DEVICES": "2", "UNIFIED_HOME": str(tmp_path / "home")}
    log = tmp_path / "uvicorn.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out)
    try:
        url = eventually(lambda: address_in(log.read_text()), 100, "the service did not start")
        with httpx.Client(base_url=url, headers={"X-TRAINER-TOKEN": TOKEN}, timeout=100) as client:
            yield client
    finally:
        daemons = environments(tmp_path)
        process.terminate()
        process.wait(100)
    left = [pid for pid in daemons if is_alive(pid)]
    assert not left, log.read_text()


def environments(folder: Path) -> dict[int, bytes]:
    """Return the environment of each process of the service's cluster, by pid."""
    found: dict[int, bytes] = {}
    for process in every_process():
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            if f"UNIFIED_HOME={folder}/home/embedded/".encode() in environment:
                found[process.pid] = environment
    return found


def address_in(log: str) -> str:
    _, _, rest = log.partition("Uvicorn running on ")
    return rest.split(" ")[0] if "Application startup complete" in log else ""


@pytest.mark.slow
def test_a_run_trains_is_followed_stopped_and_resumed(service: httpx.Client, tmp_path: Path) -> None:
    dataset = tmp_path / "data.jsonl"
    dataset.write_text(
        "".join(json.dumps({"text": f"row {number} of a small dataset"}) + "\n" for number in range(200))
    )
    arguments = {"max_steps": 1_000_000, "save_steps": 5, "batch_size": 2, "max_seq_len": 32, "logging_steps": 1}
    payload: dict[str, Any] = {
        "framework": "meta",
        "model_id": f"config:{json.dumps(MODEL)}",
        "run_id": "local",
        "gpus_per_node": 2,
        "checkpoint_base_uri": f"file://{tmp_path}/runs/",
        "dataset_uri": str(dataset),
        "extra_args": arguments,
    }
    made = service.post("/train", json=payload)
    assert (made.status_code, made.json()["status"]) == (201, "submitted")
    name = made.json()["name"]
    with service.stream("GET", f"/train/{name}/logs", params={"follow": True}) as events:
        lines = (line for line in events.iter_lines() if line.startswith("data: "))
        line = next(line for line in lines if "step 12/" in line)
    assert line.startswith("data: [trainer-0] ")
    assert service.get(f"/train/{name}").json()["status"] == "running"
    series = service.get(f"/train/{name}/metrics").json()
    assert series["num_thinned"] == 0
    assert [row["step"] for row in series["items"]] == list(range(1, len(series["items"]) + 1))
    assert len(series["items"]) >= 5  # agents hear of progress now and then
    losses = [row["metrics"]["loss"] for row in series["items"]]
    assert len(set(losses)) == len(losses), "each step has its own"
    stopped = service.delete(f"/train/{name}")
    assert stopped.status_code == 202
    status = eventually(lambda: ended(service, name), 100, "the run did not stop")
    assert (status["status"], status["exit_code"]) == ("failed", 130)
    last = service.get(f"/train/{name}/checkpoints").json()["items"][-1]["step"]
    assert last >= 10
    more = {"extra_args": {"max_steps": last + 5}}
    assert service.post(f"/train/{name}/resume", json=more).status_code == 201
    with service.stream("GET", f"/train/{name}/logs", params={"follow": True, "rank": 0}) as events:
        text = "\n".join(events.iter_lines())
    assert f"resume_step={last}" in text
    assert json.loads(text.partition("event: end\ndata: ")[2].splitlines()[0])["status"] == "succeeded"
    assert service.get(f"/train/{name}/checkpoints").json()["items"][-1]["step"] == last + 5
    listed = service.get("/train", params={"status": "succeeded"}).json()
    assert [run["name"] for run in listed["items"]] == [name]
    daemons = environments(tmp_path)
    assert len(daemons) >= 2
    assert not any(TOKEN.encode() in environment for environment in daemons.values())


@pytest.mark.slow
def test_a_run_that_cannot_succeed_fails_once_with_one_line(service: httpx.Client, tmp_path: Path) -> None:
    dataset = tmp_path / "data.jsonl"
    dataset.write_text('{"body": "x"}\n')
    payload = {
        "framework": "meta",
        "model_id": f"config:{json.dumps(MODEL)}",
        "run_id": "bad",
        "checkpoint_base_uri": f"file://{tmp_path}/runs",
        "dataset_uri": str(dataset),
    }
    name = service.post("/train", json=payload).json()["name"]
    status = eventually(lambda: ended(service, name), 100, "the run did not fail")
    assert (status["status"], status["num_restarts"]) == ("failed", 0)
    assert status["detail"].startswith(f"line 1 of {dataset} has no field 'text'")
    assert "\n" not in status["detail"]


def ended(service: httpx.Client, name: str) -> dict[str, Any]:
    """Return the status of a run that has ended, else nothing."""
    status: dict[str, Any] = service.get(f"/train/{name}").json()
    return status if status["ended_at"] else {}
