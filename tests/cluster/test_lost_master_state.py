"""A master that begins anew with an empty state directory: its jobs inherit nothing of those before."""

import os
import signal

import pytest

from tests.cluster.conftest import Cluster, Project
from unified.api.builder import DLJobBuilder
from unified.testing import eventually

pytestmark = pytest.mark.processes

PROGRAM = """
from unified import current_worker
from unified.api.runtime import DataQueue

def main():
    worker = current_worker()
    found = worker.restore()
    queue = DataQueue("q", is_master=True, durable=True)
    print(f"restored {found and found.step}, {queue.stats().depth} items", flush=True)
    queue.put("item")
    worker.snapshot({"step": 20}, 20)
"""


def test_the_next_job_of_a_name_has_no_snapshot_queue_or_output_of_an_earlier_one(
    local_cluster: Cluster, project: Project
) -> None:
    project(keeper=PROGRAM)
    cluster = local_cluster(nodes=1, devices=1, restart_master=1)
    job = DLJobBuilder().device_type("CPU").workload("keeper", "keeper.main").end().build()
    first = cluster.submit(job, "same")
    assert first.wait(timeout=100) == 0
    before = cluster.master_pid
    for file in (cluster.home / "master").glob("master.sqlite*"):
        file.unlink()
    os.kill(before, signal.SIGKILL)
    eventually(lambda: cluster.master_pid != before, timeout=100)
    eventually(lambda: [node.state for node in cluster.nodes] == ["ALIVE"], timeout=100)
    second = cluster.submit(job, "same")
    assert second.wait(timeout=100) == 0
    assert second.job_id != first.job_id
    logs = cluster.home / "node-1/logs"
    printed = [next((logs / handle.job_id).glob("*/0.out")).read_text() for handle in (first, second)]
    assert printed == 2 * ["restored None, 0 items\n"]
