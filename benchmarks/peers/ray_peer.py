"""Ray actors on the work of `benchmarks.bus.work`. Prints one JSON line a figure; see benchmarks/README.md."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import psutil
import ray
from ray.util.queue import Queue

from benchmarks.bus import work


@ray.remote(num_cpus=0)
class Echo:
    """What is called."""

    def nop(self) -> None:
        return None

    def nbytes_of(self, array: Any) -> int:
        return int(array.nbytes)

    def make(self, nbytes: int) -> Any:
        return np.ones(nbytes, np.uint8)


@ray.remote(num_cpus=0)
class Caller:
    """A second and a third process that call."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def burst(self, calls: int) -> int:
        for _ in range(calls // work.BURST):
            ray.get([self.target.nop.remote() for _ in range(work.BURST)])
        return calls


def main() -> None:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    time.sleep(work.SETTLE_S)
    work.say("memory_idle", work.memory_mib(own_processes())[0])
    workers = start()
    if work.wanted("sync_p50", "sync_p99", "async_1_1", "async_2_2"):
        calls(workers)
    arrays(workers)
    if work.wanted("queue_single", "queue_batch100"):
        queue()
    pss, rss = work.memory_mib(own_processes())
    work.say("memory_end", pss)
    work.say("rss_children", rss)
    ray.shutdown()


def own_processes() -> list[int]:
    return [child.pid for child in psutil.Process().children(recursive=True)]


def start() -> list[Any]:
    """Several times, because the first one is no typical one; the last workers stay."""
    readings = work.Readings()
    for attempt in range(work.STARTS):
        began = time.perf_counter()
        workers = [Echo.remote() for _ in range(work.WORKERS)]  # type: ignore[attr-defined]  # by ray.remote
        ray.get([worker.nop.remote() for worker in workers])
        readings.add(time.perf_counter() - began)
        if attempt < work.STARTS - 1:
            for worker in workers:
                ray.kill(worker)
            time.sleep(1.0)
    work.say("start_4_workers", readings.median)
    return workers


def calls(workers: list[Any]) -> None:
    echo = workers[0]
    for _ in range(work.WARM_UP_CALLS):
        ray.get(echo.nop.remote())
    taken = []
    for _ in range(work.SYNC_CALLS):
        began = time.perf_counter()
        ray.get(echo.nop.remote())
        taken.append(time.perf_counter() - began)
    p50, p99 = work.percentiles_us(taken)
    work.say("sync_p50", p50)
    work.say("sync_p99", p99)

    def pipelined() -> float:
        began = time.perf_counter()
        for _ in range(work.PIPELINED_CALLS // work.BURST):
            ray.get([echo.nop.remote() for _ in range(work.BURST)])
        return work.PIPELINED_CALLS / (time.perf_counter() - began)

    work.say("async_1_1", work.read(pipelined))
    callers = [Caller.remote(worker) for worker in workers[:2]]  # type: ignore[attr-defined]
    ray.get([caller.burst.remote(work.BURST) for caller in callers])

    def two_to_two() -> float:
        began = time.perf_counter()
        ray.get([caller.burst.remote(work.PIPELINED_CALLS // 2) for caller in callers])
        return work.PIPELINED_CALLS / (time.perf_counter() - began)

    work.say("async_2_2", work.read(two_to_two))


def arrays(workers: list[Any]) -> None:
    echo = workers[0]
    for each in work.array_passes():
        mib, times, is_again = each
        array = np.ones(mib * work.MIB, np.uint8)

        def argument(array: Any = array, mib: int = mib, times: int = times) -> float:
            began = time.perf_counter()
            for _ in range(times):
                ray.get(echo.nbytes_of.remote(array))
            return work.gib_per_s(mib, times, time.perf_counter() - began)

        def result(mib: int = mib, times: int = times) -> float:
            began = time.perf_counter()
            for _ in range(times):
                ray.get(echo.make.remote(mib * work.MIB))
            return work.gib_per_s(mib, times, time.perf_counter() - began)

        if not is_again:
            ray.get(echo.nbytes_of.remote(array))
        work.say(*each.read("arg", argument))
        if not is_again:
            ray.get(echo.make.remote(mib * work.MIB))
        work.say(*each.read("ret", result))
    array = np.ones(work.FANOUT_MIB * work.MIB, np.uint8)

    def fan_out() -> float:
        began = time.perf_counter()
        for _ in range(work.FANOUT_TIMES):
            shared = ray.put(array)  # once for all, which is Ray's own advice
            ray.get([worker.nbytes_of.remote(shared) for worker in workers])
        times = work.FANOUT_TIMES * len(workers)
        return work.gib_per_s(work.FANOUT_MIB, times, time.perf_counter() - began)

    if work.wanted("fanout"):
        fan_out()
        work.say("fanout", work.read(fan_out))


def queue() -> None:
    channel = Queue(maxsize=10_000)
    channel.put(work.QUEUE_ITEM)
    channel.get()

    def single() -> float:
        began = time.perf_counter()
        for _ in range(work.QUEUE_SINGLE):
            channel.put(work.QUEUE_ITEM)
        for _ in range(work.QUEUE_SINGLE):
            channel.get()
        return work.QUEUE_SINGLE / (time.perf_counter() - began)

    def batches() -> float:
        began = time.perf_counter()
        for _ in range(work.QUEUE_BATCHES):
            channel.put_nowait_batch([work.QUEUE_ITEM] * work.QUEUE_BATCH)
        for _ in range(work.QUEUE_BATCHES):
            channel.get_nowait_batch(work.QUEUE_BATCH)
        return work.QUEUE_BATCHES * work.QUEUE_BATCH / (time.perf_counter() - began)

    work.say("queue_single", work.read(single))
    work.say("queue_batch100", work.read(batches))


if __name__ == "__main__":
    main()
