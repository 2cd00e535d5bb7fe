"""Weights from an elastic role of two ranks to a rollout role of two workers, on real daemons, with workers killed."""

import os
import signal
from pathlib import Path

import pytest

from tests.cluster.conftest import Cluster, Project
from unified.api.builder import DLJobBuilder
from unified.api.builder.dljob import DLJob
from unified.client.handle import JobHandle
from unified.protocol.records import Stage
from unified.testing import LocalCluster, eventually

pytestmark = [pytest.mark.processes, pytest.mark.slow]

MODULE = """
import pathlib, threading
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from unified import RoleGroup, WeightsReceiver, current_worker, rpc


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 5)
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
        self.norm = torch.nn.BatchNorm1d(1)  # less than a row for each rank, and buffers
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight


def fill(model, value):
    with torch.no_grad():
        for tensor in model.state_dict().values():
            getattr(tensor, "_local_tensor", tensor).fill_(value)


def values(model):
    return sorted({value for tensor in model.state_dict().values() for value in tensor.unique().tolist()})


class Rollout:
    def __init__(self):
        self.model = Model()
        self.lock = threading.Lock()
        self.receiver = WeightsReceiver()
        self.torn, self.seen = [], set()

    @rpc
    def load(self, min_version):
        with self.lock:
            return self.receiver.load_into(self.model, min_version, timeout=20), values(self.model)

    @rpc
    def report(self):
        return sorted(self.seen), self.torn

    def run(self):
        while True:  # it is ended when the job is
            self.receiver.wait()
            with self.lock:
                version = self.receiver.load_into(self.model)
                found = values(self.model)
            self.seen.add(version)
            if len(found) != 1:
                self.torn.append((version, found))


def sync_everything():
    rollout = RoleGroup("rollout")

    def check(weights, value, **options):
        fill(weights, value)
        version = rollout.sync_weights(weights, bucket_bytes=20_000, **options)
        dist.barrier()
        if dist.get_rank() == 0:
            assert rollout.call("load", version).result(20) == [(version, [float(value)])] * 2
        dist.barrier()
        return version

    ddp = DistributedDataParallel(Model())
    assert [check(ddp, value) for value in (1, 2)] == [1, 2]
    if dist.get_rank() == 0:  # one rank by itself
        assert rollout.sync_weights(ddp.module) == 3
    dist.barrier()

    sharded = Model()
    for layer in sharded.layers:
        fully_shard(layer)
    fully_shard(sharded)
    assert check(sharded, 4) == 4
    assert check(sharded, 5, dtype=torch.bfloat16) == 5
    assert check(sharded, 6, wait=False) == 6
    assert check(sharded, 8, version=8) == 8
    try:
        rollout.sync_weights(sharded, version=7)
    except Exception as error:
        assert type(error).__name__ == "WeightsVersionError", error
    else:
        raise AssertionError("a version that goes back was taken")
    # A receiver's own model may be sharded too.
    with WeightsReceiver("mine") as receiver:
        fill(sharded, 9)
        RoleGroup("actor").sync_weights(sharded, name="mine")
        fill(sharded, 0)
        receiver.load_into(sharded)
        for tensor in sharded.state_dict().values():
            assert (getattr(tensor, "_local_tensor", tensor) == 9).all(), tensor
        dist.barrier()


def sync_on():
    rollout = RoleGroup("rollout")
    sharded = Model()
    fully_shard(sharded)
    begun = pathlib.Path(current_worker().job_info.user_config.folder, "begun")
    last = int(begun.read_text()) if begun.exists() else 0
    while True:
        fill(sharded, last + 1)
        version = rollout.sync_weights(sharded, bucket_bytes=20_000, timeout=100)
        assert version > last, (version, last)  # in the next incarnation of this rank too
        last = version
        if dist.get_rank() == 0:
            begun.with_name("new").write_text(str(version))
            begun.with_name("new").rename(begun)
        stop = [begun.with_name("stop").exists()]
        dist.broadcast_object_list(stop, 0)
        if stop[0]:
            break
    for seen, torn in rollout.call("report").result(20):
        assert seen and not torn, (seen, torn)
"""


@pytest.fixture(autouse=True)
def module(project: Project) -> None:
    project(weights_job=MODULE)


def job(entry: str, folder: Path) -> DLJob:
    builder = DLJobBuilder().node_num(2).device_per_node(2).device_type("CPU").config({"folder": str(folder)})
    builder.role("actor").train(f"weights_job.{entry}").nnodes(1).nproc_per_node(2)
    rollout = builder.workload("rollout", "weights_job.Rollout").total(2).per_group(2)
    rollout.resource(accelerator=1).not_driver().restart_alone()
    return builder.skip_node_check().build()


def test_ddp_and_fsdp2(local_cluster: Cluster, tmp_path: Path) -> None:
    cluster = local_cluster(nodes=2, devices=2)
    handle = cluster.submit(job("sync_everything", tmp_path), "sync")
    assert handle.wait(timeout=200) == 0, handle.status().end
    nodes = {worker.node for worker in handle.status().workers if worker.role == "rollout"}
    assert len(nodes) == 1  # so that one passes the buckets on to the other
    assert nodes != {worker.node for worker in handle.status().workers if worker.role == "actor"}


def kill_one(cluster: LocalCluster, handle: JobHandle, role: str) -> None:
    pids = {name: pid for name, pid in cluster.workers(handle).items() if name.startswith(role)}
    name, pid = sorted(pids.items())[-1]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: cluster.workers(handle).get(name, pid) != pid, timeout=100, message=f"{name} did not come back")


def test_killed_receivers_and_senders(local_cluster: Cluster, tmp_path: Path) -> None:
    cluster = local_cluster(nodes=2, devices=2)
    handle = cluster.submit(job("sync_on", tmp_path), "kill", failover_exec_strategy=2)
    begun = tmp_path / "begun"

    def version() -> int:
        status = handle.status()
        assert status.stage != Stage.STOPPED, status.end
        return int(begun.read_text()) if begun.exists() else 0

    def goes_on() -> None:
        at = version()
        eventually(lambda: version() > at + 2, timeout=100, message="no more versions")

    eventually(version, timeout=100, message="no version")
    for role in ("rollout", "actor"):
        goes_on()
        kill_one(cluster, handle, role)
    goes_on()
    (tmp_path / "stop").touch()
    assert handle.wait(timeout=200) == 0, handle.status().end
