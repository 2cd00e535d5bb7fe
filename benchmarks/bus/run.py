"""Calls, arrays and queues of the bus, beside its peers and beside bare sockets. See benchmarks/README.md."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import program
from benchmarks.bus import checks, floor, ours, report, work

HERE = Path(__file__).parents[1]
ROOT = HERE.parent
ENVIRONMENTS = ROOT / "out" / "peers"
"""One virtual environment a peer; `make peers` makes them."""
PROGRAM_S = 180.0
WARM_MIB = 3072
PACKAGES = {"ray": "ray", "monarch": "torchmonarch", "xoscar": "xoscar"}
Measure = Callable[[list[str]], ours.Figures]


def main() -> int:
    parser = program.parser(__doc__, work.NAMES)
    parser.add_argument(
        "--contenders",
        "--peers",
        type=program.names_of(list(report.TITLES)),
        default=[],
        help=f"comma-separated, of {', '.join(report.TITLES)}; default: all that are installed",
    )
    args = parser.parse_args()
    contenders, missing = chosen(args.contenders)

    def measure() -> tuple[program.Figures, list[str]]:
        touch(WARM_MIB)
        return interleaved(contenders, args.rows, args.rounds)

    return program.run(
        "bus",
        args,
        measure,
        report,
        checks.verdicts,
        contenders=list(contenders),
        missing=missing,
        versions={name: version(name) for name in contenders if name in PACKAGES},
    )


def chosen(asked: list[str]) -> tuple[dict[str, Measure], list[str]]:
    """What to measure, in the order of the table, and the peers that are not installed."""
    ways: dict[str, Measure] = {
        "direct": partial(ours.measure, "auto"),
        "relay": partial(ours.measure, "relay"),
        **{name: partial(run, [interpreter(name), HERE / "peers" / f"{name}_peer.py"]) for name in report.PEERS},
        **{
            name: partial(run, [sys.executable, HERE / "bus/floor.py", name], env=floor.environment())
            for name in floor.FLOORS
        },
    }
    wanted = {name: way for name, way in ways.items() if not asked or name in asked}
    missing = [name for name in wanted if name in report.PEERS and not is_installed(name)]
    return {name: way for name, way in wanted.items() if name not in missing}, missing


def interleaved(contenders: dict[str, Measure], rows: list[str], rounds: int) -> tuple[program.Figures, list[str]]:
    """Each contender once a round, in an order that rotates: the figures by contender and row, and what went wrong."""
    figures: program.Figures = {name: {} for name in contenders}
    problems: list[str] = []
    for number in range(rounds):
        order = list(contenders)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            began = time.perf_counter()
            values, errors = contenders[name](rows)
            for row, value in values.items():  # some come along with others
                if not rows or row.removeprefix("inline_") in rows:
                    figures[name].setdefault(row, []).append(value)
            problems += [f"round {number + 1}, {name}: {error}" for error in errors]
            note = f", {len(errors)} problems" if errors else ""
            print(
                f"round {number + 1}/{rounds} {name}: {len(values)} figures in "
                f"{time.perf_counter() - began:.0f} s{note}",
                file=sys.stderr,
                flush=True,
            )
    return figures, problems


def run(command: Sequence[str | Path], rows: list[str], *, env: Mapping[str, str] = os.environ) -> ours.Figures:
    """A program that takes rows as arguments and prints one JSON line a figure; one that hangs is killed."""
    process = subprocess.Popen(
        [*command, *rows],
        env={**env, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, complaints = process.communicate(timeout=PROGRAM_S)
        error = f"it ended with {process.returncode}: {complaints[-1000:]}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, complaints = process.communicate()
        error = f"it was not done after {PROGRAM_S:g} s: {complaints[-1000:]}"
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    values = {line["name"]: line["value"] for line in lines}
    wanted = {name: value for name, value in values.items() if not rows or name in rows}
    return ours.Figures(wanted, [error] if error else [])


def is_installed(name: str) -> bool:
    return (ENVIRONMENTS / name / ".installed").exists()


def interpreter(name: str) -> Path:
    return ENVIRONMENTS / name / "bin" / "python"


def version(name: str) -> str:
    code = f"from importlib.metadata import version; print(version({PACKAGES[name]!r}))"
    return subprocess.check_output([interpreter(name), "-c", code], text=True).strip()


def touch(mib: int) -> None:
    """Use memory once, so that no contender pays for what a virtual machine gets from its host at first use."""
    np.ones(mib * work.MIB, np.uint8)


if __name__ == "__main__":
    sys.exit(main())
