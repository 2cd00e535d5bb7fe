"""A node whose disk of logs is full: the job's driver, its status and its story say whose output is dropped."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Cluster, Project
from tests.support.full_disk import MountDisk, SmallDisk
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
    assert status.workers[0].output_lost.endswith(f"(disk {cluster.home}/node-1/logs)")
    assert any("output" in line and "printer-0 on node-1, stdout: " in line for line in state_lines(status, 0.0))
    events = handle.connection.ask(Explain(job=handle.job_id), Story).events
    assert any(event.event == "output-dropped" and event.worker == status.workers[0].name for event in events)
    reader = handle.logs(follow=True)
    assert "line 0" in next(line for line in reader if "line 0" in line), "who reads along has what comes"
    disk.make_room()
    (tmp_path / "end").touch()
    assert handle.wait(timeout=200) == 0
    assert "dropped from" in handle.status().workers[0].output_lost


MUCH = """
import os, sys, time
from pathlib import Path
for number in range(int(sys.argv[1])):
    sys.stdout.write(f"line {number:07} {'x' * 1000}\\n")
print("printed", flush=True)
Path("printed").touch()
while len(sys.argv) > 2:
    print("on", flush=True)
    time.sleep(0.05)
"""


@pytest.fixture
def home(tmp_path: Path, small_disk: MountDisk, monkeypatch: pytest.MonkeyPatch) -> SmallDisk:
    """A disk that holds all that Unified writes on a host."""
    (tmp_path / "much.py").write_text(MUCH)
    monkeypatch.setenv("UNIFIED_HOME", str(tmp_path / "home"))
    return small_disk(tmp_path / "home", mebibytes=48)


@contextmanager
def run(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "unified", "run", "--standalone", "--nproc-per-node=1", *words]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as driver:
        try:
            yield driver
        finally:
            driver.kill()  # its cluster ends with it


@pytest.mark.parametrize("option", [[], ["--log-dir=home/copies"]])
def test_output_leaves_the_last_room_to_the_state(tmp_path: Path, home: SmallDisk, option: list[str]) -> None:
    with run(tmp_path, *option, "much.py", "80000") as driver:
        _, said = driver.communicate(timeout=100)
    assert driver.returncode == 0, said
    assert home.free > 2 << 20
    end = said.partition(" finished after ")[2]
    lost = rf"\d+ lines \(\d+ bytes\) dropped (since|from) .*: No space left on device.* \(disk {tmp_path}/home\)"
    assert re.search(rf"much-\S+  output of \S+-0 on node-1 is dropped: std.*{lost}", said)
    assert re.search(rf"output +\S+-0 on node-1, stdout: .*{lost}", end), end
    assert not option or re.search(rf"{tmp_path}/home/copies/\S+/0/stdout.log: \d+ lines", end), end


def test_sigterm_ends_the_job_though_its_stop_cannot_be_recorded(tmp_path: Path, home: SmallDisk) -> None:
    with run(tmp_path, "much.py", "100", "for ever") as driver:
        eventually((tmp_path / "printed").exists, timeout=100, message="the job did not run")
        home.fill()
        driver.terminate()
        _, said = driver.communicate(timeout=100)
    assert driver.returncode == 143, said
    assert f"ends with its cluster, and without a record: the master can record nothing: {tmp_path}/home/" in said
