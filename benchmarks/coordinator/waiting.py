"""A small job, alone and beside a job of 100 000 workers that waits for a place: the time from submit to end."""

from __future__ import annotations

import argparse
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
from unified import DLJobBuilder
from unified.client.embedded import EmbeddedCluster
from unified.client.handle import JobHandle
from unified.protocol.records import Stage

MODULE = "benchmarks.coordinator.waiting"
MOST_SLOWER = 1.5
WORKERS = 100_000
JOBS = 5
"""Small jobs in a row, in each half of a round."""
WITHIN_S = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="alone, then beside the other one (default: 5)")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="where waiting.json goes")
    parser.add_argument(
        "--check", action="store_true", help=f"end with 1 if it takes more than {MOST_SLOWER} x as long"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="unified-bench-") as folder:
        result = measure(Path(folder), args.rounds)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "waiting.json").write_text(json.dumps(result, indent=1))
    show(result)
    return int(args.check and result["slower"] > MOST_SLOWER)


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    taken: dict[str, list[float]] = {"alone": [], "beside": []}
    waited_s: list[float] = []
    with EmbeddedCluster(1, 1, home=folder) as cluster:
        small(cluster.address)  # the first one waits for the zygote's imports
        for number in range(rounds):
            taken["alone"] += [small(cluster.address) for _ in range(JOBS)]
            began = time.perf_counter()
            large = submit("large", WORKERS, cluster.address, accelerator=1)
            assert large.status().stage is Stage.INIT
            waited_s.append(time.perf_counter() - began)
            taken["beside"] += [small(cluster.address) for _ in range(JOBS)]
            large.stop(force=True)
            large.wait(timeout=WITHIN_S)
            large.close()
            print(f"round {number + 1}/{rounds}", file=sys.stderr, flush=True)
    medians = {name: statistics.median(times) for name, times in taken.items()}
    return {
        "machine": machine(),
        "workers": WORKERS,
        "taken_s": taken,
        "submit_large_s": statistics.median(waited_s),
        "alone_s": medians["alone"],
        "beside_s": medians["beside"],
        "slower": medians["beside"] / medians["alone"],
        "floor": MOST_SLOWER,
    }


def small(address: str) -> float:
    """Return how long a job of one worker that does nothing takes."""
    began = time.perf_counter()
    handle = submit("small", 1, address, accelerator=0)
    code = handle.wait(timeout=WITHIN_S)
    taken = time.perf_counter() - began
    handle.close()
    assert code == 0, code
    return taken


def submit(name: str, total: int, address: str, *, accelerator: float) -> JobHandle:
    builder: Any = DLJobBuilder().node_num(total).device_per_node(1).device_type("CPU")
    builder.workload("role", f"{MODULE}.nothing").total(total).resource(cpu=0.1, accelerator=accelerator).end()
    root = str(Path(__file__).parents[2])
    handle: JobHandle = (
        builder.global_env({"PYTHONPATH": root})
        .build()
        .submit(name, blocking=False, master=address, working_dir=root, stop_grace_s=0)
    )
    return handle


def nothing() -> None:
    """Do nothing."""


def show(result: dict[str, Any]) -> None:
    table = Table("", "median", title=f"A small job beside one of {result['workers']:,} waiting workers")
    table.add_row("alone", f"{1000 * result['alone_s']:.0f} ms")
    table.add_row("beside", f"{1000 * result['beside_s']:.0f} ms")
    table.add_row("ratio", f"{result['slower']:.2f} × (at most {result['floor']:g} ×)")
    table.add_row("submit of the large one", f"{result['submit_large_s']:.2f} s")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
