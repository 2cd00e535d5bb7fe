"""Every block of the reference document of the training API (document 4), as a reader types it.

Blocks are kept as text. The shell's four steps run in a copy of the checkout. Two things are the test's own: `--port`,
as 8000 may be taken, and a `.pth` file in the new virtual environment that points to the packages of this one, so that
`pip install -r` finds all requirements there and installs the checkout alone, instead of a gigabyte.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.ports import unused_port
from tests.support.s3 import S3Server
from tests.support.training_api import TINY, Service, answered, keys_of, payload_of, write_rows
from unified.client.daemons import marked_processes
from unified.storage import open_storage
from unified.testing import eventually
from unified.training.layout import RunLayout

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]

# "Requesting a Training Job"
PAYLOAD = """
{
  "framework": "hf",
  "model_id": "meta-llama/Llama-3-8B",
  "run_id": "aml_ruleset_v4",
  "num_nodes": 1,
  "gpus_per_node": 8,
  "cpus_per_node": 48,
  "memory_per_node_gb": 512,
  "image": "ghcr.io/deepfinery/trainer:latest",
  "checkpoint_base_uri": "s3://deepfinery-training/runs",
  "dataset_uri": "s3://deepfinery-datasets/fraud/aml_ruleset.jsonl",
  "resume_from_checkpoint": true,
  "extra_args": {
    "max_steps": 50000,
    "lr": 3e-5,
    "batch_size": 128
  }
}
"""

# "Framework-specific overrides"
OVERRIDES: dict[str, dict[str, Any]] = {
    "nemo": {
        "batch_size": 4,
        "num_epochs": 2,
        "lr": 1e-4,
        "max_seq_len": 512,
        "dataloader_workers": 2,
        "precision": "bf16",
    },
    "hf": {
        "gradient_accumulation": 2,
        "save_steps": 10,
        "eval_steps": 10,
        "logging_steps": 1,
        "dataset_text_field": "text",
    },
    "meta": {"batch_size": 4, "num_epochs": 2, "lr": 1e-4, "max_seq_len": 512, "save_steps": 10},
}

# "S3 Layout"
LAYOUT = """
s3://deepfinery-training/runs/<RUN_ID>/framework=<framework>/
  checkpoints/step-000001.json
  checkpoints/step-000002.json
  logs/.keep
  config/run.json
