"""Data-parallel training that goes on in its processes when others die.

The model is made outside of the loop, and outlives rounds. What binds it to one round, DistributedDataParallel, is made
in the loop, which is called once a round. Snapshots are for the case that no rank is left to take the state from.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from task import BATCH, SAMPLES, Journal, build_data, build_model
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from unified import current_worker
from unified.elastic import ElasticSampler, ElasticState, elastic


def run() -> None:
    """Entry point of the role."""
    torch.set_num_threads(1)
    config = current_worker().job_info.user_config
    inputs, targets = build_data()
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = ElasticSampler(SAMPLES, BATCH, seed=3)
    state = ElasticState(snapshot_every=20, model=model, optimizer=optimizer, sampler=sampler)

    @elastic(state)
    def train() -> None:
        journal = Journal(config, dist.get_rank())
        replica = DistributedDataParallel(model)
        while state.step < config.steps:
            for batch in sampler:
                optimizer.zero_grad()
                loss = mse_loss(replica(inputs[batch]), targets[batch])
                loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                optimizer.step()
                state.commit()
                journal.took(state.step, float(loss.detach()))
                if state.step == config.steps:
                    break

    train()
