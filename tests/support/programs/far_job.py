"""A data-parallel loop that survives its peers, and a service that each step of each rank calls.

far_job.py MASTER FOLDER STEPS      submit it, and leave
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from unified import DLJobBuilder, RoleGroup, current_worker, rpc

RANKS = 3


def folder() -> Path:
    return Path(current_worker().job_info.user_config.folder)


def tell(name: str, **fields: Any) -> None:
    """Add a line to a file."""
    with (folder() / name).open("a") as file:
        print(json.dumps({"at": time.time(), "pid": os.getpid(), **fields}), file=file, flush=True)


def samples(step: int, rank: int) -> Any:
    """The inputs of one rank in one step, the same in every incarnation."""
    import torch

    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def model() -> Any:
    import torch

    torch.manual_seed(7)
    return torch.nn.Linear(8, 1)


def run() -> None:
    """Train for as many steps as the job says."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from unified.elastic import ElasticState, elastic

    torch.set_num_threads(1)
    steps = current_worker().job_info.user_config.steps
    own = model()
    state = ElasticState(model=own, optimizer=torch.optim.SGD(own.parameters(), lr=0.05))
    tell("begun", rank=current_worker().actor_info.rank)

    @elastic(state)
    def train() -> None:
        rank = dist.get_rank()
        tell("rounds", rank=rank, step=state.step)
        replica = DistributedDataParallel(own)
        while state.step < steps:
            state.optimizer.zero_grad()
            replica(samples(state.step, rank)).square().mean().backward()
            state.optimizer.step()
            state.commit()
            told = RoleGroup("tally")[0].call("count", rank, state.step).result(timeout=60)
            tell("steps", rank=rank, step=state.step, told=told)

    train()
    tell("weights", rank=current_worker().actor_info.rank, weights=own.weight.flatten().tolist())


class Tally:
    def __init__(self) -> None:
        self.steps: dict[int, set[int]] = {}

    @rpc
    def count(self, rank: int, step: int) -> int:
        """Take a step into account; return the number of steps of this rank."""
        self.steps.setdefault(rank, set()).add(step)
        return len(self.steps[rank])


def main(master: str, folder: str, steps: str) -> None:
    builder: Any = DLJobBuilder().node_num(RANKS).device_per_node(1).device_type("CPU")
    builder = builder.config({"folder": folder, "steps": int(steps)})
    builder = builder.train("far_job.run").nnodes(RANKS).nproc_per_node(1)
    builder = builder.workload("tally", "far_job.Tally").resource(cpu=0.1).not_driver()
    builder.build().submit("far", blocking=False, master=master).close()


if __name__ == "__main__":
    main(*sys.argv[1:])
