"""A first step of DDP with an optimizer, and the end: `ddp.py FOLDER` is ready when the step is done."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    folder, rank = Path(sys.argv[1]), dist.get_rank()
    aside = folder / f".{os.getpid()}"
    aside.write_text(json.dumps({"at": time.time(), "pid": os.getpid(), "rank": rank}))
    aside.rename(folder / f"{rank}-{os.getpid()}.json")
    dist.destroy_process_group()
