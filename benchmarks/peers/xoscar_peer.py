"""xoscar actors on the work of `benchmarks.bus.work`. Prints one JSON line a figure; see benchmarks/README.md."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
import psutil
import xoscar

from benchmarks.bus import work

Act = Callable[[], Awaitable[object]]


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


async def seconds(act: Act, times: int = 1) -> float:
    """As `work.seconds`, which cannot await."""
    began = time.perf_counter()
    for _ in range(times):
        await act()
    return time.perf_counter() - began


async def rate(amount: float, act: Act, times: int = 1) -> float:
    """The median of readings: so much a second, in so many calls."""
    readings = work.Readings()
    for _ in readings:
        readings.add(amount / await seconds(act, times))
    return readings.median


async def calls(pool: Any, workers: list[Any]) -> None:
    echo = workers[0]
    await seconds(echo.nop, work.WARM_UP_CALLS)
    p50, p99 = work.percentiles_us([await seconds(echo.nop) for _ in range(work.SYNC_CALLS)])
    work.say("sync_p50", p50)
    work.say("sync_p99", p99)

    async def burst() -> None:
        await asyncio.gather(*[echo.nop() for _ in range(work.BURST)])

    work.say("async_1_1", await rate(work.PIPELINED_CALLS, burst, work.PIPELINED_CALLS // work.BURST))
    callers = [await actor(pool, Caller, f"caller-{index}", index + 2) for index in range(2)]

    async def two_to_two(calls: int = work.PIPELINED_CALLS // 2) -> None:
        await asyncio.gather(*[each.burst(target, calls) for each, target in zip(callers, workers, strict=False)])

    await two_to_two(work.BURST)
    work.say("async_2_2", await rate(work.PIPELINED_CALLS, two_to_two))


async def arrays(workers: list[Any]) -> None:
    echo = workers[0]
    for each in work.array_passes():
        array = np.ones(each.mib * work.MIB, np.uint8)
        await say_array("arg", each, partial(echo.nbytes_of, array))
        await say_array("ret", each, partial(echo.make, each.mib * work.MIB))
    if work.wanted("fanout"):
        array = np.ones(work.FANOUT_MIB * work.MIB, np.uint8)

        async def fan_out() -> None:
            await asyncio.gather(*[worker.nbytes_of(array) for worker in workers])

        await fan_out()
        gib = work.FANOUT_MIB * work.FANOUT_TIMES * len(workers) / 1024
        work.say("fanout", await rate(gib, fan_out, work.FANOUT_TIMES))


async def say_array(way: str, each: work.ArrayPass, call: Act) -> None:
    """As the others do with `ArrayPass.read`, which cannot await."""
    name = f"{way}_{each.mib}MiB"
    gib = each.mib * each.times / 1024
    if not each.is_again:
        await call()
        if each.mib in work.LARGE:
            work.say(name, gib / await seconds(call, each.times))
            return
    work.say(f"{name}_warm" if each.is_again else name, await rate(gib, call, each.times))


if __name__ == "__main__":
    asyncio.run(main())
