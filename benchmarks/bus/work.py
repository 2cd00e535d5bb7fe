"""The work that every contender does, and the names its figures have. Nothing here but the standard library: the
peers' own environments import it too.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

MIB = 1 << 20
WARM_UP_CALLS = 200
SYNC_CALLS = 2_000
BURST = 1_000
PIPELINED_CALLS = 10_000
ARRAYS = {1: 50, 64: 5, 256: 5}
"""MiB of an array, to how often it is sent in one reading."""
FANOUT_MIB = 64
FANOUT_TIMES = 3
WORKERS = 4
STARTS = 3
QUEUE_ITEM = b"x" * 1024
QUEUE_SINGLE = 500
QUEUE_BATCH = 100
QUEUE_BATCHES = 20
PYTHONS_SWITCH_S = 0.005
"""`sys.getswitchinterval()` where nobody has set it."""
SETTLE_S = 13.0
"""Between the start of a runtime and the first reading, so that what it prepares in the background is there. The last
of ours is what a zygote imports when it has waited for `unified.worker.zygote.SPARE_S`."""
FEWEST_READINGS = 3
STEADY_S = 1.0
"""Readings are taken until this time has passed, and the median counts: the first may meet memory that is new."""
MOST_READINGS = 9


class Row(NamedTuple):
    name: str
    title: str
    unit: str
    is_rate: bool
    """More is better."""
    plain: str = ""
    """Name of the row whose figure stands here for peers, which have no such thing."""


LARGE = [mib for mib in ARRAYS if mib > 1]
"""MiB of the arrays whose first reading, after one call, stands in a row of its own: that is what the drivers measure
with which the floors were set. Later ones meet memory that a runtime has got from the kernel meanwhile."""
BUSY = ["busy_p50", "busy_p99", "busy_5ms_p50", "busy_5ms_p99"]
"""What only ours is asked for: calls to a worker whose main thread computes in Python."""
ROWS = [
    Row("sync_p50", "sync call, median", "µs", False),
    Row("sync_p99", "sync call, p99", "µs", False),
    Row("async_1_1", "pipelined calls, 1 to 1", "calls/s", True),
    Row("async_2_2", "pipelined calls, 2 to 2", "calls/s", True),
    *(Row(f"arg_{mib}MiB", f"argument of {mib} MiB", "GiB/s", True) for mib in ARRAYS),
    *(Row(f"ret_{mib}MiB", f"result of {mib} MiB", "GiB/s", True) for mib in ARRAYS),
    *(
        Row(f"{way}_{mib}MiB_warm", f"{title} of {mib} MiB, after many", "GiB/s", True)
        for way, title in (("arg", "argument"), ("ret", "result"))
        for mib in LARGE
    ),
    *(
        Row(f"{way}_{mib}MiB_shared", f"{title} of {mib} MiB, in shared memory", "GiB/s", True, f"{way}_{mib}MiB_warm")
        for way, title in (("arg", "made argument"), ("ret", "result"))
        for mib in LARGE
    ),
    Row("fanout", f"{FANOUT_MIB} MiB to {WORKERS} workers", "GiB/s", True),
    Row("queue_single", "queue, one item a call", "items/s", True),
    Row("queue_batch100", f"queue, {QUEUE_BATCH} items a call", "items/s", True),
    Row("busy_p50", "sync call to a worker that computes in Python, median", "µs", False),
    Row("busy_p99", "the same, p99", "µs", False),
    Row("busy_5ms_p50", "the same with Python's own switch interval, median", "µs", False),
    Row("busy_5ms_p99", "the same with Python's own switch interval, p99", "µs", False),
    Row("start_4_workers", f"start of {WORKERS} workers", "s", False),
    Row("memory_idle", "memory of the runtime, idle (PSS)", "MiB", False),
    Row("memory_end", "memory with workers, at the end (PSS)", "MiB", False),
    Row("rss_children", "the same, resident sizes added up", "MiB", False),
]
NAMES = [row.name for row in ROWS]


class Readings:
    """Takes a reading again until enough time went into it: ``for _ in readings: …; readings.add(value)``."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def __iter__(self) -> Iterator[int]:
        began = time.perf_counter()
        while len(self.values) < FEWEST_READINGS or (
            time.perf_counter() - began < STEADY_S and len(self.values) < MOST_READINGS
        ):
            yield len(self.values)

    def add(self, value: float) -> None:
        self.values.append(value)

    @property
    def median(self) -> float:
        return statistics.median(self.values)


