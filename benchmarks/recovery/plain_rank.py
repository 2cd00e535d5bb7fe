"""A rank as anybody would write it: a launcher starts all of them anew when one dies; they go on from the last file.

torchrun … plain_rank.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.launch.rank import join
from benchmarks.recovery import work


def main(folder: Path) -> None:
    join()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(work.model())
    optimizer = torch.optim.AdamW(model.parameters())
    saved, step = folder / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    writer = work.StepWriter(folder, rank)
    stop = torch.zeros(1)
    while not stop.item():
        optimizer.zero_grad()
        model(work.batch(step, rank)).square().mean().backward()
        optimizer.step()
        step += 1
        if rank == 0 and step % work.SAVE_EVERY == 0:
            aside = saved.with_suffix(".new")
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, aside)
            aside.rename(saved)
        writer.write(step, world_size)
        stop[0] = writer.is_asked_to_stop
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    # torch 2.13 can deadlock where the last owner of a Gloo group goes with the interpreter held, while Gloo's thread
    # wants the interpreter to free the tensor of the last collective. A barrier has no such tensor.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
