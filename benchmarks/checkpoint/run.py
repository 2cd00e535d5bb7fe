"""Checkpoints: stall, throughput and memory, beside plain copies, writes and uploads. See benchmarks/README.md."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.bus.checks import medians
from benchmarks.bus.ours import Figures
from benchmarks.bus.run import HERE, README, Measure, check, interleaved, names_of, run, touch
from benchmarks.bus.work import wanted
from benchmarks.checkpoint import report, work
from benchmarks.checkpoint.work import BUCKET, is_installed, store
from benchmarks.launch.run import fill, machine

MARK = "<!-- filled from benchmarks/checkpoint/run.py -->"


def main() -> int:
    args = parse()
    if args.check_only:
        return check(report.judged(json.loads((args.out / "checkpoint.json").read_text())["medians"]))
    began_on = machine()
    touch(3 * args.mib)
    contenders: dict[str, Measure] = {name: partial(measure, name, args.mib, args.place) for name in work.TITLES}
    figures, problems = interleaved(contenders, args.rows, args.rounds)
    if not is_installed():
        problems.append("S3 was not measured: pip install 'moto[server]'")
    result = {
        "machine": began_on,
        "mib": args.mib,
        "rounds": args.rounds,
        "medians": medians(figures),
        "figures": figures,
        "problems": problems,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "checkpoint.json").write_text(json.dumps(result, indent=1))
    report.plot(medians(figures), args.out / "checkpoint.svg")
    report.show(result)
    if args.readme:
        fill(README, report.markdown(result), MARK)
    code = check(report.judged(medians(figures))) if args.check else 0
    return 1 if problems else code


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often each contender is measured (default: 5)")
    parser.add_argument("--rows", type=names_of(work.NAMES), default=[], help="comma-separated; default: all")
    parser.add_argument("--mib", type=int, default=1024, help="size of the state (default: 1024)")
    parser.add_argument("--place", type=Path, help="where to save, on the disk to be measured (default: below TMPDIR)")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="where checkpoint.json and .svg go")
    parser.add_argument("--readme", action="store_true", help="put the table into benchmarks/README.md")
    parser.add_argument("--check", action="store_true", help="hold the medians against the floors; 1 if one is missed")
    parser.add_argument("--check-only", action="store_true", help="the same for the checkpoint.json of an earlier run")
    return parser.parse_args()


def measure(name: str, mib: int, place: Path | None, rows: list[str]) -> Figures:
    """One contender once: in a process for the disk, and in another, with a store of its own, for S3."""
    values: dict[str, float] = {}
    errors: list[str] = []
    program: list[str | Path] = [sys.executable, HERE / "checkpoint/contender.py", name, "--mib", str(mib)]
    with tempfile.TemporaryDirectory(prefix="unified-bench-", dir=place) as folder:
        asked = [*program, "--place", folder]
        if wanted(*work.ON_DISK, rows=rows):
            _add(run(asked, []), values, errors)
        if name in work.WITH_STORE and is_installed() and wanted(*work.IN_STORE, rows=rows):
            with store() as environment:
                given = ["env", *(f"{name}={value}" for name, value in environment.items())]
                _add(run([*given, *asked, "--bucket", BUCKET], []), values, errors)
    return Figures(values, errors)


def _add(found: Figures, values: dict[str, float], errors: list[str]) -> None:
    values.update(found.values)
    errors += found.errors


if __name__ == "__main__":
    sys.exit(main())
