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
    """What is called; also calls another of its kind."""

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
    """A second and a third process that call."""

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
    for _ in range(work.WARM_UP_CALLS):
        echo.nop.call_one().get()
    taken = []
    for _ in range(work.SYNC_CALLS):
        began = time.perf_counter()
        echo.nop.call_one().get()
        taken.append(time.perf_counter() - began)
    p50, p99 = work.percentiles_us(taken)
    work.say("sync_p50", p50)
    work.say("sync_p99", p99)

    def pipelined() -> float:
        began = time.perf_counter()
        for _ in range(work.PIPELINED_CALLS // work.BURST):
            for future in [echo.nop.call_one() for _ in range(work.BURST)]:
                future.get()
        return work.PIPELINED_CALLS / (time.perf_counter() - began)

    work.say("async_1_1", work.read(pipelined))
    mesh = processes.spawn("caller", Caller)
    pairs = [(mesh.slice(gpus=index + 2), workers[index]) for index in range(2)]
    for future in [caller.burst.call_one(target, work.BURST) for caller, target in pairs]:
        future.get()

    def two_to_two() -> float:
        began = time.perf_counter()
        for future in [caller.burst.call_one(target, work.PIPELINED_CALLS // 2) for caller, target in pairs]:
            future.get()
        return work.PIPELINED_CALLS / (time.perf_counter() - began)

    work.say("async_2_2", work.read(two_to_two))


def arrays(mesh: Any, echo: Any) -> None:
    for each in work.array_passes():
        mib, times, is_again = each
        array = np.ones(mib * work.MIB, np.uint8)

        def argument(array: Any = array, mib: int = mib, times: int = times) -> float:
            began = time.perf_counter()
            for _ in range(times):
                echo.nbytes_of.call_one(array).get()
            return work.gib_per_s(mib, times, time.perf_counter() - began)

        def result(mib: int = mib, times: int = times) -> float:
            began = time.perf_counter()
            for _ in range(times):
                echo.make.call_one(mib * work.MIB).get()
            return work.gib_per_s(mib, times, time.perf_counter() - began)

        if not is_again:
            echo.nbytes_of.call_one(array).get()
        work.say(*each.read("arg", argument))
        if not is_again:
            echo.make.call_one(mib * work.MIB).get()
        work.say(*each.read("ret", result))
    array = np.ones(work.FANOUT_MIB * work.MIB, np.uint8)

    def fan_out() -> float:
        began = time.perf_counter()
        for _ in range(work.FANOUT_TIMES):
            mesh.nbytes_of.call(array).get()
        times = work.FANOUT_TIMES * work.WORKERS
        return work.gib_per_s(work.FANOUT_MIB, times, time.perf_counter() - began)

    if work.wanted("fanout"):
        fan_out()
        work.say("fanout", work.read(fan_out))


if __name__ == "__main__":
    main()
