"""What scripts/suite_under_load.py says of its runs, and that what keeps the cores busy ends with it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from scripts.suite_under_load import Failure, Run, busy_cores, failures_of, node_id, summary, table
from unified.process import every_process
from unified.testing import eventually

REPORT = """<?xml version="1.0"?>
<testsuites><testsuite name="pytest">
<testcase classname="tests.io.test_a" name="test_x[relay]">
<failure message="AssertionError: late&#10;&#10;&#10;assert 1 == 2">...</failure></testcase>
<testcase classname="tests.io.test_a.TestGroup" name="test_y"><error message="failed on setup">...</error></testcase>
<testcase classname="tests.io.test_a" name="test_z"/>
<testcase classname="tests.io.test_a" name="test_s"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def test_failures_and_errors_of_a_report_are_found() -> None:
    num_tests, (failure, error) = failures_of(REPORT)
    assert num_tests == 4
    assert failure.test == "tests/io/test_a.py::test_x[relay]"
    assert failure.text == "AssertionError: late\n\n\nassert 1 == 2"
    assert error == Failure("tests/io/test_a.py::TestGroup::test_y", "failed on setup")
    assert node_id("", "tests/io/test_b.py") == "tests/io/test_b.py"


def test_the_summary_counts_each_test_and_has_each_text_once() -> None:
    late, late_again = Failure("t.py::a", "late\n\nassert 1 == 2\n  c\n  d"), Failure("t.py::a", "late by 2 s")
    gone = Failure("t.py::b", "gone")
    runs = [
        Run(1, 1, 9, [gone, late], 2.0),
        Run(2, 0, 9, [], 2.0),
        Run(3, 1, 9, [late], 2.0),
        Run(4, 1, 9, [late_again], 2.0),
    ]
    found = summary(runs)
    assert (found["runs"], found["passed"], found["seeds_of_failed_runs"]) == (4, 1, [1, 3, 4])
    assert found["failures"] == [
        {"test": "t.py::a", "count": 3, "texts": ["late\nassert 1 == 2\n  c", "late by 2 s"]},
        {"test": "t.py::b", "count": 1, "texts": ["gone"]},
    ]
    assert table(found).splitlines() == [
        "test     count  first lines of the failure",
        "t.py::a      3",
        "    late",
        "    assert 1 == 2",
        "      c",
        "    late by 2 s",
        "t.py::b      1",
        "    gone",
        "1 of 4 runs passed",
    ]
    assert table(summary(runs[1:2])) == "1 of 1 runs passed"


def busy_processes(parent: int) -> list[int]:
    return [each.pid for each in every_process() if each.parent == parent and each.is_alive]


def test_the_cores_are_busy_until_it_ends_also_if_it_is_killed() -> None:
    before = busy_processes(os.getpid())
    with busy_cores():
        assert len(busy_processes(os.getpid())) == len(before) + len(os.sched_getaffinity(0))
    assert busy_processes(os.getpid()) == before
    program = (
        "from scripts.suite_under_load import busy_cores\nwith busy_cores():\n    print('up', flush=True)\n    input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as script:
        assert script.stdout is not None
        assert script.stdout.readline() == b"up\n"
        busy = busy_processes(script.pid)
        assert busy
        script.send_signal(signal.SIGKILL)
    eventually(lambda: not [each for each in every_process() if each.pid in busy and each.is_alive])
