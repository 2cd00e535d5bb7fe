"""Monarch actors on the work of `benchmarks.bus.work`. Prints one JSON line a figure; see benchmarks/README.md."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import psutil
from monarch.actor import Actor, endpoint, this_host

from benchmarks.bus import work


class Echo(Actor):
    @endpoint
    def nop(self) -> None:
        return None

    @endpoint
    def nbytes_of(self, array: Any) -> int:
        return int(array.nbytes)

    @endpoint
    def make(self, nbytes: int) -> Any:
        return np.ones(nbytes, np.uint8)


class Caller(Actor):
    @endpoint
    async def burst(self, target: Any, calls: int) -> int:
        for _ in range(calls // work.BURST):
            await asyncio.gather(*[target.nop.call_one() for _ in range(work.BURST)])
        return calls


def main() -> None:
    processes, mesh = start()
    workers = [mesh.slice(gpus=index) for index in range(work.WORKERS)]
    if work.wanted("sync_p50", "sync_p99", "async_1_1", "async_2_2"):
        calls(processes, workers)
    arrays(mesh, workers[0])
    pss, rss = work.memory_mib(child.pid for child in psutil.Process().children(recursive=True))
    work.say("memory_end", pss)
    work.say("rss_children", rss)
    processes.stop().get()


def start() -> tuple[Any, Any]:
    readings = work.Readings()
    for attempt in range(work.STARTS):
        began = time.perf_counter()
        processes = this_host().spawn_procs(per_host={"gpus": work.WORKERS})
        mesh = processes.spawn("echo", Echo)
        mesh.nop.call().get()
        readings.add(time.perf_counter() - began)
        if attempt < work.STARTS - 1:
            processes.stop().get()
    work.say("start_4_workers", readings.median)
    return processes, mesh


def calls(processes: Any, workers: list[Any]) -> None:
    echo = workers[0]
    p50, p99 = work.latency_us(lambda: echo.nop.call_one().get())
    work.say("sync_p50", p50)
    work.say("sync_p99", p99)

    def burst() -> None:
        for future in [echo.nop.call_one() for _ in range(work.BURST)]:
            future.get()

    work.say("async_1_1", work.pipelined(burst))
    mesh = processes.spawn("caller", Caller)
    pairs = [(mesh.slice(gpus=index + 2), workers[index]) for index in range(2)]

    def two_to_two(calls: int = work.PIPELINED_CALLS // 2) -> None:
        for future in [caller.burst.call_one(target, calls) for caller, target in pairs]:
            future.get()

    two_to_two(work.BURST)
    work.say("async_2_2", work.read(lambda: work.PIPELINED_CALLS / work.seconds(two_to_two)))


def arrays(mesh: Any, echo: Any) -> None:
    for each in work.array_passes():
        array = np.ones(each.mib * work.MIB, np.uint8)
        work.say(*each.read("arg", lambda array=array: echo.nbytes_of.call_one(array).get()))  # type: ignore[misc]
        work.say(*each.read("ret", lambda mib=each.mib: echo.make.call_one(mib * work.MIB).get()))  # type: ignore[misc]
    array = np.ones(work.FANOUT_MIB * work.MIB, np.uint8)
    if work.wanted("fanout"):
        work.say("fanout", work.fan_out(lambda: mesh.nbytes_of.call(array).get()))


if __name__ == "__main__":
    main()
