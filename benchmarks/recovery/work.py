"""What every contender of the recovery benchmark trains, and what each rank writes down of it.

A rank appends a line to a file of its own at the end of each step: the wall clock (all processes are on one host), the
step, and the ranks that took part. From these files alone the benchmark tells what a kill cost.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

WIDTH = 256
"""Of the model's two layers: 0.5 MiB of weights."""
BATCH = 32
SAVE_EVERY = 10
"""Steps from one checkpoint to the next, where a contender restarts processes."""
STEP_S = 0.02
"""Below this a step is padded: a rank that spins would take the processors from the ones that start."""


WITHIN_S = 60.0


class Step(NamedTuple):
    """The end of one step, as a rank saw it."""

    at: float
    step: int
    rank: int
    pid: int
    world_size: int


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def batch(step: int, rank: int) -> torch.Tensor:
    """The data of one rank in one step, the same in every incarnation."""
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step * 1000 + rank))


class StepWriter:
    """Writes the steps of one rank into a folder, one write a line, so that a killed rank leaves whole lines."""

    def __init__(self, folder: Path, rank: int, least_s: float = STEP_S) -> None:
        self._rank = rank
        self._least_s = least_s
        self._stop = folder / "stop"
        self._file = os.open(folder / f"steps-{rank}-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._due = time.monotonic()

    @property
    def is_asked_to_stop(self) -> bool:
        return self._stop.exists()

    def write(self, step: int, world_size: int, rank: int | None = None) -> None:
        """Write the end of a step; return when the next may begin."""
        told = Step(time.time(), step, self._rank if rank is None else rank, os.getpid(), world_size)
        os.write(self._file, json.dumps(told).encode() + b"\n")
        self._due = max(time.monotonic(), self._due + self._least_s)
        time.sleep(max(0.0, self._due - time.monotonic()))


def wait_for_steps(folder: Path, number: int) -> None:
    """Return once a rank has made so many steps. RuntimeError: none has within a minute."""
    deadline = time.monotonic() + WITHIN_S
    while max((step.step for step in read(folder)), default=0) < number:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the job did not make {number} steps within {WITHIN_S:g} s")
        time.sleep(0.1)


def read(folder: Path) -> list[Step]:
    """All steps of all ranks and incarnations, oldest first."""
    lines = [line for file in folder.glob("steps-*") for line in file.read_text().split("\n")[:-1]]
    return sorted(Step(*json.loads(line)) for line in lines)
