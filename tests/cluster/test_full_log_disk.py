"""A node whose disk of logs is full: the job's driver, its status and its story say whose output is dropped."""

from typing import Any

import pytest

from tests.cluster.conftest import Cluster, Project
from tests.support.full_disk import MountDisk
from unified.api.builder import DLJobBuilder
from unified.client.report import state_lines
from unified.protocol.client_master import Explain, Story
from unified.testing import eventually

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.usefixtures("without_torch")]

PRINTS = """
import os, time
from pathlib import Path

def run():
    number = 0
    while not Path(os.environ["FOLDER"], "end").exists():
        print(f"line {number:07}", "x" * 100, flush=True)
        number += 1
        time.sleep(0.0005)
"""


def test_dropped_output_is_told(local_cluster: Cluster, project: Project, small_disk: MountDisk, tmp_path: Any) -> None:
    project(prints=PRINTS)
    cluster = local_cluster(nodes=1, devices=1)
    disk = small_disk(cluster.home / "node-1/logs")
    disk.fill()
    builder: Any = DLJobBuilder().device_per_node(1).device_type("CPU").global_env({"FOLDER": str(tmp_path)})
    handle = cluster.submit(builder.workload("printer", "prints.run").total(1).resource(cpu=0.1).build(), "prints")
    eventually(lambda: bool(handle.status().workers[0].output_lost), timeout=100)
    status = handle.status()
    assert "lines (" in status.workers[0].output_lost
    assert "dropped since" in status.workers[0].output_lost
    assert status.workers[0].output_lost.endswith("No space left on device")
    assert any("output" in line and "printer-0, stdout: " in line for line in state_lines(status, 0.0))
    events = handle.connection.ask(Explain(job=handle.job_id), Story).events
    assert any(event.event == "output-dropped" and event.worker == status.workers[0].name for event in events)
    reader = handle.logs(follow=True)
    assert "line 0" in next(line for line in reader if "line 0" in line), "who reads along has what comes"
    disk.make_room()
    (tmp_path / "end").touch()
    assert handle.wait(timeout=200) == 0
    assert "dropped from" in handle.status().workers[0].output_lost
