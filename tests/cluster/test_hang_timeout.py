"""Real jobs that hang: a rank is named, its stack is kept, and the role goes on in a new incarnation."""

from typing import Any

import pytest

from tests.cluster.conftest import Cluster, Project
from unified.api.builder import DLJobBuilder
from unified.client.handle import JobHandle
from unified.protocol.client_master import Explain, Story

pytestmark = pytest.mark.processes

RANKS = """
import time
import torch
import torch.distributed as dist
from unified import current_worker

def run():
    worker = current_worker()
    for step in range(6):
        if worker.incarnation == 0 and step == 3 and dist.get_rank() == 1:
            time.sleep(600)
        dist.all_reduce(torch.ones(1))
        worker.report(step=step)
        time.sleep(0.2)
"""

SIMPLE = """
import threading, time
from unified import RoleGroup, current_worker, rpc

class Server:
    # Its main thread waits for a lock that nobody gives back.
    def run(self):
        if current_worker().incarnation == 0:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()

def steady():
    for step in range(30):
        time.sleep(0.2)
        current_worker().report(step=step)
"""


def story(handle: JobHandle) -> dict[str, str]:
    events = handle.connection.ask(Explain(job=handle.job_id), Story).events
    return {event.event: event.reason for event in events}


@pytest.mark.slow
def test_a_rank_that_never_enters_a_collective_costs_one_restart(local_cluster: Cluster, project: Project) -> None:
    project(ranks=RANKS)
    builder = DLJobBuilder().node_num(1).device_per_node(3).device_type("CPU")
    builder.role("trainer").train("ranks.run").total(3).per_group(3)
    handle = local_cluster(nodes=1, devices=3).submit(builder.build(), "hangs", hang_timeout=3, stop_grace_s=1)
    assert handle.wait(timeout=200) == 0, handle.status().end
    told = story(handle)
    assert told["hang-diagnosed"].startswith("rank 1 never entered all_reduce 4 (ranks 0, 2 have waited in it for ")
    assert "ranks.py:" in told["hang-diagnosed"]
    assert "site-packages" not in told["hang-diagnosed"]
    assert not any("Traceback" in line for line in handle.logs()), "the watch itself fails nowhere"
    assert "category hang" in told["worker-failed"]
    status = handle.status()
    assert status.num_restarts == 1
    assert {worker.rank: worker.num_failures for worker in status.workers} == {0: 0, 1: 1, 2: 0}


@pytest.mark.slow
@pytest.mark.usefixtures("without_torch")
def test_a_worker_of_a_simple_role_is_watched_alone(local_cluster: Cluster, project: Project) -> None:
    project(simple=SIMPLE)
    builder: Any = DLJobBuilder().node_num(1).device_per_node(1).device_type("CPU")
    builder = builder.workload("server", "simple.Server").resource(cpu=0.1).hang_timeout(2).restart_alone()
    builder = builder.workload("steady", "simple.steady").resource(cpu=0.1).hang_timeout(4)
    handle = local_cluster(nodes=1, devices=1).submit(builder.build(), "locked", stop_grace_s=1)
    assert handle.wait(timeout=200) == 0, handle.status().end
    incarnations = {worker.role: worker.incarnation for worker in handle.status().workers}
    assert incarnations == {"server": 1, "steady": 0}
    assert "simple.py:11 in run" in story(handle)["hang-diagnosed"]


@pytest.mark.usefixtures("without_torch")
def test_the_stacks_are_in_the_end_report_of_a_job_that_may_not_restart(
    local_cluster: Cluster, project: Project
) -> None:
    project(simple=SIMPLE)
    builder: Any = DLJobBuilder().node_num(1).device_per_node(1).device_type("CPU")
    builder = builder.workload("server", "simple.Server").resource(cpu=0.1).hang_timeout(1).max_restart(0)
    handle = local_cluster(nodes=1, devices=1).submit(builder.build(), "ends", stop_grace_s=1)
    assert handle.wait(timeout=200) == 1
    end = handle.status().end
    assert end is not None
    assert end.failure.category == "hang"
    assert "no progress for 1 s" in end.failure.summary
    assert "simple.py:11 in run" in end.failure.traceback
