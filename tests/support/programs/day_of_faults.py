"""Roles of the job in tests/cluster/test_day_of_faults.py: an elastic training, four services, and callers of them."""

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unified import RoleGroup, current_worker, rpc
from unified.api.runtime import DataQueue
from unified.checkpoint import CheckpointManager
from unified.elastic import ElasticSampler, ElasticState, elastic

STRAY = os.fsdecode(b"no file \xff")
ROWS = 24
WINDOW = 2


def folder() -> Path:
    return Path(os.environ["TEST_FOLDER"])


def write(name: str, text: str) -> None:
    """Write a file that the test sees whole or not at all."""
    file = folder() / f".{name}"
    file.write_text(text)
    file.rename(folder() / name)


def train() -> None:
    """Count in a model's weights how often each row was trained, until the test ends the day at the end of an epoch."""
    worker = current_worker()
    torch.set_num_threads(1)
    model = torch.nn.Embedding(ROWS, 1)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sampler = ElasticSampler(ROWS, 1, seed=3)
    state = ElasticState(model=model, optimizer=optimizer, sampler=sampler, snapshot_every=1)
    pid = os.getpid()

    @elastic(state)
    def loop() -> None:
        rank = dist.get_rank()
        write(f"round-{rank}", f"{worker.round} {state.step} {worker.incarnation} {pid}")
        while not is_over():
            batches = iter(sampler)
            while window := list(islice(batches, WINDOW)):
                for batch in window:
                    (model(torch.tensor(batch)).sum() * -1.0).backward()
                for each in model.parameters():
                    dist.all_reduce(each.grad)
                if rank == 0 and (folder() / "wait").exists() and not (folder() / "waits").exists():
                    (folder() / "waits").touch()
                    DataQueue("nobody", owner_timeout=1000).get(1)
                while rank == 0 and (folder() / "stall").exists():
                    time.sleep(0.1)
                optimizer.step()
                optimizer.zero_grad()
                state.commit(batches=len(window))
                worker.report(step=state.step, loss=float("inf"))
                time.sleep(0.02)
        write(f"trained-{rank}", json.dumps(saved(model, sampler.epoch)))

    loop()


def saved(model: torch.nn.Module, epochs: int) -> dict[str, Any]:
    """Save and load values that differ by rank; return what came back, with the weights."""
    own: dict[str, Any] = {"rank": dist.get_rank(), "rng": torch.get_rng_state(), "rows": 10 * dist.get_rank()}
    with CheckpointManager(folder() / "checkpoints") as manager:
        manager.save(own, 1, sharded=True)
    back: dict[str, Any] = {"rank": -1, "rng": torch.zeros_like(own["rng"]), "rows": -1}
    with CheckpointManager(folder() / "checkpoints") as manager:
        manager.load_state_into(back, 1, sharded=True)
    is_own = torch.equal(back.pop("rng"), own["rng"])
    (weight,) = model.parameters()
    return {"epochs": epochs, "rows": weight.flatten().tolist(), "back": back, "is_own": is_own}


def keeper() -> None:
    """Say what an earlier job of the name has left, and leave the same."""
    worker = current_worker()
    found = worker.restore()
    queue: DataQueue[Any] = DataQueue("kept", is_master=True, durable=True)
    print(f"restored {found and found.step}, {queue.stats().depth} items", flush=True)
    queue.put("item")
    worker.snapshot({"step": 20}, 20)


def printer() -> None:
    """Print 40 MB."""
    for number in range(40_000):
        print(f"line {number:07} {'x' * 1000}")


def stays() -> None:
    """Run until its agent ends it."""
    while True:
        time.sleep(1)


def is_over() -> bool:
    """Return True on all ranks if rank 0 sees the end of the day."""
    flag = torch.tensor(float(dist.get_rank() == 0 and (folder() / "end").exists()))
    dist.all_reduce(flag)
    return bool(flag.item())