"""

# "Running Locally", 1 to 4
VENV = "python3 -m venv .venv && source .venv/bin/activate"
INSTALL = "pip install -r services/training_api/requirements.txt"
TOKEN = "export TRAINER_API_TOKEN=trainer-demo-token"
SERVE = "uvicorn services.training_api.app:app --reload"

# "Storage credentials"
CREDENTIALS = """
export AWS_ACCESS_KEY_ID=...
export AWS_SECRET_ACCESS_KEY=...
export AWS_DEFAULT_REGION=...
"""


def test_the_payload_is_taken_as_it_stands(service: Service) -> None:
    """Dry, as this cluster has no eight GPUs; `scripts/sample-unified-request.json` is the same."""
    payload = json.loads(PAYLOAD)
    assert json.loads((ROOT / "scripts/sample-unified-request.json").read_text()) == payload
    job = answered(service.api.post("/train", params={"dry_run": "true"}, json=payload))["job"]
    assert job["command"] == "python -m unified.training"
    layout = RunLayout(**job["config"]["training_run"]["layout"])
    assert layout.prefix == "s3://deepfinery-training/runs/aml_ruleset_v4/framework=hf"
    assert "aml" not in json.dumps(answered(service.api.get("/train"))), "nothing was submitted"


def test_the_payloads_of_our_own_pages_are_taken(service: Service) -> None:
    guide = re.findall(
        r"^```json\n(\{\n.*?)^```$", (ROOT / "docs/training-api.md").read_text(), re.MULTILINE | re.DOTALL
    )
    example = (ROOT / "examples/training_api/payload.json").read_text()
    assert guide
    for text in [*guide, example]:
        answered(service.api.post("/train", params={"dry_run": "true"}, json=json.loads(text)))


@pytest.mark.parametrize("framework", OVERRIDES)
def test_the_overrides_of_each_framework_are_taken(service: Service, framework: str) -> None:
    payload = {**json.loads(PAYLOAD), "framework": framework, "extra_args": OVERRIDES[framework]}
    answered(service.api.post("/train", params={"dry_run": "true"}, json=payload))


def test_the_layout_is_the_documents(service: Service) -> None:
    payload = payload_of(json.loads(PAYLOAD), service.bucket, "names_v4", framework="meta", num_nodes=1)
    payload["extra_args"] |= {"max_steps": 2, "save_steps": 1}
    name = service.api.submit(payload)["name"]
    assert service.api.ended(name)["status"] == "succeeded"
    first, *names = LAYOUT.split()
    prefix = first.replace("<RUN_ID>", "names_v4").replace("<framework>", "meta").rstrip("/")
    run = f"{payload['checkpoint_base_uri']}/names_v4/framework=meta"
    assert run == prefix.replace("deepfinery-training", service.bucket)
    assert set(names) <= set(keys_of(payload))
    assert [key for key in keys_of(payload) if key.endswith(".json")] == sorted(set(names) - {"logs/.keep"})


@pytest.mark.parametrize("launcher", [["torch.distributed.run", "--standalone"], ["unified", "run"]])
def test_the_script_at_the_root_runs_under_torchrun_and_its_like(tmp_path: Path, launcher: list[str]) -> None:
    """Document: "builds a `torchrun ... train.py` command line"; flags for some fields, the environment for others."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": f"row {row}"}) + "\n" for row in range(40)))
    extra = {"max_steps": 2, "batch_size": 2, "max_seq_len": 16}
    done = subprocess.run(
        [
            *(sys.executable, "-m", *launcher, "--nproc-per-node=2"),
            *("train.py", "--framework", "meta", "--run-id", "by_torchrun", "--resume"),
            *("--model-id", f"config:{json.dumps(TINY)}", "--extra-args-json", json.dumps(extra)),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "CHECKPOINT_BASE_URI": str(tmp_path / "runs"),
            "DATASET_URI": f"file://{tmp_path}/rows.jsonl",
            "UNIFIED_HOME": str(tmp_path / "home"),
            "UNIFIED_MASTER": "",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs/by_torchrun/framework=meta"
    assert (run / "checkpoints/step-000002.json").exists()
    assert (run / "checkpoints/step-000002.pt").exists()
    assert json.loads((run / "config/run.json").read_text())["run_id"] == "by_torchrun"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what belongs to this checkout."""
    left_out = shutil.ignore_patterns(
        ".git", ".venv*", "out", "dist", ".*_cache", "__pycache__", ".hypothesis", "tests"
    )
    return Path(shutil.copytree(ROOT, tmp_path / "checkout", ignore=left_out, symlinks=True))


@pytest.fixture
def served(checkout: Path, s3_environment: S3Server, tmp_path: Path) -> Iterator[httpx.Client]:
    """The document's steps in a shell, with credentials, until the service answers; Ctrl-C at the end."""
    port = unused_port()
    credentials = CREDENTIALS
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        credentials = credentials.replace(f"{name}=...", f"{name}={os.environ[name]}")
    reuse = f"echo {sysconfig.get_paths()['purelib']} > $(echo .venv/lib/python3*/site-packages)/reused.pth"
    lines = [
        "set -euo pipefail",
        VENV,
        reuse,
        INSTALL,
        TOKEN,
        textwrap.dedent(credentials),
        f"exec {SERVE} --port {port}",
    ]
    mark = f"UNIFIED_TEST_MARK={tmp_path}"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("VIRTUAL_ENV", "PYTHON"))},
        "PATH": f"{sysconfig.get_paths()['scripts']}:{os.environ['PATH']}",
        "UNIFIED_HOME": str(tmp_path / "home"),
        "UNIFIED_MASTER": "",
        "UNIFIED_TEST_MARK": str(tmp_path),
    }
    log = tmp_path / "shell.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            ["bash", "-c", "\n".join(lines)],
            cwd=checkout,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        ) as shell,
    ):
        url = f"http://127.0.0.1:{port}"
        try:
            eventually(lambda: shell.poll() is not None or is_healthy(url), 300, f"no answer; see {log}")
            assert shell.poll() is None, log.read_text()
            with httpx.Client(
                base_url=url, headers={"X-TRAINER-TOKEN": "trainer-demo-token"}, timeout=300, trust_env=False
            ) as client:
                yield client
            os.killpg(shell.pid, signal.SIGINT)
            eventually(lambda: not marked_processes(mark), 100, f"left: {marked_processes(mark)}; {log.read_text()}")
        finally:
            if shell.poll() is None:
                os.killpg(shell.pid, signal.SIGKILL)


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def test_running_locally(served: httpx.Client, s3_environment: S3Server) -> None:
    """All steps, and then the sample payload with its addresses updated, its sizes cut, and a model from scratch."""
    bucket = s3_environment.make_bucket()
    write_rows(bucket)
    sample = json.loads((ROOT / "scripts/sample-unified-request.json").read_text())
    payload = payload_of(sample, bucket, sample["run_id"], framework="meta", num_nodes=1)
    assert httpx.post(f"{served.base_url}/train", json=payload, trust_env=False).status_code == 401
    name = answered(served.post("/train", json=payload), 201)["name"]
    eventually(lambda: answered(served.get(f"/train/{name}"))["status"] == "succeeded", 100, "it has not succeeded")
    store, _ = open_storage(f"s3://{bucket}")
    with store:
        assert store.exists(f"runs/{sample['run_id']}/framework=meta/checkpoints/step-000006.json")
