#!/usr/bin/env python3
"""Runs every suite there is, goes on after a failure, and ends with a table.

    make test-all
    .venv/bin/python scripts/test_all.py slow soak      # these two alone

`make test` decides and is the same each time; this explores. It is run by hand on the commit that ends an issue. Each
suite installs what it needs. One of which no test could run here says why, and does not count as passed. Reports and
outputs are in out/test-all.
"""

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as tree
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / "out/test-all"
SUITES = [
    *("slow", "netns", "slurm", "systemd", "browser", "training"),
    *("py3.12", "py3.13", "torch2.14.1", "examples", "engines", "soak", "random"),
]
WITH_ENGINES = "grpo_vllm"
EXAMPLES = sorted({path.parent.name for path in ROOT.glob("examples/*/submit.py")} - {WITH_ENGINES})
SOAK_S = 60


@dataclass
class Row:
    suite: str
    passed: int = 0
    failed: int = 0
    flaky: int = 0
    skipped: int = 0
    seconds: float = 0.0
    note: str = ""


def make(suite: str, target: list[str]) -> int:
    """Run a target of the Makefile; return its exit code. Its output goes to a file and to the terminal."""
    print(f"\n=== {suite}: make {' '.join(target)}", flush=True)
    with (OUT / f"{suite}.log").open("a") as log:
        process = subprocess.Popen(
            ["make", "--no-print-directory", *target],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            print(line, end="", flush=True)
        return process.wait()


def pytest_suite(suite: str, seed: int) -> Row:
    """Run a suite whose counts scripts/run_suite.py writes."""
    out = OUT / suite
    code = make(suite, [f"test-{suite}", f"OUT={out}", *([f"SEED={seed}"] if suite == "random" else [])])
    row = Row(suite)
    if (out / "counts.json").exists():
        row = Row(suite, **json.loads((out / "counts.json").read_text()))
    if not row.passed and not row.failed:
        row.note = f"did not run here: {why_skipped(out / 'tests.xml') or f'see out/test-all/{suite}.log'}"
    elif code and not row.failed:
        row.note = f"ended with exit code {code}, see out/test-all/{suite}.log"
    elif suite == "random":
        row.note = f"make test-random SEED={seed}"
    return row


def why_skipped(report: Path) -> str:
    """Return the most frequent reason for which tests were skipped; empty if none was."""
    if not report.exists():
        return ""
    cases = tree.parse(report).getroot().iter("skipped")
    reasons = Counter(re.sub(r"^.*?: Skipped: ", "", case.get("message") or case.text or "") for case in cases)
    return reasons.most_common(1)[0][0] if reasons else ""


def commands(suite: str, targets: list[list[str]]) -> Row:
    """Run targets that pass or fail as a whole."""
    row = Row(suite)
    for target in targets:
        if code := make(suite, target):
            row.failed += 1
            row.note += f"{'; ' if row.note else ''}make {' '.join(target)} ended with exit code {code}"
        else:
            row.passed += 1
    return row


def run(suite: str, seed: int) -> Row:
    began = time.monotonic()
    match suite:
        case "examples":
            row = commands(suite, [["example", f"N={name}"] for name in EXAMPLES])
        case "engines":
            row = commands(suite, [["example", f"N={WITH_ENGINES}"]])
        case "soak":
            row = commands(suite, [["soak", f"SECONDS={SOAK_S}"]])
        case _:
            row = pytest_suite(suite, seed)
    row.seconds = time.monotonic() - began
    return row


def table(rows: list[Row]) -> str:
    lines = [f"{'suite':10} {'passed':>7} {'failed':>7} {'flaky':>6} {'skipped':>8} {'seconds':>8}"]
    for row in rows:
        counts = f"{row.suite:10} {row.passed:7} {row.failed:7} {row.flaky:6} {row.skipped:8} {row.seconds:8.0f}"
        lines.append(f"{counts}  {row.note}".rstrip())
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("suites", nargs="*", choices=[*SUITES, []], help=f"all of them: {', '.join(SUITES)}")
    parser.add_argument("--seed", type=int, help="of the random order and examples (drawn)")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    rows: list[Row] = []
    try:
        for suite in options.suites or SUITES:
            rows += [run(suite, seed)]
    finally:  # also after Ctrl-C
        written = table(rows)
        (OUT / "table.txt").write_text(written + "\n")
        print(f"\n{written}", flush=True)
    passed = all(row.passed and not row.failed and "exit code" not in row.note for row in rows)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
