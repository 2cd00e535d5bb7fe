"""What every framework has to do for one who posts runs: end, leave the document's layout, and go on after a kill."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import Any

from tests.support.training_api import LARGE, LIVING, Service, answered, keys_of
from unified.storage import open_storage
from unified.testing import eventually

STEP_S = 100.0
LOG_OF_A_RANK = re.compile(r"logs/.+")


def run_to_its_end(service: Service, payload: dict[str, Any]) -> None:
    """Post a run of six steps that saves every second one; follow status and log; look at what it has left."""
    api = service.api
    posted = api.submit(payload)
    name = posted["name"]
    assert posted["status"] in LIVING
    assert (posted["run_id"], posted["framework"]) == (payload["run_id"], payload["framework"])
    assert api.submit(payload, 200)["job_id"] == posted["job_id"], "the same payload is the same run"
    assert api.log(name), "the log was followed to its end"
    status = api.ended(name)
    assert (status["status"], status["exit_code"], status["detail"]) == ("succeeded", 0, None), status
    assert api.submit(payload, 200)["status"] == "succeeded"

    keys = keys_of(payload)
    logs = {key for key in keys if LOG_OF_A_RANK.fullmatch(key)}
    marks = {f"checkpoints/step-{step:06}.json" for step in (2, 4, 6)}
    files = {key for key in keys if key.startswith("checkpoints/")} - marks
    assert set(keys) - logs - files == {*marks, "config/run.json"}
    assert "logs/.keep" in logs
    ranks = {key.rpartition("/")[2] for key in logs - {"logs/.keep"}}
    assert ranks == {f"rank-{rank}.log" for rank in range(payload["num_nodes"])}
    check_files(payload["framework"], files)
    config = read_json(payload, "config/run.json")
    assert {name: config[name] for name in ("framework", "run_id", "model_id", "dataset_uri")} == {
        name: payload[name] for name in ("framework", "run_id", "model_id", "dataset_uri")
    }
    assert config["extra_args"] == payload["extra_args"]

    assert api.steps(name) == [2, 4, 6]
    points = api.metrics(name)
    assert points[-1]["step"] == 6
    assert "loss" in points[-1]["metrics"]
    events = answered(api.get(f"/train/{name}/events"))["items"]
    assert events
    assert all(event["reason"] for event in events)


def check_files(framework: str, files: set[str]) -> None:
    """Names of a checkpoint's files, as the document has them."""
    if framework == "hf":
        folders = {key.split("/")[1] for key in files}
        assert folders == {f"checkpoint-{step}" for step in (2, 4, 6)}, files
        assert all(len(key.split("/")) > 2 for key in files)
    else:
        suffix = {"meta": "pt", "nemo": "ckpt"}[framework]
        assert files == {f"checkpoints/step-{step:06}.{suffix}" for step in (2, 4, 6)}


def killed_runs_go_on(service: Service, payload: dict[str, Any]) -> None:
    """Kill -9 of a rank, of the gateway, and of the whole run: each time it goes on from the highest complete step."""
    api = service.api
    payload = {**payload, "resume_from_checkpoint": False}
    long = {**payload, "extra_args": {**payload["extra_args"], "max_steps": LARGE}}
    with api.run_until_killed(long) as name:
        ranks_and_gateway_are_killed(service, name)
    stopped = api.status(name)
    assert stopped["status"] == "failed"
    assert "\n" not in stopped["detail"]

    saved = max(api.steps(name))
    short = {**payload, "extra_args": {**payload["extra_args"], "max_steps": saved + 3}}
    conflict = answered(api.post("/train", json=short), 409)
    assert "max_steps" in json.dumps(conflict["differences"])
    resumed = api.submit({**short, "resume_from_checkpoint": True})
    assert resumed["name"] == name
    assert resumed["job_id"] != stopped["job_id"]
    status = api.ended(name)
    assert status["status"] == "succeeded", status
    assert min(point["step"] for point in api.metrics(name)) > saved
    assert max(api.steps(name)) == saved + 3


def ranks_and_gateway_are_killed(service: Service, name: str) -> None:
    """Kill -9 of a rank, then of the gateway."""
    api, cluster = service.api, service.cluster
    eventually(lambda: api.steps(name), STEP_S, "no checkpoint")

    pids = cluster.workers(name)
    before = max(api.steps(name))
    os.kill(next(pid for worker, pid in pids.items() if "2-1" in worker), signal.SIGKILL)
    eventually(lambda: api.status(name)["num_restarts"] > 0, STEP_S, "no restart was counted")
    again = eventually(
        lambda: [point["step"] for point in api.metrics(name) if point["incarnation"] > 0], STEP_S, "no step after it"
    )
    assert min(again) > before, "it goes on from a checkpoint that was there"

    pids = cluster.workers(name)
    api.kill_and_start_again()
    assert api.status(name)["status"] == "running"
    seen = max(api.steps(name))
    eventually(lambda: max(api.steps(name)) > seen, STEP_S, "the run does not go on without the gateway")
    assert cluster.workers(name) == pids, "no worker was touched"


def read_json(payload: dict[str, Any], key: str) -> Any:
    """Return an object of a run."""
    store, prefix = open_storage(
        f"{payload['checkpoint_base_uri']}/{payload['run_id']}/framework={payload['framework']}"
    )
    with store:
        return json.loads(store.read(f"{prefix}/{key}"))
