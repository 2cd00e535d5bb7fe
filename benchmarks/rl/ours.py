"""Our own column of `benchmarks/rl/run.py`: real clusters on this host, and jobs on them."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.bus.ours import Figures
from benchmarks.bus.work import wanted
from benchmarks.rl import work
from unified.api.builder import DLJob, DLJobBuilder
from unified.client.embedded import EmbeddedCluster

JOB_S = 300.0


def measure(sizes: work.Sizes, rows: list[str]) -> Figures:
    """Return all figures of one round, whose clusters are new."""
    values: dict[str, float] = {}
    errors: list[str] = []
    with tempfile.TemporaryDirectory(prefix="unified-bench-") as name:
        folder = Path(name)
        if wanted(*set(work.NAMES) - {"start_agent"}, rows=rows):
            with cluster(sizes) as master:
                if wanted("start", rows=rows):
                    values["start"] = start(master, folder / "plain", sizes)
                if wanted("start_preload", rows=rows):
                    values["start_preload"] = start(master, folder / "preload", sizes, preload=True)
                for job, names in ((dictionary_job, work.DICTIONARY), (engine_job, work.CALLS)):
                    if wanted(*names, rows=rows):
                        out = folder / job.__name__
                        out.touch()
                        run(job(out, sizes, rows), master)
                        for line in map(json.loads, out.read_text().splitlines()):
                            if "error" in line:
                                errors.append(line["error"])
                            else:
                                values[line["name"]] = line["value"]
        if wanted("start_agent", rows=rows):
            with cluster(sizes, sizes.imports.split(",")) as master:
                values["start_agent"] = start(master, folder / "agent", sizes)
    return Figures(values, errors)


@contextmanager
def cluster(sizes: work.Sizes, preload: list[str] | None = None) -> Iterator[str]:
    """A master, and an agent that has been idle for a while; yields the master's address."""
    one = EmbeddedCluster(nodes=1, devices_per_node=1)
    one.modules = preload or []
    with one:
        time.sleep(sizes.settle_s)
        yield one.address


def run(job: DLJob, master: str) -> None:
    handle = job.submit("bench-rl", blocking=False, master=master)
    try:
        code = handle.wait(JOB_S)
        if code != 0:
            raise RuntimeError(f"the job ended with {code}: {handle.status().reason}")
    finally:
        handle.stop(force=True)
        handle.close()


def start(master: str, out: Path, sizes: work.Sizes, *, preload: bool = False) -> float:
    """Return the seconds from `submit` until all workers have answered a call."""
    builder = on_one_node(out, sizes, [])
    if preload:
        builder.preload(*sizes.imports.split(","))
    builder.role("starter").run("benchmarks.rl.job.Starter").total(sizes.workers).resource(cpu=0.01).max_restart(0)
    job = builder.build()
    began = time.time()  # wall clock: the other end is read in a worker on this host
    run(job, master)
    told: dict[str, float] = json.loads(out.read_text())
    took = told["at"] - began
    print(f"  {out.name}: {took:.2f} s, of which imports {told['import_s']:.2f} s", file=sys.stderr, flush=True)
    return took


def on_one_node(out: Path, sizes: work.Sizes, rows: list[str]) -> DLJobBuilder:
    builder = DLJobBuilder().node_num(1).device_per_node(1).device_type("CPU")
    config: dict[str, Any] = {"out": str(out), "rows": rows, "sizes": sizes.text()}
    return builder.config(config)


def dictionary_job(out: Path, sizes: work.Sizes, rows: list[str]) -> DLJob:
    builder = on_one_node(out, sizes, rows)
    builder.role("source").run("benchmarks.rl.job.Source").resource(cpu=0.01).max_restart(0)
    builder.role("sink").run("benchmarks.rl.job.Sink").resource(cpu=0.01).not_driver()
    return builder.build()


def engine_job(out: Path, sizes: work.Sizes, rows: list[str]) -> DLJob:
    builder = on_one_node(out, sizes, rows)
    builder.role("caller").run("benchmarks.rl.job.Caller").resource(cpu=0.01).max_restart(0)
    command = [sys.executable, str(work.JUDGE), "--port", "{port}"]
    builder.role("judge").engine(command, ready="/up", start_timeout=60).resource(cpu=0.01)
    return builder.build()
