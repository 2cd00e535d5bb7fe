"""``unified diagnose`` of a job that failed: what is in the archive, and that no planted secret is."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Cluster, Project
from unified.api.builder import DLJobBuilder

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("without_torch")]

CODE = """
import os
from unified import current_worker

def train():
    current_worker().report(step=3, loss=0.5)
    print("signs in with", os.environ["STORE_TOKEN"], "and password=open-sesame", flush=True)
    raise ValueError("Bearer abcdefgh12345678 was refused")
"""
SECRETS = ("planted-token-1", "open-sesame", "abcdefgh12345678", "another-secret-2")


def test_an_archive_has_what_a_report_needs_and_no_secret(
    local_cluster: Cluster, project: Project, tmp_path: Path
) -> None:
    project(diagnosed_job=CODE)
    builder: Any = DLJobBuilder().device_per_node(1).node_num(1).device_type("CPU")
    builder = builder.workload("w", "diagnosed_job.train").total(1).max_restart(0).env({"STORE_TOKEN": SECRETS[0]})
    cluster = local_cluster(nodes=1, devices=1)
    handle = cluster.submit(builder.build(), "diagnosed")
    assert handle.wait(timeout=200) == 1
    env = {**os.environ, "STORE_TOKEN": SECRETS[0], "UNIFIED_API_TOKEN": SECRETS[3]}
    command = [
        sys.executable,
        "-m",
        "unified",
        "diagnose",
        "diagnosed",
        "--master",
        cluster.address,
        "-o",
        "out.tar.gz",
    ]

    def run() -> "subprocess.CompletedProcess[str]":
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=100)

    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        files = {name: archive.extractfile(name) for name in archive.getnames()}
        texts = {name: file.read().decode() for name, file in files.items() if file is not None}
    (job_id,) = {name.partition("/")[0] for name in texts}
    assert job_id.startswith("diagnosed-1-")
    names = {name.removeprefix(f"{job_id}/") for name in texts}
    assert {"status.json", "status.txt", "releases.txt", "settings.txt", "events.txt", "nodes.json"} <= names
    log = texts[f"{job_id}/logs/w_1-0_1-0/0.out"]
    assert log == "signs in with (left out) and password=(left out)\n"
    assert '"loss":0.5' in texts[f"{job_id}/logs/w_1-0_1-0/0.metrics"]
    assert "was refused" in texts[f"{job_id}/status.txt"]
    assert "job-submitted" in texts[f"{job_id}/events.txt"]
    assert not [secret for secret in SECRETS if any(secret in text for text in texts.values())]
    again = run()
    assert (again.returncode, "is there already" in again.stderr) == (2, True)
