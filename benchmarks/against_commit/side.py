"""One side of `run.py`: a cluster of one checkout, and a job on it that measures a row each time it is asked.

The Python that runs this file is the checkout's. Imported are numpy, torch and the public names of `unified` alone, for
the file runs beside earlier commits.

side.py FOLDER      names of rows on stdin; after each a line of JSON on stdout: figures by name, less is better
"""

from __future__ import annotations

import json
import os
import queue
import statistics
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unified import DLJobBuilder, RoleGroup, current_worker, rpc
from unified.checkpoint import CheckpointManager
from unified.testing import LocalCluster

FOLDER = "SIDE_FOLDER"
MIB = 1 << 20
SYNC_CALLS, BURST, BURSTS = 3000, 1000, 5
ARRAY_MIB, ARRAY_CALLS = 64, 5
STATE_MIB, NUM_TENSORS = 1024, 64
COPIED_S = 2.0
"""After a snapshot: the snapshot server has its copy, and nothing runs any more."""
WITHIN_S = 300.0


class Echo:
    @rpc
    def nop(self) -> None:
        return None

    @rpc
    def nbytes_of(self, array: Any) -> int:
        return int(array.nbytes)

    @rpc
    def make(self, nbytes: int) -> Any:
        return np.ones(nbytes, np.uint8)

    @rpc
    def cpu_s(self) -> float:
        return time.process_time()


class Bench:
    """Measures in its main thread, as a user's code calls and saves."""

    def __init__(self) -> None:
        self.rows: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.figures: queue.SimpleQueue[dict[str, float]] = queue.SimpleQueue()
        self.array = np.ones(ARRAY_MIB * MIB, np.uint8)
        self.steps = count(1)

    @rpc
    def measure(self, row: str) -> dict[str, float]:
        self.rows.put(row)
        return self.figures.get()

    def run(self) -> None:
        self.echo = RoleGroup("echo")[0]
        numel = STATE_MIB * MIB // 4 // NUM_TENSORS
        self.model = torch.nn.ParameterList([torch.ones(numel) for _ in range(NUM_TENSORS)])
        self.manager = CheckpointManager(os.environ[FOLDER], keep_last_n=1)
        while True:
            measure: Callable[[], dict[str, float]] = getattr(self, self.rows.get())
            self.figures.put(measure())

    def sync(self) -> dict[str, float]:
        times: list[float] = []
        cpu_s = self.cpu_s_of(lambda: times.extend(timed(self.nop) for _ in range(SYNC_CALLS)))
        return {"sync": 1e6 * statistics.median(times), "sync_cpu": 1e6 * cpu_s / SYNC_CALLS}

    def pipelined(self) -> dict[str, float]:
        times: list[float] = []
        cpu_s = self.cpu_s_of(lambda: times.extend(timed(self.burst) for _ in range(BURSTS)))
        return {
            "pipelined": 1e6 * statistics.median(times) / BURST,
            "pipelined_cpu": 1e6 * cpu_s / (BURSTS * BURST),
        }

    def arg(self) -> dict[str, float]:
        return {"arg": self.of_array(lambda: self.echo.call("nbytes_of", self.array).result())}

    def ret(self) -> dict[str, float]:
        return {"ret": self.of_array(lambda: self.echo.call("make", self.array.nbytes).result())}

    def snapshot(self) -> dict[str, float]:
        worker, step = current_worker(), next(self.steps)
        stall = timed(lambda: worker.snapshot({"model": self.model}, step))
        time.sleep(COPIED_S)
        return {"snapshot": 1e3 * stall}

    def save(self) -> dict[str, float]:
        step = next(self.steps)
        stall = timed(lambda: self.manager.save(self.model.state_dict(), step))
        self.manager.wait()
        os.sync()
        return {"save": 1e3 * stall}

    def nop(self) -> None:
        self.echo.call("nop").result()

    def burst(self) -> None:
        for future in [self.echo.call("nop") for _ in range(BURST)]:
            future.result()

    def of_array(self, call: Callable[[], Any]) -> float:
        """Return the median of some calls in ms. One before them warms up."""
        call()
        return 1e3 * statistics.median(timed(call) for _ in range(ARRAY_CALLS))

    def cpu_s_of(self, act: Callable[[], Any]) -> float:
        """Return the seconds of processor time of caller and callee together."""
        before = self.cpu_s()
        act()
        return self.cpu_s() - before

    def cpu_s(self) -> float:
        return time.process_time() + float(self.echo.call("cpu_s").result())


def timed(act: Callable[[], Any]) -> float:
    began = time.perf_counter()
    result = act()
    taken = time.perf_counter() - began
    del result
    return taken


def main(folder: Path) -> None:
    here = str(Path(__file__).parent)
    with LocalCluster(nodes=1, devices=1, home=folder / "cluster") as cluster:
        variables = {FOLDER: str(folder / "checkpoints"), "PYTHONPATH": here}
        builder: Any = DLJobBuilder().node_num(1).device_per_node(1).device_type("CPU").global_env(variables)
        builder = builder.role("bench").run("side.Bench").resource(cpu=0.01)
        job = builder.role("echo").run("side.Echo").resource(cpu=0.01).not_driver().build()
        handle = cluster.submit(job, "side", working_dir=here)
        for line in sys.stdin:
            figures = handle.call("bench-0", "measure", line.strip(), _timeout=WITHIN_S).result()
            print(json.dumps(figures), flush=True)
        handle.stop(force=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
