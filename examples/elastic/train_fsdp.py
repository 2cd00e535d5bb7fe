"""Training of a sharded model (FSDP2) that goes on in its processes when others die.

No rank has the whole model, so a dead rank's part is in no other process: it comes from a snapshot, which the node's
memory holds and, by a copy, that of the next node. The model is sharded over the process group of one round, so it is
made in the loop, and `register` brings it to the step of the newest snapshot that all ranks have.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from task import BATCH, SAMPLES, Journal, build_data, build_model
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

from unified import current_worker
from unified.elastic import ElasticSampler, ElasticState, elastic


def run() -> None:
    """Entry point of the role."""
    torch.set_num_threads(1)
    config = current_worker().job_info.user_config
    inputs, targets = build_data()
    sampler = ElasticSampler(SAMPLES, BATCH, seed=3)
    state = ElasticState(snapshot_every=1, sampler=sampler)

    @elastic(state)
    def train() -> None:
        journal = Journal(config, dist.get_rank())
        model = build_model()
        for layer in model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        state.register(model=model, optimizer=optimizer)
        while state.step < config.steps:
            for batch in sampler:
                optimizer.zero_grad()
                loss = mse_loss(model(inputs[batch]), targets[batch])
                loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                optimizer.step()
                state.commit()
                journal.took(state.step, float(loss.detach()))
                if state.step == config.steps:
                    break

    train()
