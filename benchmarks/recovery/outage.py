"""What a job notices when the master is killed ten times: restarts, failed calls, and the time of its steps."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.launch.run import machine
from benchmarks.recovery import work
from benchmarks.recovery.outage_job import FOLDER
from benchmarks.recovery.supervised import SupervisedCluster
from unified import DLJobBuilder
from unified.client.handle import JobHandle

MOST_SLOWER = 1.1
"""Median of the steps while the master is away, as a multiple of the median while it is there."""
QUIET_S = 3.0
"""Time with a master before each kill."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10, help="of the master (default: 10)")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="where outage.json goes")
    parser.add_argument("--check", action="store_true", help="end with 1 if the job noticed anything")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="unified-bench-") as name:
        result = measure(Path(name), args.kills)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "outage.json").write_text(json.dumps(result, indent=1))
    show(result)
    return int(args.check and not is_unnoticed(result))


def measure(folder: Path, num_kills: int) -> dict[str, Any]:
    root = str(Path(__file__).parents[2])
    with SupervisedCluster(folder, nodes=2, devices=4) as cluster:
        handle = submit(cluster.address, folder, root)
        work.wait_for_steps(folder, 50)
        before = incarnations(handle)
        outages: list[tuple[float, float]] = []
        for number in range(num_kills):
            time.sleep(QUIET_S)
            pid = cluster.pid("master")
            assert pid is not None
            began = time.time()
            cluster.kill(pid)
            handle.status()  # answered by the next one
            outages.append((began, time.time()))
            print(f"kill {number + 1}: away for {outages[-1][1] - began:.2f} s", file=sys.stderr, flush=True)
        time.sleep(QUIET_S)
        after = incarnations(handle)
        (folder / "stop").touch()
        code = handle.wait(timeout=work.WITHIN_S)
        handle.close()
    called, taken = (json.loads((folder / f"{name}.json").read_text()) for name in ("called", "taken"))
    steps = work.read(folder)
    away, there = split(steps, outages)
    return {
        "machine": machine(),
        "kills": num_kills,
        "exit_code": code,
        "restarted": sum(after[name] - before[name] for name in before),
        "calls": called["calls"],
        "failed": called["failed"],
        "errors": called["errors"],
        "items_lost": called["sum"] - taken["sum"],
        "outage_s": [round(until - began, 3) for began, until in outages],
        "step_there_s": statistics.median(there),
        "step_away_s": statistics.median(away),
        "longest_step_away_s": max(away),
    }


def submit(address: str, folder: Path, root: str) -> JobHandle:
    builder: Any = DLJobBuilder().node_num(2).device_per_node(4).device_type("CPU")
    builder = builder.global_env({FOLDER: str(folder), "PYTHONPATH": root, "OMP_NUM_THREADS": "1"})
    module = "benchmarks.recovery.outage_job"
    builder.train(f"{module}.train").nnodes(2).nproc_per_node(1).end()
    builder.workload("service", f"{module}.serve").total(1).end()
    builder.workload("caller", f"{module}.call").total(1).end()
    handle: JobHandle = builder.build().submit("outage", blocking=False, master=address, working_dir=root)
    return handle


def incarnations(handle: JobHandle) -> dict[str, int]:
    return {worker.name: worker.incarnation for worker in handle.status().workers}


def split(steps: list[work.Step], outages: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Times of the steps of rank 0 that ended while the master was away, and of the others."""
    away: list[float] = []
    there: list[float] = []
    mine = [step for step in steps if step.rank == 0]
    for before, step in itertools.pairwise(mine):
        is_away = any(began <= before.at and step.at <= until for began, until in outages)
        (away if is_away else there).append(step.at - before.at)
    return away, there


def is_unnoticed(result: dict[str, Any]) -> bool:
    slower = result["step_away_s"] / result["step_there_s"]
    losses = (result["exit_code"], result["restarted"], result["failed"], result["items_lost"])
    return losses == (0, 0, 0, 0) and slower <= MOST_SLOWER


def show(result: dict[str, Any]) -> None:
    table = Table("", "figure", title=f"The master killed {result['kills']} times")
    slower = result["step_away_s"] / result["step_there_s"]
    for name, value in {
        "time without a master, median": f"{statistics.median(result['outage_s']):.2f} s",
        "workers restarted": result["restarted"],
        "calls and puts that failed": f"{result['failed']} of {result['calls']}",
        "queue items lost, as a sum": result["items_lost"],
        "step with a master, median": f"{1000 * result['step_there_s']:.2f} ms",
        "step without, median": f"{1000 * result['step_away_s']:.2f} ms ({slower:.3f} ×)",
        "exit code of the job": result["exit_code"],
    }.items():
        table.add_row(name, str(value))
    console = Console()
    console.print(table)
    console.print("nothing noticed" if is_unnoticed(result) else "the job noticed", style="bold")


if __name__ == "__main__":
    sys.exit(main())
