"""`unified logs` of real jobs: lines by pattern and time, and those of a node that is gone."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Cluster, Project
from unified.api.builder import DLJobBuilder
from unified.cli.main import main
from unified.client.handle import JobHandle
from unified.testing import LocalCluster, eventually

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("without_torch")]

Show = Callable[..., tuple[int, str, str]]

CODE = """
import os, sys, time

def run():
    rank = os.environ["RANK"]
    for number in range(5000):
        print(f"rank {rank} line {number} needle" if number % 1000 == 7 else f"rank {rank} line {number}")
    print("trouble", rank, file=sys.stderr, flush=True)
    sys.stdout.flush()
    time.sleep(3)
    print(f"rank {rank} is late", flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Show:
    """Run `unified logs`; return exit code, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["logs", *words])
        return code, *capsys.readouterr()

    return run


def printing(cluster: LocalCluster, project: Project) -> JobHandle:
    project(printing_job=CODE)
    builder: Any = DLJobBuilder().device_per_node(2).node_num(1).device_type("CPU")
    return cluster.submit(builder.workload("w", "printing_job.run").total(2).max_restart(9).build(), "printing")


def test_lines_are_found_by_pattern_and_by_time(local_cluster: Cluster, project: Project, show: Show) -> None:
    cluster = local_cluster(nodes=1, devices=2)
    handle = printing(cluster, project)
    master = ("--master", cluster.address)
    found = [f"[w-{rank}] rank {rank} line {number} needle" for rank in (0, 1) for number in range(7, 5000, 1000)]

    def needles() -> list[str]:
        return sorted(show("printing", *master, "--grep", r"needle$")[1].splitlines())

    eventually(lambda: needles() == sorted(found), timeout=100)
    assert show("printing", "w-1", *master, "--grep", "needle", "--tail", "2")[1].splitlines() == found[-2:]
    late = ["[w-0] rank 0 is late", "[w-1] rank 1 is late"]
    eventually(lambda: sorted(show("printing", *master, "--grep", "late")[1].splitlines()) == late, timeout=100)
    lines = show("printing", *master, "--since", "1d")[1].splitlines()
    assert len(lines) == 2 * 5002
    at = time.time()
    assert set(show("printing", *master, "--since", "0s")[1].splitlines()) <= set(late)  # those of this very second
    time.sleep(1.1)
    assert show("printing", *master, "--since", "0s") == (0, "", "")
    assert len(show("printing", *master, "--until", f"{time.strftime('%FT%T', time.localtime(at))}")[1]) > 100_000
    code, _, said = show("printing", *master, "--grep", "(a+")
    assert code == 2
    assert "is no regular expression" in said
    code, out, _ = show("printing", *master, "--grep", "x" * 501)
    assert "longer than 500" in out
    assert show("printing", *master, "--since", "yesterday")[0] == 2
    handle.stop(force=True)


@pytest.mark.slow
def test_the_end_of_a_log_is_shown_when_its_node_is_gone(local_cluster: Cluster, project: Project, show: Show) -> None:
    cluster = local_cluster(nodes=2, devices=2)
    handle = printing(cluster, project)
    logs = ("printing", "--master", cluster.address)
    eventually(lambda: show(*logs, "--grep", "late")[1].count("late") == 2, timeout=100)
    time.sleep(6)  # what was printed is sent after 5 s
    lost = handle.status().workers[1].node
    cluster.kill_agent([node.node for node in cluster.nodes].index(lost))
    eventually(lambda: any(node.state == "LOST" for node in cluster.nodes), timeout=100)
    code, out, _ = show(*logs, "w-1")
    assert code == 0
    assert "[w-1] rank 1 is late" in out.splitlines()
    assert "is not connected: this is the end of the log" in out
    assert "[w-1] trouble 1" in out.splitlines()
    assert "[w-1] rank 1 line 4999" in out.splitlines()
    code, out, _ = show(*logs, "w-1", "--grep", "late")
    assert [line for line in out.splitlines() if "…" not in line] == ["[w-1] rank 1 is late"]
    handle.stop(force=True)


TAKES_TURNS = """
import os, time
from pathlib import Path

def run():
    role = os.environ["ROLE"]
    Path("b-1").touch()
    for turn in range(4):
        while not Path(f"a{turn}" if role == "b" else f"b{turn - 1}").exists():
            time.sleep(0.01)
        print(f"turn {turn}", flush=True)
        time.sleep(0.5)
        Path(f"{role}{turn}").touch()
"""


def test_lines_of_several_roles_are_in_the_order_of_time(
    local_cluster: Cluster, project: Project, show: Show, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    project(turns_job=TAKES_TURNS)
    cluster = local_cluster(nodes=2, devices=1)
    builder: Any = DLJobBuilder().device_per_node(1).node_num(2).device_type("CPU")
    for role in "ab":
        builder.workload(role, "turns_job.run").total(1).per_group(1).env({"ROLE": role})
    handle = cluster.submit(builder.build(), "turns")
    assert handle.wait(timeout=200) == 0
    logs = ("turns", "--master", cluster.address)
    in_turn = [f"[{role}-0] turn {turn}" for turn in range(4) for role in "ab"]
    assert show(*logs)[1].splitlines() == in_turn
    assert show(*logs, "--tail", "2")[1].splitlines() == in_turn[4:]
    lines = show(*logs, "--times", "--grep", "turn [12]")[1].splitlines()
    assert [line.partition(" ")[2] for line in lines] == in_turn[2:6]
    at = [line.partition(" ")[0] for line in lines]
    assert at == sorted(at)
    since = show(*logs, "--since", at[2])[1].splitlines()
    assert since[-4:] == in_turn[4:], "a time that was shown can be asked for"
    found = [json.loads(line) for line in show(*logs, "--json")[1].splitlines()]
    times = [each["at"] for each in found]
    assert times == sorted(times)
    assert all(later - earlier > 0.3 for earlier, later in pairwise(times))


EQUAL = """
import os, time

def run():
    for step in range(3):
        print(f"step {step} done", flush=True)
        print(f"loss of rank {os.environ['RANK']}", flush=True)
"""


def on_a_terminal(*words: str) -> list[str]:
    """Run a command on a terminal of its own, and return what it shows."""
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-m", "unified", *words], stdout=theirs, stderr=theirs, stdin=theirs):
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: the command has ended
            while data := os.read(ours, 65536):
                shown += data
    os.close(ours)
    return shown.decode().replace("\r\n", "\n").splitlines()


def test_equal_lines_of_many_workers_are_one_on_a_terminal(local_cluster: Cluster, project: Project) -> None:
    project(equal_job=EQUAL)
    cluster = local_cluster(nodes=1, devices=4)
    builder: Any = DLJobBuilder().device_per_node(4).node_num(1).device_type("CPU")
    handle = cluster.submit(builder.workload("w", "equal_job.run").total(4).build(), "equal")
    assert handle.wait(timeout=200) == 0
    logs = ("logs", "equal", "--master", cluster.address)
    whole = [f"[w-{rank}] step {step} done" for rank in range(4) for step in range(3)]
    whole += [f"[w-{rank}] loss of rank {rank}" for rank in range(4)] * 3
    piped = subprocess.run([sys.executable, "-m", "unified", *logs], capture_output=True, text=True, timeout=100)
    assert sorted(piped.stdout.splitlines()) == sorted(whole)
    assert sorted(on_a_terminal(*logs, "--no-fold")) == sorted(whole)
    shown = on_a_terminal(*logs)
    found = [re.fullmatch(r"\[w(?:-\d| [\d, -]+ ×(\d))\] step (\d) done", line) for line in shown]
    counts = [sum(int(each[1] or 1) for each in found if each and each[2] == step) for step in "012"]
    assert counts == [4, 4, 4]
    assert len(shown) < len(whole)
    assert len([line for line in shown if "loss" in line]) == 12
