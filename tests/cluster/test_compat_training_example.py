"""Document 5's full training example under `python -m unified.compat`, by two workers that a master coordinates.

Its text is as it stands, but for two places that it names: the coordinator's host, and where the data are. Checkpoints
go to a bucket of the environment's, from which a second run goes on.
What it leaves to its reader (`YourModel`, `create_dataloader`, `train_step`, how many steps) is defined in front of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.io.s3_fixture import S3Server
from unified.checkpoint import CheckpointManager
from unified.testing import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

# Document 5, "Full Training Example".
EXAMPLE = """
import asyncio
from dtruntime import DatasetRegistry, CheckpointManager, TrainingOrchestrator
import torch
import torch.distributed as dist

async def main():
    # Initialize
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    
    orch = TrainingOrchestrator(
        worker_id=f"worker-{rank}",
        coordinator_url="http://coordinator:50051",
        world_size=world_size,
        rank=rank
    )
    
    # Register worker
    await orch.register_worker(
        ip=socket.gethostbyname(socket.gethostname()),
        port=8080
    )
    
    # Setup dataset
    registry = DatasetRegistry("http://coordinator:50051")
    registry.register("imagenet", "/data/imagenet", "parquet")
    
    # Get shard for this worker
    shard_files = registry.get_shard("imagenet", worker_rank=rank, epoch=0)
    
    # Setup checkpointing
    ckpt_mgr = CheckpointManager("/checkpoints", backend="s3")
    
    # Initialize model
    model = YourModel()
    optimizer = torch.optim.Adam(model.parameters())
    
    # Recovery from checkpoint
    try:
        ckpt_data = await ckpt_mgr.load(step=0)  # Load latest
        state = torch.load(io.BytesIO(ckpt_data))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start_step = state["step"]
    except FileNotFoundError:
        start_step = 0
    
    # Training loop
    dataloader = create_dataloader(shard_files)
    
    for step in range(start_step, total_steps):
        # Barrier sync at epoch boundaries
        if step % steps_per_epoch == 0:
            await orch.wait_barrier(f"epoch_{step // steps_per_epoch}")
        
        # Train
        batch = next(dataloader)
        loss = train_step(model, batch, optimizer)
        
        # Checkpoint
        if step % checkpoint_interval == 0:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step,
            }
            data = io.BytesIO()
            torch.save(state, data)
            await ckpt_mgr.save_async(data.getvalue(), step=step)
            
            print(f"Step {step}, Loss: {loss:.4f}")
    
    print("Training complete!")

if __name__ == "__main__":
    asyncio.run(main())
"""  # noqa: W293  # as the document has it

# What the example leaves to its reader; it also imports less than it uses.
READERS = """
import io, itertools, json, os, socket, sys
import torch

class YourModel(torch.nn.Linear):
    def __init__(self):
        super().__init__(1, 1)

def create_dataloader(files):
    print("files", json.dumps(files))
    return itertools.repeat(torch.ones(4, 1))

def train_step(model, batch, optimizer):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()

total_steps, steps_per_epoch, checkpoint_interval = 6, 3, 2
"""


def run(script: Path) -> list[str]:
    """What each of two ranks says, until both have ended well."""
    workers = [start(script, rank, 2) for rank in range(2)]
    try:
        said = [worker.communicate(timeout=100) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()  # one that ended is not there to be killed
            worker.wait()
    assert [worker.returncode for worker in workers] == [0, 0], said
    assert all(out.endswith("Training complete!\n") for out, _ in said)
    return [out for out, _ in said]


def steps_of(out: str) -> list[str]:
    return [line.split(",")[0] for line in out.splitlines() if line.startswith("Step")]


def start(script: Path, rank: int, world_size: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "unified.compat", str(script)],
        env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world_size)},
        cwd=script.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.timeout(250)  # four processes import torch and its optimizers: nearly all of the time, on a busy host
def test_example_trains_and_goes_on(
    local_cluster: Callable[..., LocalCluster],
    s3_environment: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import pyarrow
    import pyarrow.parquet

    data = tmp_path / "imagenet"
    data.mkdir()
    for number in range(8):
        pyarrow.parquet.write_table(pyarrow.table({"x": list(range(10_000))}), data / f"shard_{number}.parquet")
    cluster = local_cluster(nodes=1, devices=1)
    places = {
        "http://coordinator:50051": cluster.address.replace("tcp://", "http://"),
        "/data/imagenet": str(data),
    }
    text = EXAMPLE
    for place, here in places.items():
        assert place in text
        text = text.replace(place, here)
    script = tmp_path / "train.py"
    script.write_text(READERS + text)

    bucket = s3_environment.make_bucket()
    monkeypatch.setenv("UNIFIED_STORAGE_BUCKET", bucket)
    said = run(script)
    assert [steps_of(out) for out in said] == [["Step 0", "Step 2", "Step 4"]] * 2
    files = [json.loads(line.removeprefix("files ")) for out in said for line in out.splitlines() if "files" in line]
    assert sorted(files[0] + files[1]) == sorted(map(str, data.glob("*.parquet"))), "each shard is somebody's"
    assert all(files), "and everybody has some"

    with CheckpointManager(f"s3://{bucket}/checkpoints") as manager:
        assert manager.steps() == [0, 2, 4]
        before = manager.checkpoint(4)
    assert [steps_of(out) for out in run(script)] == [["Step 4"]] * 2, "the second run begins anew"
    with CheckpointManager(f"s3://{bucket}/checkpoints") as manager:
        assert manager.steps() == [0, 2, 4]
        assert manager.checkpoint(4).writer != before.writer
        assert manager.load_state()["step"] == 4
