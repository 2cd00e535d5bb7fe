"""The training of the recovery benchmark as an elastic loop, which survives a peer in its process.

elastic_job.py FOLDER RANKS NODES      submit it to $UNIFIED_MASTER, and wait
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.recovery import work
from unified import DLJobBuilder
from unified.elastic import ElasticState, elastic

FOLDER = "RECOVERY_FOLDER"
ROOT = str(Path(__file__).parents[2])


def train() -> None:
    """Train until the file ``stop`` is there."""
    torch.set_num_threads(1)
    model = work.model()
    state = ElasticState(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    folder = Path(os.environ[FOLDER])

    @elastic(state)
    def loop() -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        parallel = DistributedDataParallel(state.model)
        writer, stop = work.StepWriter(folder, rank), torch.zeros(1)
        while not stop.item():
            state.optimizer.zero_grad()
            parallel(work.batch(state.step, rank)).square().mean().backward()
            state.optimizer.step()
            state.commit()
            writer.write(state.step, world_size)
            stop[0] = writer.is_asked_to_stop
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)

    loop()


def main(folder: Path, ranks: int, nodes: int) -> int:
    each = ranks // nodes
    builder: Any = DLJobBuilder().node_num(nodes).device_per_node(each).device_type("CPU")
    builder = builder.global_env({FOLDER: str(folder), "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"})
    job = builder.train("benchmarks.recovery.elastic_job.train").nnodes(nodes).nproc_per_node(each).end().build()
    code: int = job.submit("recovery", master=os.environ["UNIFIED_MASTER"], working_dir=ROOT)
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
