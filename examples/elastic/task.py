"""The task: a small network learns what another one computes, and each rank writes down which step it took when."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unified import current_worker

INPUTS, WIDTH, SAMPLES, BATCH = 32, 256, 4096, 32


def build_model(seed: int = 7) -> nn.Sequential:
    """A model whose first weights depend on the seed alone, so that every rank begins with the same."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))


def build_data() -> tuple[Tensor, Tensor]:
    """Samples, and what a network of other weights makes of them."""
    teacher = build_model(seed=1)
    inputs = torch.randn(SAMPLES, INPUTS, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return inputs, 10 * teacher(inputs)


class Journal:
    """What a rank has done, a JSON object a line, in the folder that the job was given."""

    def __init__(self, config: Any, rank: int) -> None:
        self.total = config.steps
        self.pause_s = config.pause_s
        self._rank = rank
        self._file = (Path(config.out) / f"steps-{rank}.jsonl").open("a")

    def took(self, step: int, loss: float) -> None:
        """A step was committed."""
        worker = current_worker()
        line = {"at": time.time(), "rank": self._rank, "pid": os.getpid(), "round": worker.round, "step": step}
        print(json.dumps({**line, "loss": loss}), file=self._file, flush=True)
        worker.report(step=step, total=self.total, loss=round(loss, 4))
        time.sleep(self.pause_s)  # a larger model would take as long
