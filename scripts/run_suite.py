#!/usr/bin/env python3
"""Runs pytest, and what failed once more: alone, one after the other, in a fresh process.

    .venv/bin/python scripts/run_suite.py --out out/test --processes 4 tests/io -k relay

What passes the second time is *flaky*: named at the end, with the first line of its first error, and in `flaky.txt`.
Up to five flaky tests pass; a sixth fails the run, and so does a test that fails twice. A flaky test is a bug all the
same.

A test that runs for 120 s (`--limit`) fails, with the stacks of all threads. One that cannot be interrupted takes its
process along 30 s later (`--grace`), with the stacks as well, and the other tests go on in a new process.

What follows the options goes to pytest. `--out` gets a JUnit report of each of the two runs, the counts
(`counts.json`) and `flaky.txt`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as tree
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PYTEST = "pytest"
"""The first argument of a process that runs pytest itself."""
MOST_FLAKY = 5
MOST_RETRIED = 20
"""With more failures than this the change is broken, and a second look at each tells nothing new."""


class Limits(NamedTuple):
    """Deadlines of one test."""

    limit_s: int
    grace_s: int
    """A test that is interrupted at its limit has so long until its process is ended."""


@dataclass
class Report:
    """What one run of pytest found, by the names of the tests."""

    passed: set[str] = field(default_factory=set)
    skipped: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    """The first line of the first error of each test."""


@dataclass
class Counts:
    passed: int = 0
    failed: int = 0
    flaky: int = 0
    skipped: int = 0
    seconds: float = 0.0


def read_report(path: Path) -> Report:
    """Read a JUnit report. A test that passed and left something behind is in it twice, and has failed."""
    report = Report()
    for case in tree.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        problems = [each for each in case if each.tag in ("failure", "error")]
        for problem in problems:
            lines = (problem.get("message") or problem.text or "").strip().splitlines()
            report.failed.setdefault(name, lines[0] if lines else "no message")
        if not problems:
            (report.passed if case.find("skipped") is None else report.skipped).add(name)
    report.passed -= report.failed.keys()
    report.skipped -= report.failed.keys()
    return report


class Scheduling:
    """The plugin that hands out tests where `--dist=loadfile` is given."""

    @staticmethod
    def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
        from xdist.scheduler import (
            LoadFileScheduling,
        )  # pytest warns if xdist is there before its plugins are looked for

        class ByFile(LoadFileScheduling):  # type: ignore[misc]
            """Hands out files in order. A test whose process died is not run again in the next, as xdist would."""

            def remove_node(self, node: Any) -> str | None:
                """Take a process that died from the list; return the test that it was running."""
                units = self.assigned_work[node].values()
                tests = [(unit, test) for unit in units for test, is_done in unit.items() if not is_done]
                if tests:
                    unit, test = tests[0]
                    unit[test] = True
                super().remove_node(node)
                return tests[0][1] if tests else None

        return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


def run_pytest(out: Path, name: str, limits: Limits, arguments: Sequence[str]) -> tuple[int, Report]:
    """Run pytest once; return its exit code and its report, which is empty if pytest did not come to one."""
    path = out / f"{name}.xml"
    command = [
        *(sys.executable, __file__, PYTEST, "--quiet", f"--junit-xml={path}", "-o", f"cache_dir={out / 'cache'}"),
        *("-o", f"timeout={limits.limit_s}", "-o", "timeout_method=signal"),
        *("-o", f"faulthandler_timeout={limits.limit_s + limits.grace_s}", "-o", "faulthandler_exit_on_timeout=true"),
        *arguments,
    ]
    code = subprocess.run(command, stdin=subprocess.DEVNULL).returncode
    return code, read_report(path) if path.exists() else Report()


def run_suite(out: Path, processes: int, limits: Limits, arguments: Sequence[str]) -> int:
    """Run the suite, and what failed once more; return the exit code."""
    began = time.monotonic()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    # A file's tests stay together and in order, and files are handed out in order: what ran before a test in its file
    # is the same in each run, and only the process that takes a file is not.
    parallel = [f"--numprocesses={processes}", "--dist=loadfile", "--no-loadscope-reorder"] if processes > 1 else []
    code, first = run_pytest(out, "tests", limits, [*parallel, *arguments])
    failed, flaky, again = dict(first.failed), {}, Report()
    if code == 1 and 0 < len(failed) <= MOST_RETRIED:
        print(f"\n=== {len(failed)} failed: once more, alone and in a fresh process", flush=True)
        _, again = run_pytest(out, "again", limits, ["--last-failed", "--last-failed-no-failures=none", *arguments])
        flaky = {name: error for name, error in failed.items() if name in again.passed}
        failed = {name: error for name, error in failed.items() if name not in flaky}
    seconds = time.monotonic() - began
    counts = Counts(len(first.passed) + len(flaky), len(failed), len(flaky), len(first.skipped), round(seconds, 1))
    (out / "counts.json").write_text(json.dumps(asdict(counts)) + "\n")
    (out / "flaky.txt").write_text("".join(f"{name}: {error}\n" for name, error in flaky.items()))

    print()
    for name, error in failed.items():
        print(f"FAILED{' twice' if name in again.failed else ''}: {name}: {error}")
    for name, error in flaky.items():
        print(f"FLAKY, passed when run alone: {name}: {error}")
    if code not in (0, 1) or (code == 1 and not first.failed):
        print(f"FAILED: pytest ended with exit code {code}")
    elif len(flaky) > MOST_FLAKY:
        print(f"FAILED: {len(flaky)} flaky tests, where at most {MOST_FLAKY} pass")
    elif not failed:
        code = 0
    print(f"{counts.passed} passed, {counts.failed} failed, {counts.skipped} skipped", flush=True)
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("out/test"), help="folder of the reports (out/test)")
    parser.add_argument("--processes", type=int, default=1, help="processes of pytest (1)")
    parser.add_argument("--limit", type=int, default=120, help="seconds that one test has (120)")
    parser.add_argument("--grace", type=int, default=30, help="seconds more until its process is ended (30)")
    options, arguments = parser.parse_known_args()
    return run_suite(options.out.resolve(), options.processes, Limits(options.limit, options.grace), arguments)


if __name__ == "__main__":
    if sys.argv[1:2] == [PYTEST]:
        sys.path[0] = os.getcwd()  # as `python -m pytest` has it
        sys.exit(pytest.main(sys.argv[2:], plugins=[Scheduling()]))
    sys.exit(main())
