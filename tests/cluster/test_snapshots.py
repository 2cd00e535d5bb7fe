"""Snapshots in jobs: what dies, and from where the state comes back."""

import signal
from pathlib import Path

import pytest

from tests.cluster.conftest import Cluster, Project
from unified.api.builder import DLJob, DLJobBuilder
from unified.client.handle import JobHandle
from unified.protocol.client_master import DrainNode
from unified.testing import LocalCluster, eventually

pytestmark = pytest.mark.processes

TRAINING = """
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from unified import current_worker

STEPS = 30

def run():
    worker = current_worker()
    folder = Path(os.environ["TEST_FOLDER"])
    rank = dist.get_rank()
    state = {"weights": torch.zeros(50_000), "step": 0, "history": []}
    if storage := os.environ.get("TEST_STORAGE"):
        worker.snapshots.configure(storage=storage, partner_every=0)
    found = worker.restore(state)
    text = "nothing" if found is None else f"{found.step} from {found.source}"
    print(f"incarnation {worker.incarnation} of rank {rank} restored {text}", flush=True)
    for step in range(state["step"] + 1, STEPS + 1):
        dist.all_reduce(torch.ones(1))
        state["weights"] += rank + 1
        state["step"] = step
        worker.snapshot(state, step)
        worker.report(step=step)
        if step == 10:
            meet(worker, folder, rank)
    assert state["weights"].eq(STEPS * (rank + 1)).all(), state["weights"]
    print("done", flush=True)

def meet(worker, folder, rank):
    mode = os.environ["TEST_MODE"]
    if worker.round == 1 and mode == "worker":
        (folder / f"at-10-{rank}").touch()
        if rank == 1:
            while not (folder / "at-10-0").exists():  # rank 0 has its snapshot of this step, too
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
    if worker.round == 1 and mode == "agent":
        (folder / f"at-10-{rank}").touch()
        while worker.round == 1:
            time.sleep(0.05)
            dist.all_reduce(torch.ones(1))
"""


