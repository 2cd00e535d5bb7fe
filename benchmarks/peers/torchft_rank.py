"""A replica group of one rank under torchft, which lets the others go on and heals the one that comes back.

    TORCHFT_LIGHTHOUSE=… torchrun --nnodes=1 --nproc-per-node=1 … torchft_rank.py FOLDER RANK

As in torchft's own examples each replica group has a launcher of its own, which starts its rank again.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from benchmarks.recovery import work


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    bare = work.model()
    inner = torch.optim.AdamW(bare.parameters())

    def state() -> dict[str, Any]:
        return {"model": bare.state_dict(), "optimizer": inner.state_dict()}

    def load(state: dict[str, Any]) -> None:
        bare.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=state,
        replica_id=f"replica_{rank}",
        timeout=timedelta(seconds=10),
    )
    model = DistributedDataParallel(manager, bare)
    optimizer = Optimizer(manager, inner)
    writer = work.StepWriter(folder, rank)
    while not writer.is_asked_to_stop:
        optimizer.zero_grad()
        model(work.batch(manager.current_step(), rank)).square().mean().backward()
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before:
            writer.write(manager.current_step(), manager.num_participants())
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
