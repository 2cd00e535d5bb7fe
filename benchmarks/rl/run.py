"""What a loop of reinforcement learning asks of a runtime, beside Ray. See benchmarks/README.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import program
from benchmarks.bus import floor
from benchmarks.bus.ours import Figures
from benchmarks.bus.run import interleaved, interpreter, is_installed, touch
from benchmarks.bus.run import run as run_program
from benchmarks.rl import ours, report, work

HERE = Path(__file__).parent
RAY = HERE.parent / "peers/ray_rl.py"
VERSIONS = """
import sys, json
from importlib.metadata import version, PackageNotFoundError
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        found[name] = ""
print(json.dumps(found))
"""
WARM_DICTIONARIES = 3
Measure = Callable[[list[str]], Figures]


def main() -> int:
    parser = program.parser(__doc__, work.NAMES)
    known, sizes = [*report.CONTENDERS], work.Sizes()
    parser.add_argument("--contenders", type=program.names_of(known), default=known, help=f"of {', '.join(known)}")
    parser.add_argument("--mib", type=int, default=sizes.mib, help="of one dictionary (default: 1024)")
    parser.add_argument("--calls", type=int, default=sizes.calls, help="of one reading (default: 2000)")
    parser.add_argument("--workers", type=int, default=sizes.workers, help="that start (default: 8)")
    parser.add_argument("--imports", default=sizes.imports, help=f"of these workers (default: {sizes.imports})")
    parser.add_argument("--settle", type=float, default=sizes.settle_s, help="idle seconds at first (default: 13)")
    args = parser.parse_args()
    if set(args.rows) & {row.name for row in work.ROWS if row.plain}:
        args.rows.append("start")  # beside which they are shown
    sizes = work.Sizes(args.mib, args.calls, args.workers, args.imports, args.settle)
    contenders, versions, missing = chosen(args.contenders, sizes)
    loads: list[float] = []

    def measure() -> tuple[program.Figures, list[str]]:
        touch(WARM_DICTIONARIES * sizes.mib)
        found = interleaved(contenders, args.rows, args.rounds)
        loads.append(round(os.getloadavg()[0], 2))
        return found

    more = {"sizes": sizes._asdict(), "versions": versions, "missing": missing, "loads": loads}
    return program.run("rl", args, measure, report, report.verdicts, **more)


def chosen(asked: list[str], sizes: work.Sizes) -> tuple[dict[str, Measure], dict[str, str], list[str]]:
    """Return what to measure, the versions of packages, and why a contender is left out.

    Raises:
        SystemExit: the packages are not of one version in both environments.
    """
    ways: dict[str, Measure] = {
        "unified": partial(ours.measure, sizes),
        "ray": partial(run_program, [interpreter("ray"), RAY, sizes.text()]),
        "bare": partial(run_program, [sys.executable, HERE / "bare.py", sizes.text()], env=floor.environment()),
    }
    missing = ["ray"] if "ray" in asked and not is_installed("ray") else []
    wanted = {name: way for name, way in ways.items() if name in asked and name not in missing}
    pythons = {name: interpreter(name) if name == "ray" else Path(sys.executable) for name in wanted}
    imported = {name.partition(".")[0] for name in sizes.imports.split(",")} - sys.stdlib_module_names
    found = {name: versions(python, ["numpy", *sorted(imported)]) for name, python in pythons.items()}
    first = next(iter(found.values()))
    if "" in first.values() or any(each != first for each in found.values()):
        sys.exit(f"packages are missing, or their versions differ; `make bench-rl` installs them: {found}")
    return wanted, {**first, **(versions(pythons["ray"], ["ray"]) if "ray" in wanted else {})}, missing


def versions(python: Path, packages: list[str]) -> dict[str, str]:
    """Return the versions of packages in an environment; one that is not there has none."""
    return dict(json.loads(subprocess.check_output([python, "-c", VERSIONS, *packages], text=True)))


if __name__ == "__main__":
    sys.exit(main())