def a_job(folder: Path, mode: str, storage: Path | str = "", nodes: int = 2) -> DLJob:
    builder = DLJobBuilder().node_num(nodes).device_per_node(2 // nodes).device_type("CPU")
    builder.global_env({"TEST_FOLDER": str(folder), "TEST_MODE": mode, "TEST_STORAGE": str(storage)})
    builder.train("snapshot_training.run").total(2).per_group(2 // nodes)
    return builder.build()


def restored(handle: JobHandle) -> set[str]:
    """The lines that say what was restored."""
    return {text.partition("] ")[2] for text in handle.logs() if " restored " in text}


def until_at_step_ten(folder: Path) -> None:
    eventually(lambda: len(list(folder.glob("at-10-*"))) == 2, 100, "the ranks did not come to step 10")


def node_index(cluster: LocalCluster, handle: JobHandle, rank: int) -> int:
    nodes = {worker.rank: worker.node for worker in cluster.status(handle.job_id).workers if worker.role != "store"}
    return int(nodes[rank].removeprefix("node-")) - 1


def test_a_killed_worker_goes_on_from_memory(local_cluster: Cluster, project: Project, tmp_path: Path) -> None:
    project(snapshot_training=TRAINING)
    handle = local_cluster(nodes=2, devices=1).submit(a_job(tmp_path, "worker"), "demo")
    assert handle.wait(timeout=200) == 0, "\n".join(handle.logs())
    lines = restored(handle)
    assert "incarnation 1 of rank 1 restored 10 from memory" in lines
    assert "incarnation 1 of rank 0 restored 10 from memory" in lines


@pytest.mark.slow
def test_a_killed_node_goes_on_from_its_partner(local_cluster: Cluster, project: Project, tmp_path: Path) -> None:
    project(snapshot_training=TRAINING)
    cluster = local_cluster(nodes=3, devices=1)
    handle = cluster.submit(a_job(tmp_path, "agent"), "demo")
    until_at_step_ten(tmp_path)
    cluster.kill_agent(node_index(cluster, handle, 1))
    assert handle.wait(timeout=200) == 0, "\n".join(handle.logs())
    lines = restored(handle)
    assert any(
        "of rank 1 restored 10 from partner" in line or "of rank 1 restored 9 from partner" in line for line in lines
    )
    assert any(
        "of rank 0 restored 10 from memory" in line or "of rank 0 restored 9 from memory" in line for line in lines
    )


@pytest.mark.slow
def test_the_only_node_of_a_job_is_killed_and_another_node_has_copies(
    local_cluster: Cluster, project: Project, tmp_path: Path
) -> None:
    project(snapshot_training=TRAINING)
    cluster = local_cluster(nodes=3, devices=2)
    handle = cluster.submit(a_job(tmp_path, "agent", nodes=1), "demo")
    until_at_step_ten(tmp_path)
    assert node_index(cluster, handle, 0) == node_index(cluster, handle, 1)
    cluster.kill_agent(node_index(cluster, handle, 0))
    assert handle.wait(timeout=200) == 0, "\n".join(handle.logs())
    again = {line for line in restored(handle) if not line.endswith("nothing")}
    assert any(
        again == {f"incarnation 1 of rank {rank} restored {step} from partner" for rank in (0, 1)} for step in (9, 10)
    )


@pytest.mark.slow
def test_an_agent_that_is_asked_to_stop_persists_before_its_ranks_go_on_elsewhere(
    local_cluster: Cluster, project: Project, tmp_path: Path
) -> None:
    project(snapshot_training=TRAINING)
    cluster = local_cluster(nodes=3, devices=1)
    handle = cluster.submit(a_job(tmp_path, "agent", tmp_path / "kept"), "demo", stop_grace_s=100)
    until_at_step_ten(tmp_path)
    cluster.kill_agent(node_index(cluster, handle, 1), signal.SIGTERM)
    assert handle.wait(timeout=200) == 0, "\n".join(handle.logs())
    lines = restored(handle)
    assert any("of rank 1 restored 10 from storage" in line for line in lines), lines
    assert any("of rank 0 restored 10 from memory" in line for line in lines), lines


@pytest.mark.slow
def test_a_job_after_the_whole_cluster_goes_on_from_storage(
    local_cluster: Cluster, project: Project, tmp_path: Path
) -> None:
    project(snapshot_training=TRAINING)
    cluster = local_cluster(nodes=2, devices=1)
    handle = cluster.submit(a_job(tmp_path, "agent", tmp_path / "kept"), "demo")
    until_at_step_ten(tmp_path)
    for index in range(2):
        cluster.kill_agent(index, signal.SIGTERM)
    eventually(lambda: len(list((tmp_path / "kept").rglob("*10.*.snapshot"))) == 2, 100, "nothing was persisted")
    handle.stop(force=True)
    again = local_cluster(nodes=2, devices=1).submit(a_job(tmp_path, "", tmp_path / "kept"), "demo")
    assert again.wait(timeout=200) == 0, "\n".join(again.logs())
    assert restored(again) == {f"incarnation 0 of rank {rank} restored 10 from storage" for rank in range(2)}


def test_a_job_whose_workers_all_move_at_once_goes_on_from_the_nodes_that_they_left(
    local_cluster: Cluster, project: Project, tmp_path: Path
) -> None:
    project(snapshot_training=TRAINING)
    cluster = local_cluster(nodes=4, devices=1)
    handle = cluster.submit(a_job(tmp_path, "agent"), "demo")
    until_at_step_ten(tmp_path)
    used = [f"node-{node_index(cluster, handle, rank) + 1}" for rank in range(2)]
    handle.suspend()
    eventually(lambda: cluster.status("demo").num_leaving == 0, 100, "the workers did not end")
    for node in used:
        handle.connection.request(DrainNode(node=node))
    handle.resume()
    assert handle.wait(timeout=200) == 0, "\n".join(handle.logs())
    assert {f"node-{node_index(cluster, handle, rank) + 1}" for rank in range(2)}.isdisjoint(used)
    again = {line for line in restored(handle) if line.startswith("incarnation 1")}
    assert any(
        again == {f"incarnation 1 of rank {rank} restored {step} from partner" for rank in (0, 1)} for step in (9, 10)
    ), again
