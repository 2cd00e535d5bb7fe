"""The job of the outage benchmark: two ranks that train, one worker that calls and one that puts, all day long."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.recovery import work
from unified import DataQueue, RoleGroup, current_worker, rpc
from unified.errors import UnifiedError

FOLDER = "OUTAGE_FOLDER"
PAUSE_S = 0.002
"""Between calls: a caller that spins would take the processors from the ranks whose steps are timed."""


@rpc
def echo(number: int) -> int:
    return number


def train() -> None:
    """Train until the file ``stop`` is there."""
    torch.set_num_threads(1)
    model = DistributedDataParallel(work.model())
    optimizer = torch.optim.AdamW(model.parameters())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    writer, step, stop = work.StepWriter(folder(), rank, least_s=0.0), 0, torch.zeros(1)
    while not stop.item():
        optimizer.zero_grad()
        model(work.batch(step, rank)).square().mean().backward()
        optimizer.step()
        step += 1
        writer.write(step, world_size)
        current_worker().report(step=step)
        stop[0] = writer.is_asked_to_stop
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)


def serve() -> None:
    """Answer calls, and own the queue: what is put is taken here."""
    queue = DataQueue[int]("numbers", is_master=True, size=64)
    taken = sum(queue)
    told("taken", sum=taken)


def call() -> None:
    """Call and put, over and over; count what failed."""
    queue, service = DataQueue[int]("numbers"), RoleGroup("service")
    number = failed = 0
    errors: list[str] = []

    def tried(what: Callable[[int], object], wanted: object) -> int:
        try:
            return int(what(number) != wanted)
        except UnifiedError as error:
            errors.append(str(error))
            return 1

    while not (folder() / "stop").exists():
        number += 1
        failed += tried(lambda number: service.call("echo", number, _timeout=10).result(), [number])
        failed += tried(lambda number: queue.put(number, timeout=10), None)
        time.sleep(PAUSE_S)
    queue.close()
    told("called", calls=2 * number, failed=failed, sum=number * (number + 1) // 2, errors=errors[:3])


def folder() -> Path:
    return Path(os.environ[FOLDER])


def told(name: str, **what: object) -> None:
    """Leave something for the benchmark to read."""
    (folder() / f"{name}.json").write_text(json.dumps(what))
