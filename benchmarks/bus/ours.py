"""Our own columns: a real cluster on this host, and jobs on it that do the work of `benchmarks.bus.work`."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.bus import work
from unified.api.builder import DLJob, DLJobBuilder
from unified.client.daemons import marked_processes
from unified.client.embedded import CLUSTER_VARIABLE, EmbeddedCluster

JOB_S = 180.0
START_S = 60.0


class Figures(NamedTuple):
    """What one contender gave in one round."""

    values: dict[str, float]
    errors: list[str]


def measure(route: str, rows: list[str]) -> Figures:
    """A cluster of its own for this round: idle memory, four workers' start, then everything else.

    Args:
        route: ``auto`` or ``relay``, for `UNIFIED_BUS_ROUTE`.
        rows: names of `work.ROWS`; all if empty.
    """
    values: dict[str, float] = {}
    errors: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="unified-bench-") as folder,
        EmbeddedCluster(nodes=1, devices_per_node=1) as cluster,
    ):
        time.sleep(work.SETTLE_S)
        marked = marked_processes(f"{CLUSTER_VARIABLE}={cluster.cluster_id}")
        values["memory_idle"] = work.memory_mib(process.pid for process in marked)[0]
        try:
            if work.wanted("start_4_workers", rows=rows):
                values["start_4_workers"] = start(cluster.address, route, Path(folder))
            others = set(work.NAMES) - {"memory_idle", "start_4_workers"}
            if work.wanted(*others, rows=rows):
                read = run_job(cluster.address, route, Path(folder), rows)
                values |= read.values
                errors += read.errors
        except (TimeoutError, RuntimeError) as error:
            errors.append(str(error))
    return Figures(values, errors)


def run_job(master: str, route: str, folder: Path, rows: list[str]) -> Figures:
    out = folder / "figures"
    out.touch()
    handle = bench_job(out, route, rows).submit("bench", blocking=False, master=master)
    try:
        code = handle.wait(JOB_S)
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        errors = [line["error"] for line in lines if "error" in line]
        if code != 0:
            errors.append(f"the job ended with {code}: {handle.status().reason}")
    finally:
        handle.stop(force=True)
        handle.close()
    return Figures({line["name"]: line["value"] for line in lines if "name" in line}, errors)


def start(master: str, route: str, folder: Path) -> float:
    """Seconds from `submit` to four workers that have answered a call."""
    readings = work.Readings()
    for attempt in range(work.STARTS):
        out = folder / f"started-{attempt}"
        job = start_job(out, route)
        began = time.time()  # wall clock: the other end is read in a worker on this host
        with job.submit("start", blocking=False, master=master) as handle:
            code = handle.wait(START_S)
            if code != 0:
                raise RuntimeError(f"the job that starts {work.WORKERS} workers ended with {code}")
        readings.add(float(out.read_text()) - began)
        time.sleep(1.0)  # as for the peers, between two starts
    return readings.median


def on_one_node(route: str, **config: Any) -> DLJobBuilder:
    builder = DLJobBuilder().node_num(1).device_per_node(1).device_type("CPU")
    return builder.config(config).global_env({"UNIFIED_BUS_ROUTE": route})


def bench_job(out: Path, route: str, rows: list[str]) -> DLJob:
    job: DLJob = (
        on_one_node(route, out=str(out), rows=rows)
        .role("bench")
        .run("benchmarks.bus.job.Bench")
        .resource(cpu=0.01)
        .max_restart(0)
        .role("echo")
        .run("benchmarks.bus.job.Echo")
        .total(work.WORKERS)
        .resource(cpu=0.01)
        .not_driver()
        .role("caller")
        .run("benchmarks.bus.job.Caller")
        .total(2)
        .resource(cpu=0.01)
        .not_driver()
        .build()
    )
    return job


def start_job(out: Path, route: str) -> DLJob:
    job: DLJob = (
        on_one_node(route, out=str(out))
        .role("starter")
        .run("benchmarks.bus.job.Starter")
        .total(work.WORKERS)
        .resource(cpu=0.01)
        .build()
    )
    return job
