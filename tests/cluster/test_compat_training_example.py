"""Document 5's full training example, under `python -m unified.compat` and natively, by four workers that a master
coordinates: they read each row once.

Its text is as it stands, but for two places that it names: the coordinator's host, and where the data are. Checkpoints
go to a bucket of the environment's, from which a second run goes on.
What it leaves to its reader (`YourModel`, `create_dataloader`, `train_step`, how many steps) is defined in front of it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import Cluster
from tests.support.s3 import S3Server
from unified.checkpoint import CheckpointManager

pytestmark = [pytest.mark.processes, pytest.mark.slow]

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
import io, json, os, socket, sys
import torch

class YourModel(torch.nn.Linear):
    def __init__(self):
        super().__init__(1, 1)

def create_dataloader(files):
    from pyarrow.parquet import ParquetFile

    for path in files:
        for batch in ParquetFile(path).iter_batches(1000):
            rows = batch.column("x").to_pylist()
            print("read", json.dumps([rows[0], rows[-1]]))
            yield torch.tensor(rows, dtype=torch.float32).reshape(-1, 1) / 1e5

def train_step(model, batch, optimizer):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()

total_steps, steps_per_epoch, checkpoint_interval = 25, 10, 10
"""
RANKS, ROWS = 4, 25_000
"""One file of so many rows for each rank."""
NATIVE = """
from unified.checkpoint import CheckpointManager
from unified.data import DatasetRegistry, TrainingOrchestrator
"""


def run(script: Path, *launcher: str) -> list[str]:
    """What each rank says, until all have ended well."""
    workers = [start(script, rank, launcher) for rank in range(RANKS)]
    try:
        said = [worker.communicate(timeout=200) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()  # one that ended is not there to be killed
            worker.wait()
    assert [worker.returncode for worker in workers] == [0] * RANKS, said
    assert all(out.endswith("Training complete!\n") for out, _ in said)
    assert not any("WARNING" in err for _, err in said), said
    return [out for out, _ in said]


def steps_of(out: str) -> list[str]:
    return [line.split(",")[0] for line in out.splitlines() if line.startswith("Step")]


def rows_of(out: str) -> list[int]:
    ranges = [json.loads(line.removeprefix("read ")) for line in out.splitlines() if line.startswith("read")]
    return [row for first, last in ranges for row in range(first, last + 1)]


def start(script: Path, rank: int, launcher: tuple[str, ...]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *launcher, str(script)],
        env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"},
        cwd=script.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def bucket(s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    name = s3_environment.make_bucket()
    monkeypatch.setenv("UNIFIED_STORAGE_BUCKET", name)
    return name


@pytest.fixture
def text(local_cluster: Cluster, tmp_path: Path) -> str:
    """The example, with the coordinator's host and the place of the data as they are here."""
    import pyarrow
    import pyarrow.parquet

    data = tmp_path / "imagenet"
    data.mkdir()
    for number in range(RANKS):
        rows = pyarrow.table({"x": range(number * ROWS, (number + 1) * ROWS)})
        pyarrow.parquet.write_table(rows, data / f"shard_{number}.parquet")
    cluster = local_cluster(nodes=1, devices=1)
    places = {
        "http://coordinator:50051": cluster.address.replace("tcp://", "http://"),
        "/data/imagenet": str(data),
    }
    found = EXAMPLE
    for place, here in places.items():
        assert place in found
        found = found.replace(place, here)
    return READERS + found


def test_example_reads_each_row_once_and_goes_on(text: str, bucket: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    said = run(script, "-m", "unified.compat")
    assert [steps_of(out) for out in said] == [["Step 0", "Step 10", "Step 20"]] * RANKS
    assert sorted(row for out in said for row in rows_of(out)) == list(range(RANKS * ROWS))

    with CheckpointManager(f"s3://{bucket}/checkpoints") as manager:
        assert manager.steps() == [0, 10, 20]
        before = manager.checkpoint(20)
    again = run(script, "-m", "unified.compat")
    assert [steps_of(out) for out in again] == [["Step 20"]] * RANKS, "the second run begins anew"
    with CheckpointManager(f"s3://{bucket}/checkpoints") as manager:
        assert manager.steps() == [0, 10, 20]
        assert manager.checkpoint(20).writer != before.writer
        assert manager.load_state()["step"] == 20


@pytest.mark.usefixtures("bucket")
def test_example_reads_each_row_once_with_our_own_names(text: str, tmp_path: Path) -> None:
    theirs = "from dtruntime import DatasetRegistry, CheckpointManager, TrainingOrchestrator\n"
    assert theirs in text
    script = tmp_path / "train.py"
    script.write_text(text.replace(theirs, NATIVE))
    said = run(script)
    assert sorted(row for out in said for row in rows_of(out)) == list(range(RANKS * ROWS))
