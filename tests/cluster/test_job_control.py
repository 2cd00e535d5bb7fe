"""A job that restarts and watches itself, and one that its driver restarts, on real daemons."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Cluster, Project
from unified.api.builder import DLJobBuilder
from unified.cli.main import main
from unified.testing import eventually

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("without_torch")]


CODE = """
import json, os, time
from unified import PrimeMasterApi, RoleGroup, current_worker, rpc

def note(name, value):
    folder = current_worker().job_info.user_config["folder"]
    path = os.path.join(folder, name)
    with open(path + ".part", "w") as file:
        json.dump(value, file)
    os.replace(path + ".part", path)

class Service:
    @rpc
    def incarnation(self):
        return current_worker().incarnation

def watcher():
    note("outcome", PrimeMasterApi.wait())

def driver():
    stage = PrimeMasterApi.get_status().stage
    services = RoleGroup("service")
    incarnations = [[service.call("incarnation").result() for service in services]]
    for _ in range(3):
        PrimeMasterApi.restart_actors(["service-0"])
        incarnations.append([service.call("incarnation").result() for service in services])
    note(f"driver-{current_worker().incarnation}", [stage, *incarnations])
    while not os.path.exists(os.path.join(current_worker().job_info.user_config["folder"], "end")):
        time.sleep(0.02)
    raise SystemExit(3 if current_worker().incarnation else 0)
"""


def test_restarts_from_inside_and_outside_and_the_outcome(
    local_cluster: Cluster, project: Project, tmp_path: Path
) -> None:
    """`restart_actors` and `JobHandle.restart` return when the new incarnations are there; no call meets an old one."""
    project(control_job=CODE)
    builder: Any = DLJobBuilder().device_per_node(1).device_type("CPU").config({"folder": str(tmp_path)})
    builder = builder.workload("driver", "control_job.driver").resource(cpu=0.1).max_restart(0)
    builder = builder.workload("service", "control_job.Service").total(2).resource(cpu=0.1).not_driver()
    builder = builder.workload("watcher", "control_job.watcher").resource(cpu=0.1).not_driver()
    handle = local_cluster(nodes=1, devices=1).submit(builder.build(), "control")

    def noted(name: str) -> Any:
        return eventually(lambda: (tmp_path / name).exists() and json.loads((tmp_path / name).read_text()), timeout=100)

    assert noted("driver-0") == ["RUNNING", [0, 0], [1, 0], [2, 0], [3, 0]]
    handle.restart("service-1", timeout=100)
    incarnations = {f"{worker.role}-{worker.rank}": worker.incarnation for worker in handle.status().workers}
    assert incarnations == {"driver-0": 0, "service-0": 3, "service-1": 1, "watcher-0": 0}
    handle.restart(timeout=100)
    incarnations = {f"{worker.role}-{worker.rank}": worker.incarnation for worker in handle.status().workers}
    assert (incarnations["driver-0"], incarnations["service-1"], incarnations["watcher-0"]) == (1, 2, 1)
    assert noted("driver-1") == ["RUNNING", [4, 2], [5, 2], [6, 2], [7, 2]]
    (tmp_path / "end").touch()
    assert handle.wait(timeout=200) == 1
    assert json.loads((tmp_path / "outcome").read_text()) == 1


def test_a_job_in_the_queue_says_its_place(
    local_cluster: Cluster, project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project(sleeping_job="import time\n\ndef run():\n    time.sleep(1000)\n")
    builder: Any = DLJobBuilder().device_per_node(1).device_type("CPU")
    job = builder.workload("w", "sleeping_job.run").total(1).resource(accelerator=1).build()
    cluster = local_cluster(nodes=1, devices=1)
    handles = [cluster.submit(job, f"sleeping-{number}") for number in range(3)]

    def submitted(number: int) -> str:
        assert main(["status", f"sleeping-{number}", "--master", cluster.address]) == 0
        return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  submitted "))

    eventually(lambda: submitted(2).endswith(", number 2 of 2 in the queue"), timeout=100)
    assert submitted(1).endswith(", number 1 of 2 in the queue")
    assert "queue" not in submitted(0)
    handles[1].stop()
    eventually(lambda: submitted(2).endswith(", number 1 of 1 in the queue"), timeout=100)
    for handle in handles:
        handle.stop(force=True)
