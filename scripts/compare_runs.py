#!/usr/bin/env python3
"""Runs the suites of `make test` and `make test-processes` twice and compares.

The same tests, in the same order in each file, and the same examples have to come.

    .venv/bin/python scripts/compare_runs.py                # what both run
    .venv/bin/python scripts/compare_runs.py tests/unit     # a part of it

Files are handed to the processes of pytest in the order of their names; only the process that takes a file differs.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
OUT = ROOT / "out/compare"


class Test(NamedTuple):
    test: str
    examples: int
    digest: str


def run(number: int, arguments: Sequence[str]) -> dict[str, list[Test]]:
    """Run the suite once; return the tests of each file in the order in which they ran."""
    folder = OUT / f"run-{number}"
    folder.mkdir(parents=True)
    command = ["make", "--no-print-directory", "suite", f"OUT={OUT / 'reports'}"]
    subprocess.run(
        [*command, f"ARGS={shlex.join(['-p', 'tests.support.run_record', *arguments])}"],
        cwd=ROOT,
        env={**os.environ, "RUN_RECORD": str(folder)},
        stdin=subprocess.DEVNULL,
    )
    files: dict[str, list[Test]] = {}
    for path in sorted(folder.glob("gw*.jsonl")):  # not what failed and ran once more
        for line in path.read_text().splitlines():
            test = Test(**json.loads(line))
            files.setdefault(test.test.partition("::")[0], []).append(test)
    return files


def differences(first: dict[str, list[Test]], second: dict[str, list[Test]]) -> list[str]:
    """Return a line for each file whose tests, order or examples differ."""
    lines = [f"{file}: only one of the runs has it" for file in sorted(first.keys() ^ second.keys())]
    for file in sorted(first.keys() & second.keys()):
        if [each.test for each in first[file]] != [each.test for each in second[file]]:
            lines.append(f"{file}: other tests, or another order")
            continue
        pairs = zip(first[file], second[file], strict=True)
        lines += [f"{one.test}: other examples" for one, other in pairs if one != other]
    return lines


def main() -> int:
    shutil.rmtree(OUT, ignore_errors=True)
    first, second = run(1, sys.argv[1:]), run(2, sys.argv[1:])
    found = differences(first, second)
    print("\n".join(found))
    tests = [each for file in first.values() for each in file]
    with_examples = [each for each in tests if each.examples]
    print(
        f"{len(first)} files, {len(tests)} tests, {len(with_examples)} of them with "
        f"{sum(each.examples for each in with_examples)} examples: {len(found) or 'no'} differences"
    )
    return 1 if found or not tests else 0


if __name__ == "__main__":
    sys.exit(main())
