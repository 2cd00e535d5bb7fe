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
    def nop(self) -> None:
        return None

    def nbytes_of(self, array: Any) -> int:
        return int(array.nbytes)

    def make(self, nbytes: int) -> Any:
        return np.ones(nbytes, np.uint8)


@ray.remote(num_cpus=0)
class Caller:
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
    p50, p99 = work.latency_us(lambda: ray.get(echo.nop.remote()))
    work.say("sync_p50", p50)
    work.say("sync_p99", p99)
    work.say("async_1_1", work.pipelined(lambda: ray.get([echo.nop.remote() for _ in range(work.BURST)])))
    callers = [Caller.remote(worker) for worker in workers[:2]]  # type: ignore[attr-defined]

    def two_to_two(calls: int = work.PIPELINED_CALLS // 2) -> None:
        ray.get([caller.burst.remote(calls) for caller in callers])

    two_to_two(work.BURST)
    work.say("async_2_2", work.read(lambda: work.PIPELINED_CALLS / work.seconds(two_to_two)))


def arrays(workers: list[Any]) -> None:
    echo = workers[0]
    for each in work.array_passes():
        array = np.ones(each.mib * work.MIB, np.uint8)
        work.say(*each.read("arg", lambda array=array: ray.get(echo.nbytes_of.remote(array))))  # type: ignore[misc]
        work.say(*each.read("ret", lambda mib=each.mib: ray.get(echo.make.remote(mib * work.MIB))))  # type: ignore[misc]
    array = np.ones(work.FANOUT_MIB * work.MIB, np.uint8)

    def fan_out() -> None:
        shared = ray.put(array)  # once for all, which is Ray's own advice
        ray.get([worker.nbytes_of.remote(shared) for worker in workers])

    if work.wanted("fanout"):
        work.say("fanout", work.fan_out(fan_out))


def queue() -> None:
    channel = Queue(maxsize=10_000)
    channel.put(work.QUEUE_ITEM)
    channel.get()

    def batches() -> None:
        for _ in range(work.QUEUE_BATCHES):
            channel.put_nowait_batch([work.QUEUE_ITEM] * work.QUEUE_BATCH)
        for _ in range(work.QUEUE_BATCHES):
            channel.get_nowait_batch(work.QUEUE_BATCH)

    work.say("queue_single", work.queue_single(lambda: channel.put(work.QUEUE_ITEM), channel.get))
    work.say("queue_batch100", work.queue_batches(batches))


if __name__ == "__main__":
    main()
