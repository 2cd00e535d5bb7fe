"""What no runtime can beat at the work of `benchmarks/rl/run.py`: a copy, a request, and processes that only import.

bare.py SIZES [ROW …]
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.bus.work import say, wanted
from benchmarks.rl import work
from benchmarks.rl.http_judge import HttpJudge
from unified.tensors.copy import Copy, copy_memory, num_cores
from unified.worker.fork_setup import keep_freed

ROOT = Path(__file__).parents[2]
IMPORT = "import sys; from benchmarks.rl.work import import_all; import_all(sys.argv[1]); print(flush=True); input()"


def main() -> None:
    sizes, rows = work.of_command_line()
    keep_freed(os.environ)
    if wanted(*work.DICTIONARY, rows=rows):
        for name, value in work.dictionary_rows(sizes, rows, {"queue": copier(sizes), "argument": copier(sizes)}):
            say(name, value)
    if wanted(*work.CALLS, rows=rows):
        for name, value in call_rows(sizes, rows):
            say(name, value)
    if wanted(*work.STARTS, rows=rows):
        say("start", start(sizes))


def call_rows(sizes: work.Sizes, rows: list[str]) -> Iterator[tuple[str, float]]:
    """Send requests from this process to the engine itself, those in flight from threads."""
    judge = HttpJudge()
    try:
        if wanted("call_p50", "call_p99", rows=rows):
            yield from work.call_rows(sizes, ["call_p50", "call_p99"], judge.score, lambda answer: answer)
        if wanted("calls", rows=rows):
            with ThreadPoolExecutor(work.IN_FLIGHT) as pool:
                yield from work.call_rows(
                    sizes, ["calls"], lambda: pool.submit(judge.score), lambda call: call.result()
                )
    finally:
        judge.close()


def copier(sizes: work.Sizes) -> Callable[[bool], None]:
    """Return what copies a dictionary to memory that is there from the second time on, with a thread a core."""
    source = work.dictionary(sizes.mib)
    target = np.empty(sizes.mib * work.MIB // 4, np.float32)
    parts = dict(zip(source, np.split(target, work.ARRAYS), strict=True))

    def copy(is_read: bool) -> None:
        copies = [Copy(parts[name].ctypes.data, array.ctypes.data, array.nbytes) for name, array in source.items()]
        copy_memory(copies, num_cores())
        work.check(parts, sizes.mib, is_read)

    return copy


def start(sizes: work.Sizes) -> float:
    """Return the seconds until as many new processes have imported the modules, all at once."""
    began = time.perf_counter()
    children = [
        subprocess.Popen(
            [sys.executable, "-c", IMPORT, sizes.imports],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for _ in range(sizes.workers)
    ]
    for child in children:
        assert child.stdout is not None
        if not child.stdout.readline():
            raise RuntimeError("a process ended before it had imported the modules")
    seconds = time.perf_counter() - began
    for child in children:
        child.communicate()
    return seconds


if __name__ == "__main__":
    main()
