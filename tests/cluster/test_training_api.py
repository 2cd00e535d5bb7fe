"""The training API, whole: moto's S3 over HTTP, a master, two agents and the gateway, all processes of their own.

Here with the meta framework; `tests/training` has the other two.
"""

import gzip
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.conftest import Cluster
from tests.support import training_scenarios
from tests.support.s3 import Asked, faulty
from tests.support.training_api import LARGE, Service, answered, document, payload_of, write_text
from unified.client.daemons import marked_processes
from unified.testing import eventually

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
META = {**document(ROOT), "framework": "meta"}
HAS_HF = find_spec("transformers") is not None
FLAT_MB = 100
"""What 300 MB of data may add to the memory of a rank: buffers of a download, mostly."""


@pytest.fixture(autouse=True)
def no_job_is_left(service: Service) -> Iterator[None]:
    """No test leaves a living job behind, whatever was posted."""
    yield
    living = [job.name for job in service.cluster.jobs if job.stage != "STOPPED"]
    assert not living


def test_a_run_ends_and_leaves_the_layout_of_the_document(service: Service) -> None:
    training_scenarios.run_to_its_end(service, payload_of(META, service.bucket, "layout_v4"))


def test_killed_runs_go_on_from_the_highest_complete_step(service: Service) -> None:
    training_scenarios.killed_runs_go_on(service, payload_of(META, service.bucket, "killed_v4"))


