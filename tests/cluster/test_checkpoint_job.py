"""A `CheckpointManager` in a worker of a real job: who it is, and what the master comes to know."""

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Cluster, Project
from unified.api.builder import DLJobBuilder
from unified.coordinator.client import RemoteCoordinator
from unified.protocol.client_master import Explain, Story
from unified.protocol.coordinator import GetLatestCheckpoint, RecoveryInfo

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("without_torch")]

SAVER = """
from pathlib import Path

from unified import current_worker
from unified.checkpoint import CheckpointManager
from unified.errors import CheckpointSaveError

folder = Path({folder!r})

def save():
    rank = current_worker().actor_info.rank
    with CheckpointManager(folder / f"of-{{rank}}", max_tries=1) as manager:
        if rank == 1:
            manager.save_bytes(b"abc", 5)
    if rank == 0:
        manager = CheckpointManager(folder / "broken", max_tries=1)
        (folder / "broken").write_text("a file where the folder should be")
        manager.save_bytes(b"abc", 6)
        try:
            manager.close()
        except CheckpointSaveError:
            pass
"""


def test_the_master_knows_what_a_worker_saved_and_what_it_could_not(
    local_cluster: Cluster, project: Project, tmp_path: Path
) -> None:
    project(saving_job=SAVER.format(folder=str(tmp_path)))
    builder: Any = DLJobBuilder().node_num(1).device_per_node(1).device_type("CPU")
    built = builder.workload("saver", "saving_job.save").total(2).resource(cpu=0.01).build()
    cluster = local_cluster(nodes=1, devices=1)
    handle = cluster.submit(built, "saving")
    assert handle.wait(timeout=200) == 0
    status = handle.status()
    with RemoteCoordinator(cluster.address) as remote:
        found = remote.ask(GetLatestCheckpoint(space=status.job_id), RecoveryInfo)
    names = sorted(worker.name for worker in status.workers)
    assert (found.step, found.world_size, found.worker_id) == (5, 2, names[1])
    assert found.path == str(tmp_path / "of-1" / "step-000005.json")
    events = cluster.connection.ask(Explain(job="saving"), Story).events
    (failed,) = [event for event in events if event.event == "checkpoint-failed"]
    assert (failed.worker, failed.job) == (names[0], status.job_id)
    assert "step 6 was not saved" in failed.reason
    assert "checkpoint-complete" in [event.event for event in events]
