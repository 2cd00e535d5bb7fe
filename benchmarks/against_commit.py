"""This checkout beside an earlier commit, in turns: calls, 64 MiB, recovery in place, stalls of saves and snapshots.

Each side runs its own benchmarks with its own virtual environment. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import program, report_table  # noqa: E402 - the checkout is no package
from benchmarks.bus.checks import times_better  # noqa: E402
from benchmarks.bus.work import ROWS, Row  # noqa: E402
from benchmarks.launch.run import machine  # noqa: E402

SLOWER = 1.03
"""How many times as slow as the commit a median may be."""
SIDES = ("commit", "here")


class Benchmark(NamedTuple):
    command: tuple[str, ...]
    file: str
    contender: str
    """Empty if the file's figures are one contender's."""
    rows: tuple[str, ...]
    runs: int = 1
    """In each round: two for what varies from one run to the next."""


CALLS = ("sync_p50", "async_1_1", "async_2_2")
ARRAYS = ("arg_64MiB", "ret_64MiB", "arg_64MiB_warm", "ret_64MiB_warm")
_BUS = ("bus/run.py", "--rounds=1", "--contenders=direct")
BENCHMARKS = [
    Benchmark((*_BUS, f"--rows={','.join(CALLS)}"), "bus.json", "direct", CALLS, 2),
    Benchmark((*_BUS, f"--rows={','.join(ARRAYS)}"), "bus.json", "direct", ARRAYS),
    Benchmark(
        ("recovery/run.py", "--rounds=3", "--contenders=in_place", "--ranks=4", "--rows=seconds_4"),
        "recovery.json",
        "in_place",
        ("seconds_4",),
    ),
    Benchmark(("recovery/snapshots.py", "--rounds=2"), "snapshots.json", "", ("snapshot", "restore")),
    Benchmark(("checkpoint/run.py", "--rounds=1", "--rows=stall"), "checkpoint.json", "unified", ("stall",)),
]
NAMES = [row for benchmark in BENCHMARKS for row in benchmark.rows]
TITLES = {row.name: f"{row.title}, {row.unit}" for row in ROWS} | {
    "seconds_4": "kill -9 of a rank of 4 to all past a step, s",
    "snapshot": "stall of a snapshot of 1 GiB, s",
    "restore": "restore of 1 GiB from memory, s",
    "stall": "stall of `save` of 1 GiB, ms",
}
KNOWN = [*ROWS, *(Row(name, "", "", False) for name in NAMES if name not in {row.name for row in ROWS})]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", type=Path, help="a checkout of the commit (`git worktree add`), after `make setup`")
    parser.add_argument("--rounds", type=int, default=5, help="how often each side is measured (default: 5)")
    parser.add_argument("--rows", type=program.names_of(NAMES), default=NAMES, help="comma-separated; default: all")
    parser.add_argument("--out", type=Path, default=ROOT / "out/bench", help="where against_commit.json goes")
    parser.add_argument("--check", action="store_true", help=f"end with 1 if a median is {SLOWER} times as slow")
    args = parser.parse_args()
    began_on = machine()
    figures: program.Figures = {side: {name: [] for name in args.rows} for side in SIDES}
    checkouts = {"commit": args.commit.resolve(), "here": ROOT}
    for number in range(args.rounds):
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            for benchmark in (each for each in BENCHMARKS if not set(args.rows).isdisjoint(each.rows)):
                for _ in range(benchmark.runs):
                    measure(benchmark, checkouts[side], figures[side])
            print(f"round {number + 1}/{args.rounds} {side}", flush=True)
    slower = {name: 1 / better(name, figures) for name in args.rows}
    hashes = {side: _hash(checkout) for side, checkout in checkouts.items()}
    result = {"machine": began_on, "commits": hashes, "rounds": args.rounds, "figures": figures, "times_slower": slower}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "against_commit.json").write_text(json.dumps(result, indent=1))
    lines = [
        (TITLES[name], *(f"{statistics.median(figures[side][name]):.4g}" for side in SIDES), f"{slower[name]:.3f}")
        for name in args.rows
    ]
    note = f"Medians of {args.rounds} rounds in turn, on {began_on['cores']} cores, {began_on['date']}."
    report_table.show(["", hashes["commit"], hashes["here"], "times as slow"], lines, [], note, 120)
    return int(args.check and any(times > SLOWER for times in slower.values()))


def measure(benchmark: Benchmark, checkout: Path, figures: dict[str, list[float]]) -> None:
    """Run a benchmark of a checkout, and add its figures."""
    program, *options = benchmark.command
    with tempfile.TemporaryDirectory() as out:
        command = [str(checkout / ".venv/bin/python"), str(checkout / "benchmarks" / program), *options, f"--out={out}"]
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, cwd=checkout, env=environ, capture_output=True, text=True, timeout=900)
        file = Path(out) / benchmark.file
        if not file.exists():
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        found = json.loads(file.read_text())["figures"]
    for row in figures.keys() & benchmark.rows:
        figures[row] += (found[benchmark.contender] if benchmark.contender else found)[row]


def better(name: str, figures: program.Figures) -> float:
    """Return how many times better than the commit's the median here is."""
    here, there = (statistics.median(figures[side][name]) for side in SIDES[::-1])
    return times_better(name, here, there, KNOWN)


def _hash(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
