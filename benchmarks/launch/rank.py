"""What each rank of the launch benchmark runs, ours and torchrun's alike: a script as anybody would write it.

Says when its first `all_reduce` was through, in a file of its own, and then goes on reducing until it is told to end.

    rank.py FOLDER once      end after the first all_reduce
    rank.py FOLDER stay      end when FOLDER/stop appears
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported at run time only

TIMEOUT = timedelta(seconds=30)


def main(folder: Path, mode: str) -> None:
    join()
    dist.all_reduce(torch.ones(1))
    told = {"at": time.time(), "pid": os.getpid(), "rank": dist.get_rank()}
    aside = folder / f".{os.getpid()}"
    aside.write_text(json.dumps(told))
    aside.rename(folder / f"{told['rank']}-{told['pid']}.json")
    while mode == "stay":
        stop = torch.tensor([float((folder / "stop").exists())])
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop.item():
            break
        time.sleep(0.005)
    dist.destroy_process_group()


def join() -> None:
    """Form the process group, unless the launcher already has.

    torch 2.13 does not tell one attempt's keys in torchrun's store from the next one's, and a restarted rank can read
    the address of a dead peer. A prefix for each restart is the remedy that shows torchrun at its best.
    """
    torch.set_num_threads(1)
    if dist.is_initialized():
        return
    if "BENCH_PREFIX" not in os.environ:
        dist.init_process_group("gloo", timeout=TIMEOUT)
        return
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=TIMEOUT)
    dist.init_process_group(
        "gloo",
        store=PrefixStore(f"restart-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=TIMEOUT,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