class ExitsWhenRead:
    def __reduce__(self) -> Any:
        return _exit, (3,)


def _exit(code: int) -> None:
    raise SystemExit(code)


class Service:
    """A service whose handlers fail in odd ways."""

    @rpc()
    def echo(self, value: Any) -> Any:
        return value

    @rpc()
    def stray_error(self) -> None:
        raise ValueError(STRAY)

    @rpc()
    async def stray_note(self) -> None:
        error = ValueError("text")
        error.add_note(STRAY)
        raise error

    @rpc()
    async def group(self) -> None:
        async def fail(number: int) -> None:
            raise KeyError(number)

        async with asyncio.TaskGroup() as tasks:
            for number in range(2):
                tasks.create_task(fail(number))

    @rpc()
    def exits_when_read(self) -> ExitsWhenRead:
        return ExitsWhenRead()

    @rpc()
    async def on_loop(self) -> int:
        return 1

    @rpc()
    async def own_loop(self) -> Any:
        return RoleGroup("svc")[current_worker().actor_info.rank].call("on_loop").result()

    @rpc()
    def back(self, rank: int) -> Any:
        return RoleGroup("svc")[rank].call("on_loop").result()

    @rpc()
    async def through_another(self) -> Any:
        rank = current_worker().actor_info.rank
        return RoleGroup("svc")[(rank + 1) % 4].call("back", rank).result()


def told(act: Callable[[], Any]) -> str:
    """Return what came of a call, in words."""
    try:
        return f"{act()!r}"
    except Exception as error:
        members = [repr(each) for each in error.exceptions] if isinstance(error, ExceptionGroup) else ""
        return f"{type(error).__name__}: {error} {members} {getattr(error, '__notes__', '')}"


def caller() -> None:
    """Make every odd call once, and put what ends the cycle of the pair: this again when the job has been resumed."""
    if not (folder() / "told.json").exists():
        write("told.json", json.dumps(odd_calls(RoleGroup("svc")[0])))
    while not (folder() / "unblock").exists():
        time.sleep(0.1)
    queue: DataQueue[Any] = DataQueue("of-1")
    queue.put("from a third")


def odd_calls(service: Any) -> dict[str, str]:
    """Return what came of each call; the last are made from a signal handler while the main thread sends."""
    names = ("stray_error", "stray_note", "group", "exits_when_read", "own_loop", "through_another")
    found = {name: told(lambda name=name: service.call(name).result(100)) for name in names}  # type: ignore[misc]
    from_handler: list[str] = []
    number = 0

    def on_signal(*_: Any) -> None:
        from_handler.append(told(lambda: service.call("echo", "from a handler").result(100)))

    signal.signal(signal.SIGUSR1, on_signal)
    is_done = threading.Event()

    def disturb() -> None:
        while not is_done.wait(0.002):
            os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=disturb, daemon=True)
    thread.start()
    end_at = time.monotonic() + 5
    while time.monotonic() < end_at:
        number += 1
        assert service.call("echo", bytes(200_000)).result(100) == bytes(200_000)
    is_done.set()
    thread.join()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    found["signals"] = f"{number} calls, {len(from_handler)} from the handler"
    found["handler"] = " | ".join(sorted(set(from_handler)))
    found["echo"] = told(lambda: service.call("echo", 1).result(100))
    return found


def pair() -> None:
    """Rank 0 puts into a full queue that rank 1 empties only after it has got from a queue that rank 0 fills later."""
    rank = current_worker().actor_info.rank
    queues: list[DataQueue[Any]] = [DataQueue(f"of-{each}", size=1, is_master=each == rank) for each in range(2)]
    queues[rank].put("own")
    queues[1 - rank].get(1)
    if rank == 0:
        queues[0].put("taken")
        queues[1].put("taken")
        queues[0].put("fills it")
        queues[0].put("waits")
    else:
        queues[1].get(1)
        queues[0].get(1)
        queues[1].get(1)
        queues[0].get(1)
