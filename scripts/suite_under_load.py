#!/usr/bin/env python3
"""Runs the suite N times while another process keeps each core busy, and counts which tests failed, and how.

    make test-under-load RUNS=20
    .venv/bin/python scripts/suite_under_load.py --runs 20 tests/io/bus -k relay

What follows the options goes to pytest; without it the suites of `make test` and `make test-processes` run. Each run
has a random order of its own. Reports, outputs and the summary (`summary.json`) are in out/under-load.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as tree
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINES = 3
"""Lines of a failure that are printed."""
BUSY = """
import os, sys
parent, core = int(sys.argv[1]), int(sys.argv[2])
os.sched_setaffinity(0, {core})
while os.getppid() == parent:  # it ends with its parent, even if that is killed
    sum(range(100_000))
"""


@dataclass(frozen=True)
class Failure:
    test: str
    text: str


@dataclass(frozen=True)
class Run:
    """One run of the suite."""

    seed: int
    exit_code: int
    num_tests: int
    failures: list[Failure]
    seconds: float

    @property
    def passed(self) -> bool:
        return self.exit_code == 0 and not self.failures


def failures_of(report: str) -> tuple[int, list[Failure]]:
    """Return the number of tests in a JUnit report, and those that failed or had an error."""
    cases = list(tree.fromstring(report).iter("testcase"))
    failures = [
        Failure(node_id(case.get("classname", ""), case.get("name", "")), problem.get("message") or problem.text or "")
        for case in cases
        for problem in case
        if problem.tag in ("failure", "error")
    ]
    return len(cases), failures


def node_id(classname: str, name: str) -> str:
    """Return what pytest takes: of `tests.io.test_x` and `test_y` it is tests/io/test_x.py::test_y."""
    module, _, inner = re.sub(r"(.*?\.test_\w+)\.?", r"\1\n", classname, count=1).partition("\n")
    return "::".join(part for part in (module.replace(".", "/") + ".py" if module else "", inner, name) if part)


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Return what is written as JSON: tests that failed, the most frequent first, with the first lines of each."""
    counts = Counter(failure.test for run in runs for failure in run.failures)
    return {
        "runs": len(runs),
        "passed": sum(run.passed for run in runs),
        "seeds_of_failed_runs": [run.seed for run in runs if not run.passed],
        "failures": [
            {
                "test": test,
                "count": count,
                "texts": list(
                    dict.fromkeys(first_lines(each.text) for run in runs for each in run.failures if each.test == test)
                ),
            }
            for test, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        ],
    }


def first_lines(text: str) -> str:
    return "\n".join(line.rstrip() for line in [line for line in text.splitlines() if line.strip()][:LINES])


def table(found: dict[str, Any]) -> str:
    """Return the summary for people."""
    lines = []
    if found["failures"]:
        width = max(len(each["test"]) for each in found["failures"])
        lines.append(f"{'test':{width}}  count  first lines of the failure")
        for each in found["failures"]:
            lines.append(f"{each['test']:{width}}  {each['count']:5}")
            lines += [f"    {line}" for text in each["texts"] for line in text.splitlines()]
    return "\n".join([*lines, f"{found['passed']} of {found['runs']} runs passed"])


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Keep each core busy with a process of its own, in a session of its own, which ends with this process."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", BUSY, str(os.getpid()), str(core)],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
        )
        for core in sorted(os.sched_getaffinity(0))
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def run_suite(arguments: Sequence[str], jobs: int | None, out: Path, output: Path) -> Run:
    """Run the suite once, as `make test-random` does."""
    seed = random.SystemRandom().randrange(1 << 32)
    report = out / "tests.xml"
    command = ["make", "--no-print-directory", "test-random", f"SEED={seed}", f"OUT={out}"]
    command.append(f"ARGS={shlex.join(arguments)}")
    if jobs is not None:
        command.append(f"PROCESSES={jobs}")
    began = time.monotonic()
    with output.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            exit_code = process.wait()
        except BaseException:
            end(process)
            raise
    num_tests, failures = failures_of(report.read_text()) if report.exists() else (0, [])
    if exit_code and not failures:
        tail = "\n".join(output.read_text().splitlines()[-LINES:])
        failures = [Failure(f"the run itself, see {output}", tail)]
    return Run(seed, exit_code, num_tests, failures, time.monotonic() - began)


def end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt pytest, so that its fixtures clean up, and kill what is still there after a while."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=20, help="how often (20)")
    parser.add_argument("--jobs", type=int, help="processes of pytest (as `make suite`: two a core)")
    parser.add_argument("--out", type=Path, default=ROOT / "out/under-load", help="folder of reports (out/under-load)")
    options, arguments = parser.parse_known_args()
    if options.runs < 1:
        parser.error(f"--runs is at least 1, not {options.runs}")
    out = options.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    runs: list[Run] = []
    try:
        with busy_cores():
            for number in range(1, options.runs + 1):
                runs.append(run := run_suite(arguments, options.jobs, out / f"run-{number}", out / f"run-{number}.log"))
                outcome = "passed" if run.passed else f"FAILED: {', '.join(each.test for each in run.failures)}"
                print(
                    f"run {number} of {options.runs}: {run.num_tests} tests in {run.seconds:.0f} s, {outcome}",
                    flush=True,
                )
    finally:
        found = summary(runs)
        (out / "summary.json").write_text(json.dumps(found, indent=2) + "\n")
        print(table(found), flush=True)
    return 0 if found["passed"] == options.runs else 1


if __name__ == "__main__":
    sys.exit(main())
