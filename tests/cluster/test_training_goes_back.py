"""Ranks of an elastic role fail before and after their checkpoint: the model learns from every sample exactly once."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Cluster, Project
from unified.api.builder import DLJobBuilder

pytestmark = pytest.mark.processes

TRAINING = """
import os
import signal
from pathlib import Path

import torch.distributed as dist

from unified import current_worker
from unified.checkpoint import CheckpointManager
from unified.data import DatasetRegistry, ShardedDataset, merge_positions

folder = Path({folder!r})

def train():
    worker = current_worker()
    registry = DatasetRegistry()
    registry.register("d", folder / "data.jsonl", "jsonl", shard_size=10, shuffle=True)
    dataset = ShardedDataset(registry, "d")
    checkpoints = CheckpointManager(folder / "checkpoints")
    step, model = 0, 0
    try:
        state = checkpoints.load_state()
        dataset.load_state_dict(state["data"])
        step, model = state["step"], state["model"]
    except FileNotFoundError:
        pass
    while dataset.epoch < 2:
        for sample in dataset:
            gathered = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, (sample["x"], dataset.state_dict()))
            model += sum(value for value, _ in gathered)
            step += 1
            if (worker.incarnation, step) == (0, 13):
                raise RuntimeError("before any checkpoint")
            if (worker.incarnation, step) == (1, 14):
                if dist.get_rank() == 0:
                    position = merge_positions([state for _, state in gathered])
                    checkpoints.save({{"model": model, "step": step, "data": position}}, step)
                    checkpoints.wait()
                dist.barrier()
            if (worker.incarnation, step, dist.get_rank()) == (1, {killed_at}, 1):
                os.kill(os.getpid(), signal.SIGKILL)
    (folder / f"model-{{dist.get_rank()}}").write_text(f"{{worker.incarnation}} {{step}} {{model}}")
    checkpoints.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("killed_at", "incarnations"), [(0, 2), (65, 3)])
def test_two_epochs_sum_up_whenever_the_ranks_fail(
    local_cluster: Cluster, project: Project, tmp_path: Path, killed_at: int, incarnations: int
) -> None:
    """Before there is a checkpoint; and once more, in the epoch after that of the checkpoint."""
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"x": number}) + "\n" for number in range(100)))
    project(going_back=TRAINING.format(folder=str(tmp_path), killed_at=killed_at))
    builder: Any = DLJobBuilder().node_num(1).device_per_node(2).device_type("CPU")
    built = builder.train("going_back.train").nnodes(1).nproc_per_node(2).max_restart(3).end().build()
    cluster = local_cluster(nodes=1, devices=2)
    assert cluster.submit(built, "going-back").wait(timeout=100) == 0
    assert [(tmp_path / f"model-{rank}").read_text() for rank in (0, 1)] == [f"{incarnations - 1} 100 9900"] * 2
