"""What runs inside our own workers when `bus.py` measures: the work of `bus_work`, through the public API alone."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bus import work
from unified import RoleActor, RoleGroup, current_worker, rpc, shared_empty
from unified.client.daemons import marked_processes
from unified.client.embedded import CLUSTER_VARIABLE

WAIT_S = 60.0


def wanted(*names: str) -> bool:
    return work.wanted(*names, rows=current_worker().job_info.user_config.rows)


class Echo:
    def __init__(self) -> None:
        if current_worker().actor_info.rank == 0 and wanted("queue_single", "queue_batch100"):
            from unified.api.runtime import DataQueue

            self.queue = DataQueue[bytes]("bench", is_master=True, size=10_000)

    @rpc
    def nop(self) -> None:
        return None

    @rpc(inline=True)
    def nop_inline(self) -> None:
        return None

    @rpc
    def nbytes_of(self, array: Any) -> int:
        return int(array.nbytes)

    @rpc
    def make(self, nbytes: int) -> Any:
        return np.ones(nbytes, np.uint8)

    @rpc
    def make_shared(self, nbytes: int) -> Any:
        return shared_ones(nbytes)


def shared_ones(nbytes: int) -> Any:
    array = shared_empty(nbytes, "uint8")
    array.fill(1)
    return array


class Caller:
    """A second and a third process that call. Their main threads compute in Python while they are told to."""

    def __init__(self) -> None:
        self.is_told = threading.Event()

    def run(self) -> None:
        while True:
            self.is_told.wait()
            while self.is_told.is_set():
                for _ in range(1000):
                    pass

    @rpc
    def compute(self, switch_s: float | None) -> None:
        if switch_s is not None:
            sys.setswitchinterval(switch_s)
        self.is_told.set()

    @rpc
    def rest(self) -> None:
        self.is_told.clear()

    @rpc
    def nop(self) -> None:
        return None

    @rpc
    def burst(self, rank: int, calls: int, method: str) -> int:
        pipeline(RoleGroup("echo")[rank], calls, method)
        return calls


class Bench:
    """The driver role: it measures, writes one JSON line a figure into the file it was given, and so ends the job."""

    def __init__(self) -> None:
        self.file = Path(current_worker().job_info.user_config.out)

    def run(self) -> None:
        self.echo = RoleGroup("echo")
        self.echo.call("nop").result(WAIT_S)
        for part in (self.calls, self.arrays, self.shared_arrays, self.fan_out, self.queue, self.busy, self.memory):
            try:
                part()
            except Exception:  # the other parts are worth having
                self.write({"error": f"{part.__name__}: {traceback.format_exc()}"})

    def say(self, name: str, value: float) -> None:
        self.write({"name": name, "value": value})

    def write(self, line: dict[str, Any]) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def calls(self) -> None:
        for prefix, method in (("", "nop"), ("inline_", "nop_inline")):
            if wanted("sync_p50", "sync_p99"):
                p50, p99 = work.latency_us(partial(call, self.echo[0], method))
                self.say(f"{prefix}sync_p50", p50)
                self.say(f"{prefix}sync_p99", p99)
            if wanted("async_1_1"):
                pipeline(self.echo[0], work.BURST, method)
                self.say(f"{prefix}async_1_1", work.pipelined(partial(pipeline, self.echo[0], work.BURST, method)))
            if wanted("async_2_2"):
                RoleGroup("caller").call("burst", 0, work.BURST, method).result(WAIT_S)
                self.say(f"{prefix}async_2_2", work.read(partial(self.two_to_two, method)))

    def two_to_two(self, method: str) -> float:
        each = work.PIPELINED_CALLS // 2
        callers = RoleGroup("caller")
        call = partial(callers.call, "burst", [0, 1], [each, each], [method, method], _scatter=True)
        return work.PIPELINED_CALLS / work.seconds(lambda: call().result(WAIT_S))

    def arrays(self) -> None:
        echo = self.echo[0]
        for each in work.array_passes(current_worker().job_info.user_config.rows):
            array = np.ones(each.mib * work.MIB, np.uint8)
            for way, act in (
                ("arg", partial(ask, echo, "nbytes_of", array)),
                ("ret", partial(ask, echo, "make", each.mib * work.MIB)),
            ):
                self.say(*each.read(way, act))

    def shared_arrays(self) -> None:
        echo = self.echo[0]
        for mib in work.LARGE:
            if not wanted(f"arg_{mib}MiB_shared", f"ret_{mib}MiB_shared"):
                continue
            nbytes, times = mib * work.MIB, work.ARRAYS[mib]

            def send(nbytes: int = nbytes) -> None:
                ask(echo, "nbytes_of", shared_ones(nbytes))

            self.rate(f"arg_{mib}MiB_shared", mib, times, send)
            self.rate(f"ret_{mib}MiB_shared", mib, times, partial(ask, echo, "make_shared", nbytes))

    def fan_out(self) -> None:
        if wanted("fanout"):
            array = np.ones(work.FANOUT_MIB * work.MIB, np.uint8)
            self.say("fanout", work.fan_out(partial(ask, self.echo, "nbytes_of", array)))

    def rate(self, name: str, mib: int, times: int, call: Callable[[], Any]) -> None:
        call()
        self.say(name, work.read(lambda: work.gib_per_s(mib, times, work.seconds(call, times))))

    def queue(self) -> None:
        if not wanted("queue_single", "queue_batch100"):
            return
        from unified.api.runtime import DataQueue

        queue = DataQueue[bytes]("bench")
        queue.put(work.QUEUE_ITEM)
        queue.get(1)

        def batches() -> None:
            items = [work.QUEUE_ITEM] * work.QUEUE_BATCH
            for _ in range(work.QUEUE_BATCHES):
                queue.put(*items)
            got = sum(len(queue.get(work.QUEUE_BATCH)) for _ in range(work.QUEUE_BATCHES))
            if got != work.QUEUE_BATCHES * work.QUEUE_BATCH:
                raise AssertionError(f"{got} items came out")

        self.say("queue_single", work.queue_single(lambda: queue.put(work.QUEUE_ITEM), lambda: queue.get(1)))
        self.say("queue_batch100", work.queue_batches(batches))

    def busy(self) -> None:
        """Calls to a worker whose main thread computes."""
        if not wanted(*work.BUSY):
            return
        worker = RoleGroup("caller")[0]
        for name, switch_s in (("busy", None), ("busy_5ms", work.PYTHONS_SWITCH_S)):
            worker.call("compute", switch_s).result(WAIT_S)
            p50, p99 = work.latency_us(partial(call, worker, "nop"))
            self.say(f"{name}_p50", p50)
            self.say(f"{name}_p99", p99)
        worker.call("rest").result(WAIT_S)

    def memory(self) -> None:
        """Of all processes of the cluster but this one, which stands where the peers' driver is."""
        marked = marked_processes(f"{CLUSTER_VARIABLE}={os.environ[CLUSTER_VARIABLE]}")
        pss, rss = work.memory_mib(process.pid for process in marked if process.pid != os.getpid())
        self.say("memory_end", pss)
        self.say("rss_children", rss)


def call(actor: RoleActor, method: str) -> Any:
    return actor.call(method).result()


def ask(whom: RoleActor | RoleGroup, method: str, argument: Any) -> Any:
    return whom.call(method, argument).result(WAIT_S)


def pipeline(actor: RoleActor, calls: int, method: str) -> None:
    for _ in range(calls // work.BURST):
        for future in [actor.call(method) for _ in range(work.BURST)]:
            future.result()


class Starter:
    """One of the workers whose start is timed; rank 0 asks all of them, itself too, and writes down when."""

    @rpc
    def nop(self) -> None:
        return None

    def run(self) -> None:
        worker = current_worker()
        if worker.actor_info.rank == 0:
            RoleGroup("starter").call("nop").result(WAIT_S)
            Path(worker.job_info.user_config.out).write_text(repr(time.time()))
