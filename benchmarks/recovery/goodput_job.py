"""The nanogpt example's model and text in an elastic loop, for the goodput benchmark."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from model import GPT  # type: ignore[import-not-found]  # of examples/nanogpt, which is on the path
from torch.nn.parallel import DistributedDataParallel

from benchmarks.recovery import work
from unified import current_worker
from unified.elastic import ElasticSampler, ElasticState, elastic

FOLDER = "GOODPUT_FOLDER"
ROWS = "rows.npy"
"""Windows of text, (rows, CONTEXT + 1) bytes as int64, so that a rank that comes back reads what it needs."""
CONTEXT = 64
BATCH = 16
SNAPSHOT_EVERY = 10
STORAGE_EVERY = 1000
"""Steps from one snapshot to the next, and to the next that goes to storage too."""


def train() -> None:
    """Train until the file ``stop`` is there."""
    torch.set_num_threads(1)
    folder = Path(os.environ[FOLDER])
    current_worker().snapshots.configure(
        storage=folder / "snapshots", storage_every=STORAGE_EVERY // SNAPSHOT_EVERY, replicated=True
    )
    torch.manual_seed(1337)
    model = GPT(2, 96, 4, CONTEXT)
    rows = torch.from_numpy(np.load(folder / ROWS, mmap_mode="c"))
    state = ElasticState(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        sampler=ElasticSampler(len(rows), BATCH),
        snapshot_every=SNAPSHOT_EVERY,
    )

    @elastic(state)
    def loop() -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        parallel = DistributedDataParallel(state.model)
        writer, stop = work.StepWriter(folder, rank, least_s=0.0), torch.zeros(1)
        while True:
            for batch in state.sampler:
                window = rows[batch]
                loss = parallel(window[:, :-1], window[:, 1:])
                state.optimizer.zero_grad()
                loss.backward()
                state.optimizer.step()
                state.commit()
                writer.write(state.step, world_size)
                current_worker().report(step=state.step, loss=round(float(loss), 3))
                stop[0] = writer.is_asked_to_stop
                dist.all_reduce(stop, op=dist.ReduceOp.MAX)
                if stop.item():
                    return

    loop()