def read(take: Callable[[], float]) -> float:
    """The median of as many readings as it takes to be steady."""
    readings = Readings()
    for _ in readings:
        readings.add(take())
    return readings.median


def seconds(act: Callable[[], object], times: int = 1) -> float:
    """What so many calls take, one after the other."""
    began = time.perf_counter()
    for _ in range(times):
        act()
    return time.perf_counter() - began


def latency_us(call: Callable[[], object]) -> tuple[float, float]:
    """The median and the 99th percentile of many calls, after others that warm up."""
    seconds(call, WARM_UP_CALLS)
    return percentiles_us(seconds(call) for _ in range(SYNC_CALLS))


def pipelined(burst: Callable[[], object]) -> float:
    """Calls a second of `burst`, which makes `BURST` of them."""
    return read(lambda: PIPELINED_CALLS / seconds(burst, PIPELINED_CALLS // BURST))


def fan_out(send: Callable[[], object]) -> float:
    """GiB/s of one array to all workers."""
    send()
    mib = FANOUT_MIB * WORKERS
    return read(lambda: gib_per_s(mib, FANOUT_TIMES, seconds(send, FANOUT_TIMES)))


def queue_single(put: Callable[[], object], get: Callable[[], object]) -> float:
    """Items a second, one a call."""
    return read(lambda: QUEUE_SINGLE / (seconds(put, QUEUE_SINGLE) + seconds(get, QUEUE_SINGLE)))


def queue_batches(act: Callable[[], object]) -> float:
    """Items a second of `act`, which puts and gets `QUEUE_BATCHES` batches."""
    return read(lambda: QUEUE_BATCHES * QUEUE_BATCH / seconds(act))


def array_rows(mib: int) -> list[str]:
    plain = [f"arg_{mib}MiB", f"ret_{mib}MiB"]
    return [*plain, *(f"{name}_warm" for name in plain if mib in LARGE)]


class ArrayPass(NamedTuple):
    """Arrays of one size as arguments, and then as results."""

    mib: int
    times: int
    is_again: bool
    """All have been sent before, so no call is needed to warm up, and the readings are those "after many"."""

    def read(self, way: str, call: Callable[[], object]) -> tuple[str, float]:
        """The row that `way` ("arg" or "ret") gives, and its figure."""

        def take() -> float:
            return gib_per_s(self.mib, self.times, seconds(call, self.times))

        name = f"{way}_{self.mib}MiB"
        if not self.is_again:
            call()
        if self.is_again:
            return f"{name}_warm", read(take)
        return name, take() if self.mib in LARGE else read(take)


def array_passes(rows: Sequence[str] | None = None) -> list[ArrayPass]:
    """In which order arrays are sent: all sizes as the drivers do with which the floors were set (see `LARGE`), and
    then the large ones many times more."""
    sizes = [(mib, times) for mib, times in ARRAYS.items() if wanted(*array_rows(mib), rows=rows)]
    passes = [ArrayPass(mib, times, False) for mib, times in sizes]
    return passes + [ArrayPass(mib, times, True) for mib, times in sizes if mib in LARGE]


def percentiles_us(seconds: Iterable[float]) -> tuple[float, float]:
    ordered = sorted(seconds)
    return ordered[len(ordered) // 2] * 1e6, ordered[len(ordered) * 99 // 100] * 1e6


def wanted(*names: str, rows: Sequence[str] | None = None) -> bool:
    """Whether one of these figures is among the rows asked for: on the command line, unless given. No rows mean all."""
    asked = sys.argv[1:] if rows is None else rows
    return not asked or not set(names).isdisjoint(asked)


def gib_per_s(mib: int, times: int, seconds: float) -> float:
    return mib * times / 1024 / seconds


def say(name: str, value: float) -> None:
    """One figure, as a line that the parent reads."""
    print(json.dumps({"name": name, "value": value}), flush=True)


def pss_mib(pid: int) -> float:
    """Proportional set size: memory that n processes share counts 1/n in each."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def rss_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), 0) / 1024


def memory_mib(pids: Iterable[int]) -> tuple[float, float]:
    """PSS and resident sizes of processes, each added up; one that has ended meanwhile counts nothing."""
    pss = rss = 0.0
    for pid in pids:
        try:
            pss, rss = pss + pss_mib(pid), rss + rss_mib(pid)
        except (OSError, StopIteration):
            continue
    return pss, rss
