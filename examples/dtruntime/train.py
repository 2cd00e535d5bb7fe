"""Program of each worker: the full training example of the `dtruntime` reference, with what that leaves open.

The three classes come from `dtruntime`, as the reference has it; in this job that name is Unified's.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from dtruntime import (  # type: ignore[import-not-found]  # an alias, which the runtime makes: docs/compat.md
    CheckpointManager,
    DatasetRegistry,
    TrainingOrchestrator,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from unified import current_worker
from unified.data import iter_samples
from unified.errors import BarrierError, CoordinatorError
from unified.protocol.coordinator import ShardAssignment


def run() -> None:
    """Entry point of the role."""
    torch.set_num_threads(1)
    asyncio.run(main())


async def main() -> None:
    # Initialize: within a job all three know who this worker is, how many there are, and where the master is.
    rank = int(os.environ["RANK"])
    config = current_worker().job_info.user_config
    folder = Path(config.run)
    async with TrainingOrchestrator() as orch:
        # Register worker
        await orch.register_worker()

        # Setup dataset
        registry = DatasetRegistry()
        registry.register("points", config.data, "parquet", shard_size=config.shard_size, shuffle=True, seed=1)

        # Setup checkpointing: to each worker a place of its own, as each has a model of its own
        ckpt_mgr = CheckpointManager(folder / "checkpoints" / f"worker-{rank}", keep_last_n=2)

        # Initialize model
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

        # Recovery from checkpoint
        try:
            state = torch.load(io.BytesIO(await ckpt_mgr.load("latest")))
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            step = state["step"]
            print(f"worker {rank}: resumed at step {step}", flush=True)
        except FileNotFoundError:
            step = 0

        # Training loop: one that comes back begins where the others are
        epoch = registry.current_epoch("points")
        while epoch < config.epochs:
            # Asked anew before each shard: what a lost worker has left is among them, what a new one got is not.
            # The first of them is this worker's for sure.
            while shards := unfinished(registry, epoch):
                samples, losses = [], []
                for batch in create_dataloader(shards[0], config.batch):
                    losses.append(train_step(model, batch, optimizer))
                    samples += batch["id"].tolist()
                    step += 1
                    if config.kill == rank and epoch == 1 and len(shards) <= 8 and current_worker().incarnation == 0:
                        print(f"worker {rank}: killed in the middle of shard {shards[0].shard_id}", flush=True)
                        os.kill(os.getpid(), signal.SIGKILL)

                # Checkpoint: written before the shard counts, so that what counts is in it
                data = io.BytesIO()
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, data)
                await ckpt_mgr.save_async(data.getvalue(), step=step)
                await ckpt_mgr.wait_async()
                if registry.mark_done("points", shards[0].shard_id, epoch):
                    write_down(folder / "trained", rank, epoch=epoch, samples=samples, loss=sum(losses) / len(losses))
                current_worker().report(step=step, epoch=epoch, loss=losses[-1])

            # Barrier sync at epoch boundaries
            try:
                await orch.wait_barrier("epoch_end")
            except BarrierError:  # one of them is lost: look whether this worker has got shards of it
                await asyncio.sleep(0.1)
            if is_complete(registry, epoch):
                epoch = registry.advance_epoch("points", epoch + 1)
    print(f"worker {rank}: training complete after {step} steps", flush=True)


def unfinished(registry: Any, epoch: int) -> list[ShardAssignment]:
    """Return this worker's shards of an epoch; none if another worker has seen its end and begun the next."""
    try:
        return list(registry.get_assignment("points", epoch=epoch))
    except CoordinatorError as error:
        if error.code != "ended":
            raise
        return []


def create_dataloader(shard: ShardAssignment, batch_size: int) -> DataLoader[Any]:
    """The samples of one shard, in batches: dicts of tensors."""
    rows: Any = list(iter_samples(shard))  # whatever has a length and an index will do
    return DataLoader(rows, batch_size=batch_size)


def train_step(model: nn.Module, batch: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> float:
    """The loss before the step."""
    guesses = model(torch.stack([batch["x"], batch["y"]], dim=1).float())
    loss = functional.mse_loss(guesses.squeeze(1), batch["value"].float())
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    optimizer.step()
    return loss.item()


def is_complete(registry: Any, epoch: int) -> bool:
    """Return True if all shards of this epoch were read, by whomever."""
    (points,) = registry.datasets()
    return bool(points.epoch > epoch or points.num_done == points.num_shards)


def write_down(folder: Path, rank: int, **what: object) -> None:
    """Append a line for a shard that counts."""
    folder.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"worker": rank, "incarnation": current_worker().incarnation, **what})
    with (folder / f"worker-{rank}.jsonl").open("a") as file:
        file.write(line + "\n")
