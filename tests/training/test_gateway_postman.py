"""The Postman collection, run from its beginning to its end by Postman's own runner against a live gateway."""

import json
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest

from tests.support.gateway_process import TOKEN, StartGateway, start_gateway  # noqa: F401 - a fixture
from tests.support.master_process import StartMaster, start_master  # noqa: F401 - a fixture
from tests.support.s3 import S3Server

ROOT = Path(__file__).parents[2]
COLLECTION = ROOT / "docs/postman/trainer-apis.postman_collection.json"
NEWMAN = "newman@6"
FOLDER = ROOT / "out/newman"


@pytest.fixture
def newman() -> list[str]:
    """Command that runs newman, which npm installs once."""
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("newman comes from npm, which is not here: apt-get install npm")
    script = FOLDER / "node_modules/newman/bin/newman.js"
    if not script.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        flags = ["--prefix", str(FOLDER), "--no-audit", "--no-fund", "--loglevel=error"]
        done = subprocess.run([npm, "install", *flags, NEWMAN], capture_output=True, text=True, timeout=240)
        if done.returncode:
            pytest.skip(f"npm cannot install newman: {done.stderr.strip()[-500:]}")
    return [node, str(script)]


@pytest.mark.timeout(300)
def test_collection_runs(
    newman: list[str],
    start_master: StartMaster,  # noqa: F811
    start_gateway: StartGateway,  # noqa: F811
    s3_environment: S3Server,
    tmp_path: Path,
) -> None:
    """With the payload as it stands there: its bucket is in the store, and the master has no node."""
    collection = json.loads(COLLECTION.read_text())
    assert {"Submit Training Job", "Get Job Status"} <= {each["name"] for each in collection["item"]}
    make = urllib.request.Request(f"{s3_environment.url}/deepfinery-training", method="PUT")
    with urllib.request.urlopen(make, timeout=100) as answer:
        assert answer.status == 200
    report = tmp_path / "report.json"
    gateway = start_gateway("--master", start_master().address)
    variables = {"trainer_base_url": gateway.url, "trainer_api_token": TOKEN}
    flags = [word for name, value in variables.items() for word in ("--env-var", f"{name}={value}")]
    flags += ["--timeout-request", "20000", "--reporters", "cli,json", "--reporter-json-export", str(report)]
    done = subprocess.run(
        [*newman, "run", str(COLLECTION), *flags, "--color", "off"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    executions = json.loads(report.read_text())["run"]["executions"]
    assert len(executions) == len(collection["item"])
    assert all(each["assertions"] for each in executions)
