"""Two ranks that train with checkpoints, and a scorer that they ask at each step: what a test kills parts of.

Imported by workers from a folder that the test puts on their path.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from unified import RoleGroup, current_worker, rpc
from unified.checkpoint import CheckpointManager
from unified.errors import WorkerDiedError

STEP_S = 0.02


@rpc
def score(step: int) -> int:
    return 2 * step


def serve() -> None:
    """The scorer's entry point: its calls are answered until the job ends."""


def train() -> None:
    folder, num_steps = Path(os.environ["KILL_FOLDER"]), int(os.environ["KILL_STEPS"])
    rank = dist.get_rank()
    checkpoints = CheckpointManager(folder / "checkpoints")
    state = torch.zeros(2, dtype=torch.int64)
    if rank == 0:
        with contextlib.suppress(FileNotFoundError):
            state = checkpoints.load_state()["state"]
    dist.broadcast(state, src=0)
    step, model = (int(each) for each in state)
    while step < num_steps:
        step += 1
        part = torch.tensor(scored(step) * (rank + 1))
        dist.all_reduce(part)
        model += int(part)
        time.sleep(STEP_S)
        if rank == 0:
            checkpoints.save({"state": torch.tensor([step, model])}, step)
            checkpoints.wait()
        current_worker().report(step=step, total=num_steps)
    if rank == 0:
        (folder / "result").write_text(f"{step} {model}")
    checkpoints.close()


def scored(step: int) -> int:
    """Ask the scorer, again if it dies meanwhile: its next incarnation answers."""
    while True:
        try:
            return int(RoleGroup("scorer").call("score", step, _timeout=30).result()[0])
        except WorkerDiedError:
            time.sleep(0.01)
