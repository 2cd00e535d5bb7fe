"""The call of curl that the page shows where no training run was submitted, against a real gateway."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.gateway_process import PAYLOAD, TOKEN, StartGateway
from tests.support.master_process import StartMaster
from tests.support.page_snippets import snippets

pytestmark = pytest.mark.processes


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_curl_submits_a_run_as_the_page_says(
    start_master: StartMaster, start_gateway: StartGateway, tmp_path: Path
) -> None:
    gateway = start_gateway("--master", start_master().address)
    (tmp_path / "run.json").write_text(json.dumps(PAYLOAD))
    [text] = [text for text in snippets() if text.startswith("curl ")]
    line = text.replace("HOST:PORT", gateway.url.removeprefix("http://"))
    env = {"TRAINER_API_TOKEN": TOKEN, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout).get("status") == "submitted", done.stdout
    assert gateway.client.get("/train").json()["total"] == 1
