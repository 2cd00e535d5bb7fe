"""What a snapshot and a restore from memory cost beside a copy of memory, ``torch.save`` and ``torch.load``.

Each round is one incarnation of a worker, which ends by SIGKILL: so a state is loaded as by any process that just
started
again, into a model that has its memory, and from a file that is in the system's cache.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.bus.run import touch
from benchmarks.launch.run import machine
from unified import DLJobBuilder, current_worker
from unified.tensors.copy import Copy, copy_memory
from unified.testing import LocalCluster

FOLDER, MIB, ROUNDS = "SNAPSHOT_BENCH_FOLDER", "SNAPSHOT_BENCH_MIB", "SNAPSHOT_BENCH_ROUNDS"
ROWS = ("memcpy", "snapshot", "torch.save", "restore", "torch.load", "torch.load + load_state_dict")
NUM_TENSORS = 64
WITHIN_S = 1800.0


class Limit(NamedTuple):
    """``row`` takes at most so many times as long as ``peer``."""

    row: str
    peer: str
    at_most: float


LIMITS = [
    Limit("snapshot", "memcpy", 1.3),
    Limit("snapshot", "torch.save", 0.1),
    Limit("restore", "torch.load", 0.2),
]


class Layers(torch.nn.Module):
    """A model of so many tensors."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList([torch.zeros(numel) for _ in range(NUM_TENSORS)])

    @torch.no_grad()
    def set(self, first: float) -> None:
        """Fill the first tensor with this value, and each other one with the next."""
        for number, layer in enumerate(self.layers):
            layer.fill_(first + number)

    def check(self, first: float) -> None:
        """Fail unless all values are those of `set`. No memory is taken for it, and none left behind to load into."""
        for number, layer in enumerate(self.layers):
            assert layer.min() == layer.max() == first + number


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of the state (default: 1024)")
    parser.add_argument("--rounds", type=int, default=7, help="how often each is measured (default: 7)")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="where snapshots.json goes")
    parser.add_argument("--check", action="store_true", help="end with 1 if a limit is exceeded")
    args = parser.parse_args()
    began_on = machine()
    touch(8 * args.mib)  # in a virtual machine, memory that nobody has touched yet takes seconds to find
    with tempfile.TemporaryDirectory(prefix="unified-bench-") as name:
        figures = measure(Path(name), args.mib, args.rounds)
    medians = {row: statistics.median(values) for row, values in figures.items()}
    result = {"machine": began_on, "mib": args.mib, "rounds": args.rounds, "medians": medians, "figures": figures}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "snapshots.json").write_text(json.dumps(result, indent=1))
    show(result)
    return int(args.check and any(ratio(medians, limit) > limit.at_most for limit in LIMITS))


def measure(folder: Path, mib: int, rounds: int) -> dict[str, list[float]]:
    """Run a job of one worker, which measures all once in each of its incarnations; seconds by row."""
    root = str(Path(__file__).parents[2])
    with LocalCluster(nodes=1, devices=1, home=folder / "cluster") as cluster:
        variables = {FOLDER: str(folder), MIB: str(mib), ROUNDS: str(rounds), "PYTHONPATH": root}
        builder: Any = DLJobBuilder().node_num(1).device_per_node(1).device_type("CPU").global_env(variables)
        role = builder.workload("bench", "benchmarks.recovery.snapshots.work").total(1)
        role.max_restart(rounds).per_node_max_failure(rounds + 1).end()
        handle = cluster.submit(builder.build(), "snapshots", working_dir=root)
        code = handle.wait(timeout=WITHIN_S)
        if code:
            raise RuntimeError(f"the job ended with {code}:\n" + "\n".join(handle.logs()))
    _, *incarnations = [json.loads(file.read_text()) for file in sorted(folder.glob("incarnation-*.json"))]
    return {row: [incarnation[row] for incarnation in incarnations] for row in ROWS}


def work() -> None:
    """Take the readings of one incarnation; the first has nothing to load, and finds memory for those that count."""
    folder, mib, rounds = Path(os.environ[FOLDER]), int(os.environ[MIB]), int(os.environ[ROUNDS])
    incarnation = len(list(folder.glob("incarnation-*.json")))
    model = Layers((mib << 20) // 4 // NUM_TENSORS)
    readings: dict[str, float] = {}
    if incarnation:
        loads = [read_snapshot, read_file]
        for read in loads if incarnation % 2 else loads[::-1]:
            readings |= read(model, folder / "state.pt")
            model.check(incarnation)
            model.set(0.0)
    model.set(incarnation + 1.0)
    readings |= copies(model, folder / "state.pt")
    (folder / f"incarnation-{incarnation:03}.json").write_text(json.dumps(readings))
    if incarnation < rounds:
        os.kill(os.getpid(), signal.SIGKILL)


def read_snapshot(model: Layers, file: Path) -> dict[str, float]:
    """Measure a restore from memory into a model."""
    return {"restore": timed(lambda: current_worker().restore({"model": model}))}


def read_file(model: Layers, file: Path) -> dict[str, float]:
    """Measure how a user loads a file: into memory, and from there into a model."""
    loaded: list[Any] = []
    load = timed(lambda: loaded.append(torch.load(file, weights_only=True)))
    fill = timed(lambda: model.load_state_dict(loaded.pop()))
    return {"torch.load": load, "torch.load + load_state_dict": load + fill}


def copies(model: Layers, file: Path) -> dict[str, float]:
    """Measure what takes a copy of a model's state."""
    worker, step = current_worker(), 0
    for step in range(2):  # then both buffers are there
        worker.snapshot({"model": model}, step)
        time.sleep(2.0)
    others = [torch.zeros_like(layer) for layer in model.layers]
    both = zip(others, model.layers, strict=True)
    pairs = [Copy(other.data_ptr(), layer.data_ptr(), layer.nbytes) for other, layer in both]
    return {
        "memcpy": timed(lambda: copy_memory(pairs, torch.get_num_threads())),
        "snapshot": timed(lambda: worker.snapshot({"model": model}, step + 1)),
        "torch.save": timed(lambda: save(model, file)),
    }


def save(model: Layers, file: Path) -> None:
    """Save as one does who will need it: on the disk, not in its cache."""
    with file.open("wb") as opened:
        torch.save(model.state_dict(), opened)
        opened.flush()
        os.fsync(opened.fileno())


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    result = action()
    taken = time.perf_counter() - began
    del result
    return taken


def ratio(medians: dict[str, float], limit: Limit) -> float:
    return medians[limit.row] / medians[limit.peer]


def show(result: dict[str, Any]) -> None:
    medians, mib = result["medians"], result["mib"]
    table = Table("", "median", "GB/s", title=f"A state of {mib} MiB, {result['rounds']} rounds")
    for row, seconds in medians.items():
        table.add_row(row, f"{1000 * seconds:.0f} ms", f"{(mib << 20) / seconds / 1e9:.2f}")
    console = Console()
    console.print(table)
    for limit in LIMITS:
        found = ratio(medians, limit)
        word = "pass" if found <= limit.at_most else "FAIL"
        console.print(f"{limit.row} ÷ {limit.peer}: {found:.3f} (at most {limit.at_most:g}): {word}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
