"""What workers of real agents report, read back through a real master while they run and when they are gone."""

import asyncio
import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Cluster, Project
from unified.api.builder import DLJobBuilder
from unified.client.reports import KeptReports, read_reports
from unified.protocol.records import WorkerReport
from unified.testing import eventually
from unified_gateway.master_backend import MasterBackend

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("without_torch")]

CODE = """
import os, time
from unified import current_worker

def train():
    me = current_worker()
    for step in range(3):
        me.report(step=step, total=3, loss=1 / (step + 1), phase="fit")
        time.sleep(0.2)
    me.report(step=3, last=os.environ["RANK"])
    if me.incarnation == 0 and os.environ["RANK"] == "0":
        raise SystemExit(7)
"""


def test_reports_of_both_incarnations_of_a_worker_are_read_to_the_last(
    local_cluster: Cluster, project: Project
) -> None:
    """A worker reports its last word just before it ends, and its second incarnation has a file of its own."""
    project(reports_job=CODE)
    builder: Any = DLJobBuilder().device_per_node(1).node_num(1).device_type("CPU")
    builder = builder.workload("w", "reports_job.train").total(2).resource(cpu=0.1).max_restart(1)
    cluster = local_cluster(nodes=1, devices=1)
    handle = cluster.submit(builder.build(), "reports", failover_exec_strategy=2)
    first = next(worker for worker in handle.status().workers if worker.rank == 0)

    def reports() -> list[WorkerReport]:
        newest = next(worker.incarnation for worker in handle.status().workers if worker.name == first.name)
        found = read_reports(cluster.connection, handle.job_id, first.name, newest)
        assert found.missing == []
        assert [report.at for report in found.reports] == sorted(report.at for report in found.reports)
        return found.reports

    eventually(lambda: reports() and reports()[0].metrics == {"loss": 1.0, "phase": "fit"})
    assert handle.wait(timeout=200) == 0
    points = [(step, {"loss": 1 / (step + 1), "phase": "fit"}) for step in range(3)] + [(3, {"last": "0"})]
    assert [(report.incarnation, report.step, report.metrics) for report in reports()] == [
        (incarnation, *values) for incarnation in (0, 1) for values in points
    ]


TIGHT = """
from unified import current_worker

def train():
    me = current_worker()
    for step in range(200):
        me.report(step=step, total=200)
        me.report(loss=step / 2)
        if step % 3 == 0:
            me.report(step=step, lr=step * 1e-3)
"""


def test_each_step_of_a_tight_loop_is_in_the_series_with_its_own_values(
    local_cluster: Cluster, project: Project
) -> None:
    """For people and programs by `unified metrics`, and for the training API."""
    project(tight_job=TIGHT)
    builder: Any = DLJobBuilder().device_per_node(1).node_num(1).device_type("CPU")
    builder = builder.workload("w", "tight_job.train").total(2).resource(cpu=0.1)
    cluster = local_cluster(nodes=1, devices=1)
    handle = cluster.submit(builder.build(), "tight")
    assert handle.wait(timeout=200) == 0
    wanted = [(step, {"loss": step / 2} | ({"lr": step * 1e-3} if step % 3 == 0 else {})) for step in range(200)]

    def told(*words: str) -> str:
        command = [sys.executable, "-m", "unified", "metrics", "tight", *words, "--master", cluster.address]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout

    series = json.loads(told("w-1", "--json"))["w-1"]
    assert (series["num_thinned"], series["missing"]) == (0, [])
    assert [(point["step"], point["metrics"]) for point in series["reports"]] == wanted
    lines = [line.split() for line in told().splitlines()]
    assert [line[:7] for line in lines[1:]] == [
        ["w-0", "loss", "199", "99.5", "0", "99.5", "200"],
        ["w-0", "lr", "198", "0.198", "0", "0.198", "67"],
    ]
    rows = list(csv.DictReader(told("w-1", "--csv").splitlines()))
    assert [(row["worker"], int(row["step"]), row["name"], float(row["value"])) for row in rows] == [
        ("w-1", step, name, value) for step, metrics in wanted for name, value in metrics.items()
    ]

    async def of_the_api() -> KeptReports:
        backend = MasterBackend(cluster.address)
        try:
            return await backend.metrics("tight", since=0.0, limit=1000)
        finally:
            await backend.close()

    found = asyncio.run(of_the_api())
    assert [(point.step, point.metrics) for point in found.reports] == wanted
    assert all(len(worker.progress.metrics) == 2 for worker in handle.status().workers if worker.progress)


FOLLOWED = """
import time
from pathlib import Path
from unified import current_worker

def train():
    for step in range(4):
        current_worker().report(step=step, loss=float(step))
        if step == 1:
            while not Path("go").exists():
                time.sleep(0.05)
"""


def test_metrics_follow_a_job_to_its_end(
    local_cluster: Cluster, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    project(followed_job=FOLLOWED)
    builder: Any = DLJobBuilder().device_per_node(1).node_num(1).device_type("CPU")
    cluster = local_cluster(nodes=1, devices=1)
    handle = cluster.submit(builder.workload("w", "followed_job.train").resource(cpu=0.1).build(), "followed")
    command = [sys.executable, "-m", "unified", "metrics", "followed", "-f", "--master", cluster.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as followed:
        assert followed.stdout is not None
        lines = [followed.stdout.readline().split()[1:]]
        Path("go").touch()
        lines += [line.split()[1:] for line in followed.stdout]
        assert followed.wait(100) == 0
    assert lines == [["w-0", "step", str(step), "loss", str(step)] for step in range(4)]
    assert handle.wait(timeout=200) == 0


ABSENT = """
import sys
from unified import current_worker

def train():
    sys.modules["mlflow"] = None  # as where it is not installed
    for step in range(3):
        current_worker().report(step=step, loss=1.0)
    assert "tensorboard" not in sys.modules
"""


def test_a_job_goes_on_where_a_tracker_is_not_installed(local_cluster: Cluster, project: Project) -> None:
    project(absent_job=ABSENT)
    builder: Any = DLJobBuilder().device_per_node(1).node_num(1).device_type("CPU")
    builder = builder.workload("w", "absent_job.train").resource(cpu=0.1)
    cluster = local_cluster(nodes=1, devices=1)
    assert cluster.submit(builder.build(), "absent", report_to="mlflow").wait(timeout=200) == 0
    [log] = cluster.home.rglob("0.err")
    assert log.read_text() == (
        "unified: mlflow is switched off, and this worker goes on: ModuleNotFoundError: mlflow in UNIFIED_REPORT_TO "
        "needs mlflow, which is not installed: pip install 'unified-runtime[trackers]'.\n"
    )
