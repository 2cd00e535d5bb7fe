"""xoscar actors on the work of `benchmarks.bus.work`. Prints one JSON line a figure; see benchmarks/README.md."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import psutil
import xoscar

from benchmarks.bus import work


class Echo(xoscar.Actor):
    def nop(self) -> None:
        return None

    def nbytes_of(self, array: Any) -> int:
        return int(array.nbytes)

    def make(self, nbytes: int) -> Any:
        return np.ones(nbytes, np.uint8)


class Caller(xoscar.Actor):
    async def burst(self, target: Any, calls: int) -> int:
        for _ in range(calls // work.BURST):
            await asyncio.gather(*[target.nop() for _ in range(work.BURST)])
        return calls


async def main() -> None:
    pool, workers = await start()
    if work.wanted("sync_p50", "sync_p99", "async_1_1", "async_2_2"):
        await calls(pool, workers)
    await arrays(workers)
    pss, rss = work.memory_mib(child.pid for child in psutil.Process().children(recursive=True))
    work.say("memory_end", pss)
    work.say("rss_children", rss)
    await pool.stop()


async def start() -> tuple[Any, list[Any]]:
    """A pool of processes, one actor in each: without a pool there is nothing to start an actor in."""
    readings = work.Readings()
    for attempt in range(work.STARTS):
        began = time.perf_counter()
        pool = await xoscar.create_actor_pool("127.0.0.1", n_process=work.WORKERS)
        await pool.start()
        workers = [await actor(pool, Echo, f"echo-{index}", index) for index in range(work.WORKERS)]
        for worker in workers:
            await worker.nop()
        readings.add(time.perf_counter() - began)
        if attempt < work.STARTS - 1:
            await pool.stop()
    work.say("start_4_workers", readings.median)
    return pool, workers


async def actor(pool: Any, kind: type, name: str, index: int) -> Any:
    place = xoscar.allocate_strategy.ProcessIndex(index + 1)
    return await xoscar.create_actor(kind, address=pool.external_address, uid=name, allocate_strategy=place)


async def calls(pool: Any, workers: list[Any]) -> None:
    echo = workers[0]
    for _ in range(work.WARM_UP_CALLS):
        await echo.nop()
    taken = []
    for _ in range(work.SYNC_CALLS):
        began = time.perf_counter()
        await echo.nop()
        taken.append(time.perf_counter() - began)
    p50, p99 = work.percentiles_us(taken)
    work.say("sync_p50", p50)
    work.say("sync_p99", p99)
    readings = work.Readings()
    for _ in readings:
        began = time.perf_counter()
        for _ in range(work.PIPELINED_CALLS // work.BURST):
            await asyncio.gather(*[echo.nop() for _ in range(work.BURST)])
        readings.add(work.PIPELINED_CALLS / (time.perf_counter() - began))
    work.say("async_1_1", readings.median)
    callers = [await actor(pool, Caller, f"caller-{index}", index + 2) for index in range(2)]
    pairs = list(zip(callers, workers[:2], strict=True))
    await asyncio.gather(*[caller.burst(target, work.BURST) for caller, target in pairs])
    readings = work.Readings()
    for _ in readings:
        began = time.perf_counter()
        await asyncio.gather(*[caller.burst(target, work.PIPELINED_CALLS // 2) for caller, target in pairs])
        readings.add(work.PIPELINED_CALLS / (time.perf_counter() - began))
    work.say("async_2_2", readings.median)


async def arrays(workers: list[Any]) -> None:
    echo = workers[0]
    for each in work.array_passes():
        array = np.ones(each.mib * work.MIB, np.uint8)
        await say_array("arg", each, partial(echo.nbytes_of, array))
        await say_array("ret", each, partial(echo.make, each.mib * work.MIB))
    if work.wanted("fanout"):
        array = np.ones(work.FANOUT_MIB * work.MIB, np.uint8)
        await asyncio.gather(*[worker.nbytes_of(array) for worker in workers])
        readings = work.Readings()
        for _ in readings:
            began = time.perf_counter()
            for _ in range(work.FANOUT_TIMES):
                await asyncio.gather(*[worker.nbytes_of(array) for worker in workers])
            times = work.FANOUT_TIMES * len(workers)
            readings.add(work.gib_per_s(work.FANOUT_MIB, times, time.perf_counter() - began))
        work.say("fanout", readings.median)


async def say_array(way: str, each: work.ArrayPass, call: Callable[[], Any]) -> None:
    """As the others do with `ArrayPass.read`, which cannot await."""

    async def take() -> float:
        began = time.perf_counter()
        for _ in range(each.times):
            await call()
        return work.gib_per_s(each.mib, each.times, time.perf_counter() - began)

    name = f"{way}_{each.mib}MiB"
    if not each.is_again:
        await call()
        if each.mib in work.LARGE:
            work.say(name, await take())
            return
    readings = work.Readings()
    for _ in readings:
        readings.add(await take())
    work.say(f"{name}_warm" if each.is_again else name, readings.median)


if __name__ == "__main__":
    asyncio.run(main())
