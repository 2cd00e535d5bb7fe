"""Calls, arrays and queues of the bus, beside its peers and beside bare sockets. See benchmarks/README.md."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.bus import checks, floor, ours, report, work
from benchmarks.launch.run import fill, machine

HERE = Path(__file__).parents[1]
ROOT = HERE.parent
README = HERE / "README.md"
MARK = "<!-- filled from benchmarks/bus/run.py -->"
ENVIRONMENTS = ROOT / "out" / "peers"
"""One virtual environment a peer; `make peers` makes them."""
PROGRAM_S = 180.0
WARM_MIB = 3072
PACKAGES = {"ray": "ray", "monarch": "torchmonarch", "xoscar": "xoscar"}
Measure = Callable[[list[str]], ours.Figures]


def main() -> int:
    args = parse()
    if args.check_only:
        return check(checks.verdicts(json.loads((args.out / "bus.json").read_text())["medians"]))
    contenders, missing = chosen(args.contenders)
    touch(WARM_MIB)
    figures, problems = interleaved(contenders, args.rows, args.rounds)
    result = {
        "machine": machine(),
        "rounds": args.rounds,
        "contenders": list(contenders),
        "missing": missing,
        "versions": {name: version(name) for name in contenders if name in PACKAGES},
        "medians": checks.medians(figures),
        "figures": figures,
        "problems": problems,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "bus.json").write_text(json.dumps(result, indent=1))
    report.plot(result, args.out / "bus.svg")
    report.show(result)
    if args.readme:
        fill(README, report.markdown(result), MARK)
    code = check(checks.verdicts(checks.medians(figures))) if args.check else 0
    return 1 if problems else code


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often each contender is measured (default: 5)")
    parser.add_argument("--rows", type=names_of(work.NAMES), default=[], help="comma-separated; default: all")
    parser.add_argument(
        "--contenders",
        "--peers",
        type=names_of(list(report.TITLES)),
        default=[],
        help=f"comma-separated, of {', '.join(report.TITLES)}; default: all that are installed",
    )
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="where bus.json and bus.svg go")
    parser.add_argument("--readme", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--check", action="store_true", help="hold the medians against the floors; 1 if one is missed")
    parser.add_argument("--check-only", action="store_true", help="the same for the bus.json of an earlier run")
    return parser.parse_args()


def names_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        given = text.split(",")
        if unknown := [name for name in given if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(known)}")
        return given

    return names


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


def interleaved(
    contenders: dict[str, Measure], rows: list[str], rounds: int
) -> tuple[dict[str, dict[str, list[float]]], list[str]]:
    """Each contender once a round, in an order that rotates: the figures by contender and row, and what went wrong."""
    figures: dict[str, dict[str, list[float]]] = {name: {} for name in contenders}
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


def check(verdicts: Iterable[checks.Verdict]) -> int:
    """Print each floor; 1 if one was missed."""
    found = list(verdicts)
    for verdict in found:
        print(verdict)
    counts = {word: sum(verdict.word == word for verdict in found) for word in ("pass", "FAIL", "not measured")}
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    return int(counts["FAIL"] > 0)


if __name__ == "__main__":
    sys.exit(main())
