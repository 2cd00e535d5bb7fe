"""This checkout beside an earlier commit, in turns: calls, 64 MiB, recovery in place, stalls of saves and snapshots.

Each side has its own virtual environment. Both sides are up at once, and take turns of some tenths of a second: so a
minute in which the machine is slow is slow for both. Recovery and restores end processes: they are programs of each
side, which run less often. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import program, report_table  # noqa: E402 - the checkout is no package
from benchmarks.launch.run import machine  # noqa: E402

SLOWER = 1.03
"""How many times as slow as the commit this checkout may be."""
SIDES = ("commit", "here")
PROGRAM_EVERY = 5
"""Rounds: in each fifth the programs run. Odd, so that the side that is first changes."""
WITHIN_S = 900.0


class Program(NamedTuple):
    """A benchmark of each side that gives the figures of a row."""

    command: tuple[str, ...]
    file: str
    contender: str
    """Empty if the file's figures are one contender's."""
    row: str


PROGRAMS = {
    "recovery": Program(
        ("recovery/run.py", "--rounds=3", "--contenders=in_place", "--ranks=4", "--rows=seconds_4"),
        "recovery.json",
        "in_place",
        "seconds_4",
    ),
    "restore": Program(("recovery/snapshots.py", "--rounds=2"), "snapshots.json", "", "restore"),
}
FIGURES = {
    "sync": ("sync", "sync_cpu"),
    "pipelined": ("pipelined", "pipelined_cpu"),
    **{row: (row,) for row in ("arg", "ret", "snapshot", "save", *PROGRAMS)},
}
"""By row, what it gives. Of all figures less is better."""
TITLES = {
    "sync": "sync call, µs",
    "sync_cpu": "the same, processor time of both sides, µs",
    "pipelined": "a pipelined call, µs",
    "pipelined_cpu": "the same, processor time of both sides, µs",
    "arg": "argument of 64 MiB, ms",
    "ret": "result of 64 MiB, ms",
    "snapshot": "stall of a snapshot of 1 GiB, ms",
    "save": "stall of `save` of 1 GiB, ms",
    "recovery": "kill -9 of a rank of 4 to all past a step, s",
    "restore": "restore of 1 GiB from memory, s",
}
Figures = dict[str, list[float]]


class Side:
    """A checkout, and a cluster of it that measures."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        self.checkout = checkout
        self.figures: Figures = {}
        self._process = subprocess.Popen(
            [self._python, str(Path(__file__).with_name("side.py")), str(folder)],
            cwd=checkout,
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def measure(self, row: str) -> None:
        """Add the figures of a row."""
        if row in PROGRAMS:
            self._add({row: self._run(PROGRAMS[row])})
        else:
            self._add({name: [figure] for name, figure in self._ask(row).items()})

    def warm_up(self, row: str) -> None:
        """Measure a row without counting it: memory is new, and modules are imported."""
        if row not in PROGRAMS:
            self._ask(row)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    @property
    def name(self) -> str:
        command = ["git", "-C", str(self.checkout), "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    @property
    def _python(self) -> str:
        return str(self.checkout / ".venv/bin/python")

    def _add(self, figures: Figures) -> None:
        for name, values in figures.items():
            self.figures.setdefault(name, []).extend(values)

    def _ask(self, row: str) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(row + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                figures: dict[str, float] = json.loads(line)
                return figures
        raise SystemExit(f"{self.checkout}: side.py ended with {self._process.wait(60)} while it measured {row}")

    def _run(self, benchmark: Program) -> list[float]:
        name, *options = benchmark.command
        with tempfile.TemporaryDirectory() as out:
            command = [self._python, str(self.checkout / "benchmarks" / name), *options, f"--out={out}"]
            done = subprocess.run(
                command, cwd=self.checkout, env=_environment(), capture_output=True, text=True, timeout=WITHIN_S
            )
            file = Path(out) / benchmark.file
            if not file.exists():
                raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
            found = json.loads(file.read_text())["figures"]
        values: list[float] = (found[benchmark.contender] if benchmark.contender else found)[benchmark.row]
        return values


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", type=Path, help="a checkout of the commit (`git worktree add`), after `make setup`")
    parser.add_argument("--rounds", type=int, default=40, help="how often each side is measured (default: 40)")
    parser.add_argument("--rows", type=program.names_of([*FIGURES]), default=[*FIGURES], help="default: all")
    parser.add_argument("--out", type=Path, default=ROOT / "out/bench", help="where against_commit.json goes")
    parser.add_argument("--check", action="store_true", help=f"end with 1 if a figure is {SLOWER} times as slow")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what was started is ended
    began_on = machine()
    with ExitStack() as stack:
        sides: list[Side] = []
        for checkout in (args.commit.resolve(), ROOT):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="unified-bench-", dir="/tmp"))
            sides.append(Side(checkout, Path(folder)))
            stack.callback(sides[-1].close)
        for number in range(-1, args.rounds):
            for row in args.rows:
                for side in sides if number % 2 == 0 else sides[::-1]:
                    if number < 0:
                        side.warm_up(row)
                    elif row not in PROGRAMS or number % PROGRAM_EVERY == 0:
                        side.measure(row)
            print(f"round {number + 1}/{args.rounds}", file=sys.stderr, flush=True)
    commit, here = (side.figures for side in sides)
    slower = {name: times(here[name], commit[name]) for name in commit}
    result = {
        "machine": began_on,
        "commits": {word: side.name for word, side in zip(SIDES, sides, strict=True)},
        "rounds": args.rounds,
        "figures": {word: side.figures for word, side in zip(SIDES, sides, strict=True)},
        "times_slower": slower,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "against_commit.json").write_text(json.dumps(result, indent=1))
    lines = [
        (
            TITLES[name],
            f"{statistics.median(commit[name]):.4g}",
            f"{statistics.median(here[name]):.4g}",
            f"{slower[name]:.3f}",
            "{:.3f}–{:.3f}".format(*range_of_median(here[name], commit[name])),
            str(len(here[name])),
        )
        for name in commit
    ]
    note = (
        f"Both sides in turns, on {began_on['cores']} cores, {began_on['date']}. Times as slow: the median of the "
        "turns' ratios, and the range in which it lies 19 times in 20."
    )
    headings = ["", sides[0].name, sides[1].name, "times as slow", "range", "turns"]
    report_table.show(headings, lines, [], note, 130)
    return int(args.check and any(found > SLOWER for found in slower.values()))


def times(here: Sequence[float], commit: Sequence[float]) -> float:
    """Return how many times as slow this checkout is: the median of the turns' own ratios."""
    return statistics.median(ours / theirs for ours, theirs in zip(here, commit, strict=True))


def range_of_median(here: Sequence[float], commit: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of that median, by the ranks of the binomial distribution."""
    ratios = sorted(ours / theirs for ours, theirs in zip(here, commit, strict=True))
    half_width = 0.98 * len(ratios) ** 0.5
    middle = (len(ratios) - 1) / 2
    low, high = max(0, int(middle - half_width)), min(len(ratios) - 1, int(middle + half_width + 1))
    return ratios[low], ratios[high]


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


if __name__ == "__main__":
    sys.exit(main())
