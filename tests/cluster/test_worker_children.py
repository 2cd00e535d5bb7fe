"""Processes that workers leave behind, in sessions of their own: none outlives its worker, whichever way that ends."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Cluster, Project, lines
from unified import process
from unified.api.builder import DLJobBuilder
from unified.client.handle import JobHandle
from unified.protocol.records import NodeState
from unified.testing import LocalCluster, eventually

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("without_torch")]

CODE = """
import os, subprocess, sys, time
from pathlib import Path
from unified import current_worker

FOLDER = Path(os.environ["FOLDER"])
ENGINE = '''
import subprocess, time
print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
time.sleep(600)
'''

def note(pid):
    with (FOLDER / "pids").open("a") as file:
        print(pid, file=file)

def detach(*command):  # by a double fork
    if (child := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            note(os.getpid())
            if command:
                os.execvp(command[0], command)
            time.sleep(600)
        os._exit(0)
    os.waitpid(child, 0)

def work():
    detach()
    detach("env", "-i", "sleep", "600")
    note(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
    engine = [sys.executable, "-c", ENGINE]
    started = subprocess.Popen(engine, start_new_session=True, stdout=subprocess.PIPE, text=True)
    note(started.pid)
    note(int(started.stdout.readline()))
    with (FOLDER / "up").open("a") as file:
        print(os.getpid(), file=file)
    worker, end = current_worker(), FOLDER / "end"
    while not worker.should_stop and not end.exists():
        time.sleep(0.02)
    if worker.should_stop:
        return
    how = end.read_text()
    if how == "raise":
        raise ValueError("bad luck")
    if how == "exit":
        os._exit(3)
"""
NUM_CHILDREN = 5


def pids(folder: Path, name: str = "pids") -> list[int]:
    return [int(line) for line in lines(folder, name)]


def end_itself(how: str) -> Callable[[LocalCluster, JobHandle, Path], object]:
    def end(cluster: LocalCluster, handle: JobHandle, folder: Path) -> None:
        (folder / "end").write_text(how)

    return end


def kill_zygote(cluster: LocalCluster, handle: JobHandle, folder: Path) -> None:
    (worker,) = pids(folder, "up")
    found = process.facts(worker)
    assert found is not None
    os.kill(found.parent, signal.SIGKILL)


WAYS: dict[str, Callable[[LocalCluster, JobHandle, Path], object]] = {
    "it returns": end_itself("return"),
    "it raises": end_itself("raise"),
    "it exits at once": end_itself("exit"),
    "SIGKILL": lambda cluster, handle, folder: os.kill(pids(folder, "up")[0], signal.SIGKILL),
    "SIGTERM": lambda cluster, handle, folder: os.kill(pids(folder, "up")[0], signal.SIGTERM),
    "its job is stopped": lambda cluster, handle, folder: handle.stop(),
    "its job is killed": lambda cluster, handle, folder: handle.stop(force=True),
    "its job is suspended": lambda cluster, handle, folder: handle.suspend(),
    "its zygote is killed": kill_zygote,
    "its agent is stopped": lambda cluster, handle, folder: cluster.kill_agent(0, signal.SIGTERM),
    "its agent is killed": lambda cluster, handle, folder: cluster.kill_agent(0, signal.SIGKILL),
}


QUICK = ("SIGKILL", "its zygote is killed")


@pytest.mark.parametrize(
    "way", [*QUICK, *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS if way not in QUICK)]
)
def test_no_child_outlives_its_worker(way: str, local_cluster: Cluster, project: Project, tmp_path: Path) -> None:
    project(children=CODE)
    builder: Any = DLJobBuilder().device_per_node(1).device_type("CPU").global_env({"FOLDER": str(tmp_path)})
    builder = builder.workload("parent", "children.work").resource(cpu=0.1).max_restart(0)
    cluster = local_cluster(nodes=1, devices=1)
    handle = cluster.submit(builder.build(), "children")
    eventually(lambda: pids(tmp_path, "up"), timeout=100)
    # A child of a double fork notes its pid when its parent has long gone on.
    eventually(lambda: len(pids(tmp_path)) == NUM_CHILDREN, timeout=100, message="not all children noted their pids")
    children = pids(tmp_path)
    assert all(process.is_alive(pid) for pid in children)
    WAYS[way](cluster, handle, tmp_path)
    eventually(lambda: not any(process.is_alive(pid) for pid in children), timeout=100, message=f"{children} live")
    if way == "its agent is killed":  # its lease keeper, which tells of that, ends then
        eventually(lambda: any(node.state is NodeState.LOST for node in cluster.nodes), timeout=100)
