"""The work that every contender of `benchmarks/rl/run.py` does. Nothing here but numpy and the standard library: Ray's
environment imports it too.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.bus.work import WARM_UP_CALLS, Row, gib_per_s, percentiles_us, read, seconds, wanted

ARRAYS = 64
MIB = 1 << 20
DICTIONARIES = 5
"""How many of them are one reading, which is their median. Two come before."""
IN_FLIGHT = 32
ACTOR_THREADS = 256
"""Requests that a worker of an engine passes on at a time; Ray's actor gets as many."""
WAIT_S = 120.0
QUESTION = {"text": "The answer to life, the universe and everything is 42. " * 8}
ANSWER = {"score": 1.0}
JUDGE = Path(__file__).with_name("judge.py")

ROWS = [
    Row("queue", f"dictionary of {ARRAYS} arrays put and got", "GiB/s", True),
    Row("queue_read", "dictionary put, got and summed", "GiB/s", True),
    Row("queue_first", "the first dictionary put and got", "GiB/s", True),
    Row("argument", "dictionary as an argument", "GiB/s", True),
    Row("argument_read", "dictionary as an argument, summed", "GiB/s", True),
    Row("call_p50", "call to an engine, median", "µs", False),
    Row("call_p99", "call to an engine, p99", "µs", False),
    Row("calls", f"calls to an engine, {IN_FLIGHT} in flight", "/s", True),
    Row("start", "start of workers that import", "s", False),
    Row("start_preload", "the same, the job has a `preload`", "s", False, "start"),
    Row("start_agent", "the same, an agent with `--preload`", "s", False, "start"),
]
NAMES = [row.name for row in ROWS]
DICTIONARY = [row.name for row in ROWS if row.unit == "GiB/s"]
CALLS = ["call_p50", "call_p99", "calls"]
STARTS = ["start", "start_preload", "start_agent"]
Call = Callable[[], object]


class Sizes(NamedTuple):
    """How much of everything there is."""

    mib: int = 1024
    """Of one dictionary."""
    calls: int = 2000
    workers: int = 8
    imports: str = "transformers.Trainer,transformers.AutoModelForCausalLM"
    settle_s: float = 13.0
    """As `benchmarks.bus.work.SETTLE_S`."""

    @classmethod
    def of(cls, text: str) -> Sizes:
        return cls(**json.loads(text))

    def text(self) -> str:
        return json.dumps(self._asdict())


def of_command_line() -> tuple[Sizes, list[str]]:
    """Return the sizes and the rows that a contender's program was given."""
    return Sizes.of(sys.argv[1]), sys.argv[2:]


def dictionary(mib: int) -> dict[str, Any]:
    """Return float32 arrays of one size, filled so that a sum tells them apart and is exact."""
    items = mib * MIB // ARRAYS // 4
    return {f"layers.{number}": np.full(items, _value(number), np.float32) for number in range(ARRAYS)}


def check(arrays: dict[str, Any], mib: int, is_read: bool) -> None:
    """Look at a dictionary that came; if it shall be read, at each byte of it."""
    if len(arrays) != ARRAYS:
        raise AssertionError(f"{len(arrays)} arrays came")
    items = mib * MIB // ARRAYS // 4
    for number, array in enumerate(arrays.values()):
        found = array.sum() if is_read else array[-1] * items
        if found != _value(number) * items:
            raise AssertionError(f"array {number} is {found}")


def _value(number: int) -> float:
    return float(1 << number % 4)


def dictionary_rows(
    sizes: Sizes, rows: list[str], ways: dict[str, Callable[[bool], object]]
) -> Iterator[tuple[str, float]]:
    """Time how a dictionary gets to another worker.

    Args:
        ways: by the name of a row, what sends one and returns when the other worker has it, or has summed it.
    """
    for way, send in ways.items():
        if not wanted(way, f"{way}_read", f"{way}_first", rows=rows):
            continue
        first_s = seconds(partial(send, False))
        if f"{way}_first" in NAMES:  # of the first way alone, which meets memory that is new
            yield f"{way}_first", gib_per_s(sizes.mib, 1, first_s)
        send(False)
        for row, is_read in ((way, False), (f"{way}_read", True)):
            if wanted(row, rows=rows):
                taken_s = [seconds(partial(send, is_read)) for _ in range(DICTIONARIES)]
                yield row, gib_per_s(sizes.mib, 1, statistics.median(taken_s))


def call_rows(
    sizes: Sizes, rows: list[str], begin: Callable[[], Any], end: Callable[[Any], object]
) -> Iterator[tuple[str, float]]:
    """Time calls to an engine.

    Args:
        begin: makes a call, and does not wait for it.
        end: waits for the answer of one.
    """
    if not wanted(*CALLS, rows=rows):
        return

    def one() -> None:
        check_answer(end(begin()))

    seconds(one, min(WARM_UP_CALLS, sizes.calls))
    if wanted("call_p50", "call_p99", rows=rows):
        p50, p99 = percentiles_us(seconds(one) for _ in range(sizes.calls))
        yield "call_p50", p50
        yield "call_p99", p99
    if wanted("calls", rows=rows):
        yield "calls", read(lambda: sizes.calls / seconds(lambda: in_flight(sizes.calls, begin, end)))


def in_flight(calls: int, begin: Callable[[], Any], end: Callable[[Any], object]) -> None:
    """Make calls so that as many as `IN_FLIGHT` are open, until the last ones."""
    window = deque(begin() for _ in range(min(IN_FLIGHT, calls)))
    for _ in range(calls - len(window)):
        check_answer(end(window.popleft()))
        window.append(begin())
    for each in window:
        check_answer(end(each))


def check_answer(answer: object) -> None:
    if answer != ANSWER:
        raise AssertionError(f"the engine answered {answer!r}")


def import_all(names: str) -> float:
    """Import modules, and attributes of modules; return the seconds that this took."""
    began = time.perf_counter()
    for name in names.split(","):
        module, _, attribute = name.rpartition(".")
        getattr(importlib.import_module(module), attribute)
    return time.perf_counter() - began
