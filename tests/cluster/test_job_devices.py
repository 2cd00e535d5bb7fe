"""Which accelerators the workers of a job see, on a node whose NVML is a stand-in with four; and on a real one."""

from pathlib import Path

import pytest

from tests.cluster.conftest import Cluster, Project
from unified.api.builder import DLJobBuilder

pytestmark = pytest.mark.processes


SEE = """
import os
import torch

set_device = []
torch.cuda.set_device = lambda device: set_device.append(str(device))

def run():
    names = ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "ACCELERATE_TORCH_DEVICE")
    print(*(os.environ[name] for name in names), *set_device, flush=True)
"""

REAL = """
import os
import torch
import torch.distributed as dist
from unified import current_worker

def run():
    rank = int(os.environ["LOCAL_RANK"])
    assert torch.cuda.current_device() == rank
    torch.cuda.set_device(rank)
    assert current_worker().device == f"cuda:{rank}"
    assert torch.cuda.device_count() == int(os.environ["LOCAL_WORLD_SIZE"])
    assert dist.get_backend() == "nccl"
    value = torch.ones(3, device="cuda")
    dist.all_reduce(value)
    assert value.tolist() == [dist.get_world_size()] * 3

def share():
    assert torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
    assert current_worker().device == "cuda:0"
"""


@pytest.mark.slow
def test_workers_see_devices_as_the_table_in_the_docs_says(
    local_cluster: Cluster,
    project: Project,
    fake_nvml: Path,
) -> None:
    project(see=SEE)
    env = {"LD_LIBRARY_PATH": str(fake_nvml), "FAKE_COUNT": "4"}
    cluster = local_cluster(nodes=1, devices=None, env=env)

    def seen(builder: DLJobBuilder, *roles: str) -> list[list[str]]:
        handle = cluster.submit(builder.build(), "see")
        assert handle.wait(timeout=200) == 0, "\n".join(handle.logs())
        return [
            [line.partition("] ")[2] for rank in range(2) for line in handle.logs(role=role, rank=rank)]
            for role in roles
        ]

    def builder() -> DLJobBuilder:
        return DLJobBuilder().node_num(1).device_per_node(4).device_type("GPU")

    whole = builder()
    whole.role("trainer").train("see.run").total(2).per_group(2).communication("gloo")
    whole.workload("plain", "see.run").total(2).per_group(2)
    assert seen(whole, "trainer", "plain") == [
        ["0,1 0 cuda:0 cuda:0", "0,1 1 cuda:1 cuda:1"],
        ["2 0 cuda:0", "3 1 cuda:0"],
    ]

    shared = builder()
    shared.role("actor").train("see.run").total(2).per_group(2).communication("gloo")
    shared.workload("rollout", "see.run").total(2).per_group(2)
    shared.with_collocation("actor", "rollout")
    shared.workload("chooser", "see.run").total(2).per_group(2).rank_based_gpu_selection()
    assert seen(shared, "actor", "rollout", "chooser") == [
        ["0,1 0 cuda:0 cuda:0", "0,1 1 cuda:1 cuda:1"],
        ["0 0 cuda:0", "1 1 cuda:0"],
        ["2,3 0 cuda:0", "2,3 1 cuda:1"],
    ]

    pairs = builder()
    pairs.role("trainer").train("see.run").total(2).per_group(2).resource(accelerator=2).communication("gloo")
    assert seen(pairs, "trainer") == [["0,2,1,3 0 cuda:0 cuda:0", "0,2,1,3 1 cuda:1 cuda:1"]]

    parts = builder()
    parts.role("half").train("see.run").total(2).per_group(2).resource(accelerator=0.5).communication("gloo")
    parts.workload("all", "see.run").total(2).resource(accelerator=0.4).disable_ray_auto_visible_device()
    assert seen(parts, "half", "all") == [
        ["0 0 cuda:0 cuda:0", "0 1 cuda:0 cuda:0"],
        ["0,1,2,3 0 cuda:1", "0,1,2,3 0 cuda:1"],
    ]


@pytest.mark.gpu
def test_a_rank_works_on_the_device_of_its_local_rank(local_cluster: Cluster, project: Project) -> None:
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("no CUDA device here: ranks work on a real one")
    project(real=REAL)
    cluster = local_cluster(nodes=1, devices=None)
    job = DLJobBuilder().node_num(1).device_per_node(1).device_type("GPU")
    job.role("trainer").train("real.run")
    handle = cluster.submit(job.build(), "real")
    assert handle.wait(timeout=200) == 0, "\n".join(handle.logs())
    job = DLJobBuilder().node_num(1).device_per_node(1).device_type("GPU")
    job.role("half").train("real.share").total(2).per_group(2).resource(accelerator=0.5).communication("gloo")
    handle = cluster.submit(job.build(), "share")
    assert handle.wait(timeout=200) == 0, "\n".join(handle.logs())
