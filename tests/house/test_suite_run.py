"""The script of `make test`, with planted tests: such as fail, fail once, hang, or end their process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
PASSES = "def test_passes() -> None:\n    pass\n"
FAILS = "def test_fails() -> None:\n    assert 1 == 2\n"
FLAKY = """
from pathlib import Path

import pytest


@pytest.mark.parametrize("number", range({count}))
def test_flaky(number):
    mark = Path(__file__).with_name(f"ran-{{number}}")
    ran = mark.exists()
    mark.touch()
    assert ran, f"the first run of {{number}}"
"""
HANGS = """
import time


def sleeps_for_ever():
    while True:
        time.sleep(0.1)


def test_hangs():
    sleeps_for_ever()
"""
HANGS_HARD = """
import ctypes, signal


def holds_the_interpreter():
    ctypes.PyDLL(None).pause()  # with the lock of the interpreter: no handler of a signal runs


def test_hangs_hard():
    signal.setitimer(signal.ITIMER_REAL, 0)  # as if it were lost
    holds_the_interpreter()


def test_after_it():
    pass
"""


def run(folder: Path, tests: dict[str, str], *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """Run planted tests; return the exit code, the output and the counts."""
    for name, text in tests.items():
        (folder / name).write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p xdist -p timeout\nfilterwarnings = error\n")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/run_suite.py", "--out", "out", *arguments],
        cwd=folder,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # imports take most of the time
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout, json.loads((folder / "out/counts.json").read_text())


def test_all_pass(tmp_path: Path) -> None:
    code, output, counts = run(tmp_path, {"test_a.py": PASSES})
    assert code == 0, output
    assert output.splitlines()[-1] == "1 passed, 0 failed, 0 skipped"
    assert (counts["passed"], counts["failed"], counts["flaky"]) == (1, 0, 0)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_that_fails_twice_fails_the_run(tmp_path: Path, processes: str) -> None:
    code, output, counts = run(tmp_path, {"test_a.py": PASSES, "test_b.py": FAILS}, "--processes", processes)
    assert code == 1, output
    assert "FAILED twice: test_b::test_fails: assert 1 == 2" in output
    assert output.splitlines()[-1] == "1 passed, 1 failed, 0 skipped"
    assert (counts["passed"], counts["failed"], counts["flaky"]) == (1, 1, 0)


def test_that_fails_once_is_named_and_passes(tmp_path: Path) -> None:
    code, output, counts = run(tmp_path, {"test_a.py": PASSES, "test_b.py": FLAKY.format(count=5)}, "--processes", "2")
    assert code == 0, output
    assert "FLAKY, passed when run alone: test_b::test_flaky[3]: AssertionError: the first run of 3" in output
    assert len((tmp_path / "out/flaky.txt").read_text().splitlines()) == 5
    assert output.splitlines()[-1] == "6 passed, 0 failed, 0 skipped"
    assert (counts["passed"], counts["failed"], counts["flaky"]) == (6, 0, 5)


def test_six_that_fail_once_fail_the_run(tmp_path: Path) -> None:
    code, output, counts = run(tmp_path, {"test_a.py": PASSES, "test_b.py": FLAKY.format(count=6)})
    assert code == 1, output
    assert "FAILED: 6 flaky tests, where at most 5 pass" in output
    assert (counts["passed"], counts["failed"], counts["flaky"]) == (7, 0, 6)


def test_that_hangs_is_ended_with_its_stacks_and_the_others_run(tmp_path: Path) -> None:
    tests = {"test_a.py": HANGS, "test_b.py": PASSES}
    code, output, counts = run(tmp_path, tests, "--processes", "2", "--limit", "1")
    assert code == 1, output
    assert "in sleeps_for_ever" in output or "sleeps_for_ever()" in output
    assert "FAILED twice: test_a::test_hangs: Failed: Timeout" in output
    assert (counts["passed"], counts["failed"]) == (1, 1)


def test_that_cannot_be_interrupted_takes_its_process_along_with_its_stacks(tmp_path: Path) -> None:
    tests = {"test_a.py": HANGS_HARD, "test_b.py": PASSES}
    code, output, counts = run(tmp_path, tests, "--processes", "2", "--limit", "1", "--grace", "1")
    assert code == 1, output
    assert "in holds_the_interpreter" in output
    assert "FAILED: test_a::test_hangs_hard" in output
    assert counts["passed"] == 2, output


def test_that_does_not_load_fails_the_run(tmp_path: Path) -> None:
    code, output, _ = run(tmp_path, {"test_a.py": "import nothing_of_this_name", "test_b.py": PASSES})
    assert code != 0, output
    assert "nothing_of_this_name" in output


def test_run_without_a_test_fails(tmp_path: Path) -> None:
    code, output, _ = run(tmp_path, {"test_a.py": ""})
    assert code == 5, output
    assert "FAILED: pytest ended with exit code 5" in output
