"""Document 5's full training example under `python -m unified.compat`, by two workers that a master coordinates.

Its text is as it stands, but for the places that it names: the coordinator's host, and where data and checkpoints are.
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


def start(script: Path, rank: int, world_size: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "unified.compat", str(script)],
        env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world_size)},
        cwd=script.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.timeout(150)  # two processes import torch and its optimizers: nearly all of the time, on a busy host
def test_example_trains(local_cluster: Callable[..., LocalCluster], tmp_path: Path) -> None:
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
        # One place for each worker: with one for both, each would overwrite what the other has saved.
        '"/checkpoints", backend="s3"': f'"{tmp_path}/checkpoints-" + str(rank), backend="local"',
    }
    text = EXAMPLE
    for place, here in places.items():
        assert place in text
        text = text.replace(place, here)
    script = tmp_path / "train.py"
    script.write_text(READERS + text)

    workers = [start(script, rank, 2) for rank in range(2)]
    try:
        said = [worker.communicate(timeout=100) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()  # one that ended is not there to be killed
            worker.wait()
    assert [worker.returncode for worker in workers] == [0, 0], said
    for out, _ in said:
        assert [line.split(",")[0] for line in out.splitlines() if line.startswith("Step")] == [
            "Step 0",
            "Step 2",
            "Step 4",
        ]
        assert out.endswith("Training complete!\n")
    files = [json.loads(line.removeprefix("files ")) for out, _ in said for line in out.splitlines() if "files" in line]
    assert sorted(files[0] + files[1]) == sorted(map(str, data.glob("*.parquet"))), "each shard is somebody's"
    assert all(files), "and everybody has some"

    for rank in range(2):
        saved = [path.name for path in (tmp_path / f"checkpoints-{rank}").glob("step-*.json")]
        assert len(saved) == 3, saved
