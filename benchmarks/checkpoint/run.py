"""Checkpoints: stall, throughput and memory, beside plain copies, writes and uploads. See benchmarks/README.md."""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks import program
from benchmarks.bus.ours import Figures
from benchmarks.bus.run import HERE, Measure, interleaved, run, touch
from benchmarks.bus.work import wanted
from benchmarks.checkpoint import report, work
from benchmarks.checkpoint.work import BUCKET, is_installed, store


def main() -> int:
    parser = program.parser(__doc__, work.NAMES)
    parser.add_argument("--mib", type=int, default=1024, help="size of the state (default: 1024)")
    parser.add_argument("--place", type=Path, help="where to save, on the disk to be measured (default: below TMPDIR)")
    args = parser.parse_args()

    def measure() -> tuple[program.Figures, list[str]]:
        touch(3 * args.mib)
        contenders: dict[str, Measure] = {name: partial(saves, name, args.mib, args.place) for name in work.TITLES}
        figures, problems = interleaved(contenders, args.rows, args.rounds)
        if not is_installed():
            problems.append("S3 was not measured: pip install 'moto[server]'")
        return figures, problems

    return program.run("checkpoint", args, measure, report, report.judged, mib=args.mib)


def saves(name: str, mib: int, place: Path | None, rows: list[str]) -> Figures:
    """One contender once: in a process for the disk, and in another, with a store of its own, for S3."""
    values: dict[str, float] = {}
    errors: list[str] = []
    command: list[str | Path] = [sys.executable, HERE / "checkpoint/contender.py", name, "--mib", str(mib)]
    with tempfile.TemporaryDirectory(prefix="unified-bench-", dir=place) as folder:
        asked = [*command, "--place", folder]
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
