"""Entry points of the jobs on the pictures of the page. They train nothing, and tell what a training would."""

from __future__ import annotations

import math
import os
import random
import time
from pathlib import Path
from typing import Any

from unified import current_worker
from unified.checkpoint import CheckpointManager
from unified.data import DatasetRegistry, ShardedDataset

STEPS, SAVE_EVERY = 2000, 60
CONTEXT = 4096


def pretrain() -> None:
    """Read shards, save checkpoints, and report curves until the job is stopped."""
    worker, rank = current_worker(), int(os.environ["RANK"])
    folder = Path(worker.job_info.user_config.folder)
    checkpoints = CheckpointManager(folder / "checkpoints", keep_last_n=3)
    registry = DatasetRegistry()
    registry.register("web-text", folder / "web-text.jsonl", "jsonl", shard_size=64, shuffle=True, seed=0)
    noise = random.Random(rank)
    step = 0
    try:
        step = checkpoints.load_state()["step"]
        print(f"resumed at step {step}", flush=True)
    except FileNotFoundError:
        print(f"rank {rank}: {CONTEXT} tokens a sample, from the start", flush=True)
    for _ in ShardedDataset(registry, "web-text"):
        if worker.should_stop:
            break
        step += 1
        report(step, noise)
        if step % 50 == 0:
            print(f"step {step}, lr {learning_rate(step):.1e}", flush=True)
        if step % SAVE_EVERY == 0 and rank == 0:
            checkpoints.save({"step": step, "weights": bytes(3_000_000)}, step)
        train_step()


def train_step() -> None:
    forward()


def forward() -> None:
    time.sleep(0.15)


def learning_rate(step: int) -> float:
    return 3e-4 * min(1, step / 100)


def report(step: int, noise: random.Random, **more: Any) -> None:
    current_worker().report(
        step=step,
        total=STEPS,
        loss=round(2.1 + 4 * math.exp(-step / 60) + noise.gauss(0, 0.04), 3),
        lr=learning_rate(step),
        grad_norm=round(0.6 + 2 * math.exp(-step / 40) + abs(noise.gauss(0, 0.1)), 3),
        tokens_per_s=round(CONTEXT * 6.6 * noise.uniform(0.95, 1.0)),
        **more,
    )


def tune() -> None:
    """Fail on one rank, on a sample that it cannot read."""
    rank, noise = int(os.environ["RANK"]), random.Random(0)
    for step in range(1, 25):
        report(step, noise)
        print(f"step {step}", flush=True)
        time.sleep(0.1)
    if rank == 2:
        read_sample({"id": 4711, "tokens": 5012})
    time.sleep(600)


def read_sample(sample: dict[str, int]) -> None:
    if sample["tokens"] > CONTEXT:
        raise ValueError(f"sample {sample['id']} has {sample['tokens']} tokens, and the context has {CONTEXT}")


def evaluate() -> None:
    for step in range(1, 6):
        current_worker().report(step=step, total=5, accuracy=0.61 + step / 100)
