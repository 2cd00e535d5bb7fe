"""What workers of real agents report, read back through a real master while they run and when they are gone."""

from typing import Any

import pytest

from tests.cluster.conftest import Cluster, Project
from unified.api.builder import DLJobBuilder
from unified.client.reports import read_reports
from unified.protocol.records import WorkerReport
from unified.testing import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("without_torch")]

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


def test_reports_of_both_lives_of_a_worker_are_read_to_the_last(local_cluster: Cluster, project: Project) -> None:
    """A worker reports its last word just before it ends, and its second life has a file of its own."""
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
    assert handle.wait(timeout=40) == 0
    life = [(0, 1.0, None), (1, 0.5, None), (2, 1 / 3, None), (3, 1 / 3, "0")]
    assert [
        (report.incarnation, report.step, report.metrics["loss"], report.metrics.get("last")) for report in reports()
    ] == [(incarnation, *values) for incarnation in (0, 1) for values in life]