BAD: dict[str, tuple[dict[str, Any], int, str]] = {
    "no framework": ({"framework": None}, 422, "framework"),
    "no run id": ({"run_id": None}, 422, "run_id"),
    "unknown field": ({"gpu_per_node": 8}, 422, "gpu_per_node"),
    "unknown framework": ({"framework": "jax"}, 422, "'nemo', 'hf' or 'meta'"),
    "run id that escapes": ({"run_id": "../../other"}, 422, "run_id"),
    "run id with a slash": ({"run_id": "a/b"}, 422, "run_id"),
    "base that escapes": ({"checkpoint_base_uri": "s3://bucket/../other"}, 422, "checkpoint_base_uri"),
    "base of no store": ({"checkpoint_base_uri": "ftp://host/runs"}, 422, "checkpoint_base_uri"),
    "data of no store": ({"dataset_uri": "relative/rows.jsonl"}, 422, "dataset_uri"),
    "name that is none": ({"job_name": "../up"}, 422, "job_name"),
    "no nodes": ({"num_nodes": 0}, 422, "num_nodes"),
    "text for a number": ({"gpus_per_node": "eight"}, 422, "gpus_per_node"),
    "a list of arguments": ({"extra_args": [1]}, 422, "extra_args"),
    "argument of the wrong type": ({"extra_args": {"lr": "fast"}}, 422, "lr is not allowed"),
    "unknown argument": ({"extra_args": {"learning_rat": 1e-3}}, 422, "learning_rate"),
    "variable of the rank": ({"env": {"WORLD_SIZE": "7"}}, 422, "WORLD_SIZE"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_a_run_is_refused(service: Service, case: str) -> None:
    changes, status, told = BAD[case]
    payload = payload_of(META, service.bucket, "bad_input") | changes
    before = len(service.cluster.jobs)
    said = answered(
        service.api.post("/train", json={name: value for name, value in payload.items() if value is not None}), status
    )
    assert told in json.dumps(said).replace('\\"', '"')
    assert len(service.cluster.jobs) == before


@pytest.mark.parametrize("token", [None, "", "token-of-another", "Token-of-the-tests", "tökén"])
def test_without_the_token_nothing_is_told(service: Service, token: str | None) -> None:
    headers = [] if token is None else [(b"X-TRAINER-TOKEN", token.encode())]
    url = str(service.api.base_url)
    for method, path in [("POST", "/train"), ("GET", "/train"), ("GET", "/train/x"), ("DELETE", "/train/x")]:
        answer = httpx.request(method, url + path, headers=headers, trust_env=False)
        assert answered(answer, 401)
    assert httpx.get(f"{url}/healthz", trust_env=False).status_code == 200


def big(nbytes: int) -> Iterator[bytes]:
    """A JSON text of that many bytes, whose length is not told."""
    yield b'{"run_id": "'
    for _ in range(nbytes // 65536):
        yield b"a" * 65536
    yield b'"}'


@pytest.mark.parametrize(
    ("content", "status"),
    [
        pytest.param(b"", 422, id="empty"),
        pytest.param(b"{", 422, id="no JSON"),
        pytest.param(b"[]", 422, id="a list"),
        pytest.param(b"\xff\xfe", 422, id="no text"),
        pytest.param(b"[" * 200_000, 400, id="deep"),
        pytest.param(b'{"run_id": "' + b"a" * 50_000_000 + b'"}', 413, id="50 MB"),
        pytest.param(big, 413, id="50 MB without a length"),
    ],
)
def test_bodies_that_are_none(service: Service, content: bytes | Callable[[int], Iterator[bytes]], status: int) -> None:
    headers = {"Content-Type": "application/json"}
    given = content(50_000_000) if callable(content) else content
    try:
        answer = service.api.post("/train", content=given, headers=headers)
    except httpx.WriteError:  # a server may close the connection while the rest is sent
        assert status == 413
    else:
        assert answer.status_code == status, answer.text[:500]
    assert service.api.get("/healthz").status_code == 200


FAILING: dict[str, tuple[dict[str, Any], str]] = {
    "row without the field": ({"dataset_uri": "no-text.jsonl"}, r"line 3 of s3://.*no-text\.jsonl has no field 'text'"),
    "row that is no JSON": ({"dataset_uri": "no-json.jsonl"}, r"line 2 of s3://.*no-json\.jsonl is not JSON"),
    "empty data": ({"dataset_uri": "empty.jsonl"}, r"empty\.jsonl"),
    "no data": ({"dataset_uri": "not-there.jsonl"}, r"not-there\.jsonl"),
    "other field": ({"extra_args": {"dataset_text_field": "body"}}, "line 1 of .* has no field 'body'"),
    "bucket that is not there": ({"checkpoint_base_uri": "s3://no-such-bucket-here/runs"}, "no-such-bucket-here"),
    "bucket without permission": ({"env": "denied"}, "(?i)denied"),
    "store that cannot be reached": ({"env": "nobody"}, "(?i)not answer|reach|connect"),
    "model folder that is not there": ({"model_id": "/nowhere/model"}, "/nowhere/model"),
    "model of no hub": (
        {"model_id": "nobody/no-such-model", "env": "offline"},
        "nobody/no-such-model" if HAS_HF else r"unified-runtime\[hf\]",
    ),
    "config that is not there": ({"config_path": "/nowhere/config.yaml"}, r"/nowhere/config\.yaml"),
}


def test_runs_that_cannot_go_well_fail_with_one_line(service: Service) -> None:
    """All at once, as that is how long it takes; no rank is tried again, for the same would happen."""
    api, bucket = service.api, service.bucket
    rows = ['{"text": "a"}', '{"text": "b"}', '{"title": "c"}']
    write_text(bucket, "no-text.jsonl", "\n".join(rows) + "\n")
    write_text(bucket, "no-json.jsonl", rows[0] + "\nnot json\n")
    write_text(bucket, "empty.jsonl", "")
    with faulty(service.s3, lambda asked: "deny") as denied:
        environments = {
            "denied": {"AWS_ENDPOINT_URL_S3": denied},
            "nobody": {"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"},
            "offline": {"HF_HUB_OFFLINE": "1"},
        }
        posted = {}
        for number, (case, (changes, _)) in enumerate(FAILING.items()):
            changes = {**changes, "num_nodes": 1}
            if "dataset_uri" in changes:
                changes["dataset_uri"] = f"s3://{bucket}/{changes['dataset_uri']}"
            if "env" in changes:
                changes["env"] = environments[changes["env"]]
            posted[case] = api.submit(payload_of(META, bucket, f"failing_{number}", **changes))["name"]
        ended = {case: api.ended(name, 100) for case, name in posted.items()}
    problems = []
    for case, status in ended.items():
        detail = status["detail"] or ""
        if status["status"] != "failed" or not re.search(FAILING[case][1], detail) or "\n" in detail:
            problems.append(f"{case}: {status['status']}: {detail}")
        if status["num_restarts"]:
            problems.append(f"{case}: tried {status['num_restarts']} times more")
    assert not problems, "\n".join(problems)


def test_detail_says_for_how_long_a_save_has_waited_for_the_store(service: Service) -> None:
    """The store takes a file of step 2, and gives no answer until it is told to."""
    api, goes_on = service.api, threading.Event()

    def stand_still(asked: Asked) -> None:
        if asked.method == "PUT" and "step-000002.pt" in asked.path:
            assert goes_on.wait(200)

    with faulty(service.s3, stand_still) as url:
        env = {"AWS_ENDPOINT_URL_S3": url}
        name = api.submit(payload_of(META, service.bucket, "stalled_v4", num_nodes=1, env=env))["name"]
        try:
            detail = eventually(
                lambda: found if "waited" in (found := api.status(name)["detail"] or "") else "", 100, "it says nothing"
            )
        finally:
            goes_on.set()
        assert re.fullmatch(r"all workers run; a save of step 2 has waited for the store for \d+ s", detail)
        assert api.ended(name, 100)["status"] == "succeeded"
        assert "the save of step 2 has waited for the store for" in api.log(name)


def test_large_data_is_streamed(service: Service) -> None:
    """300 MB of rows in a compressed object of a bucket, in place of 10 GB: a rank does not hold them."""
    api, bucket = service.api, service.bucket
    row = json.dumps({"text": "a rule of some length that is repeated a great many times " * 2}).encode() + b"\n"
    block = gzip.compress(row * 10_000, 1)
    rows = 300_000_000 // len(row)
    small = write_text(bucket, "small.jsonl.gz", block)
    large = write_text(bucket, "large.jsonl.gz", block * (rows // 10_000))
    peaks = {}
    for run_id, uri in {"small_data": small, "large_data": large}.items():
        extra = {"max_steps": LARGE, "eval_fraction": 0}
        payload = payload_of(META, bucket, run_id, dataset_uri=uri, num_nodes=1, extra_args=extra)
        with api.run_until_killed(payload) as name:
            eventually(lambda name=name: api.steps(name), 100, "no checkpoint")  # type: ignore[misc]
            (pid,) = service.cluster.workers(name).values()
            peaks[run_id] = peak_mb(pid)
    print(f"peak memory of a rank: {peaks} MB")
    assert peaks["large_data"] - peaks["small_data"] < FLAT_MB


def peak_mb(pid: int) -> float:
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) / 1000


def test_the_example_runs_and_leaves_nothing(tmp_path: Path, local_cluster: Cluster) -> None:
    """On a cluster of the test's, which then knows the run; with one of its own it does the same."""
    cluster = local_cluster(nodes=2, devices=1)
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/training_api/submit.py"), "--master", cluster.address],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("framework=meta/checkpoints/step-000020.json", "framework=meta/config/run.json", "has succeeded"):
        assert line in done.stdout
    assert "loss (nats a byte) by step" in done.stdout
    assert [job.exit_code for job in cluster.jobs] == [0]


def test_a_killed_example_leaves_no_process(tmp_path: Path) -> None:
    """Kill -9 in the middle of its run: gateway, store, cluster and ranks end with it."""
    mark = f"UNIFIED_TEST_MARK={tmp_path}"
    with subprocess.Popen(
        [sys.executable, str(ROOT / "examples/training_api/submit.py")],
        cwd=tmp_path,
        env={**os.environ, "UNIFIED_TEST_MARK": str(tmp_path), "UNIFIED_MASTER": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("POST /train"):
                    break
            else:
                pytest.fail("the example posted nothing")
            assert len(marked_processes(mark)) >= 5
        finally:
            process.kill()
    eventually(lambda: not marked_processes(mark), 100, f"left: {marked_processes(mark)}")
