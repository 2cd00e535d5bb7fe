"""Death and silence told apart, with real daemons: an agent that is killed, one that is stopped, one that hangs."""

import itertools
import os
import signal
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import Cluster, lines
from unified import process
from unified.client.handle import JobHandle
from unified.config.settings import Intervals
from unified.job.spec import EntryPoint, JobSpec, RoleSpec
from unified.protocol.records import WorkerState
from unified.testing import LocalCluster, eventually

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("without_torch")]

TICKING = '''
import os, sys, time

def tick():
    """Write a line a tick: which incarnation of which rank wrote it, on which node, and when."""
    name = f"{os.environ['RANK']} {os.getpid()} {os.environ['UNIFIED_AGENT_NODE']}"
    while True:
        with open("ticks", "a", buffering=1) as file:
            file.write(f"{name} {time.time():.3f}\\n")
        time.sleep(0.05)
'''


def ticking(folder: Path, total: int = 2) -> JobSpec:
    """Return a job of workers that run until they are stopped, and write down that they do."""
    (folder / "entry_of_test.py").write_text(textwrap.dedent(TICKING))
    entry = EntryPoint(kind="attribute", target="entry_of_test", attribute="tick")
    role = RoleSpec(name="w", kind="simple", entry_point=entry, total=total, max_restart=5)
    return JobSpec(
        name="ticking",
        roles=[role],
        node_num=2,
        device_per_node=2,
        accelerator_type="CPU",
        sys_path=[str(folder)],
        working_dir=str(folder),
        stop_grace_s=1.0,
        failover_exec=2,
    )


def incarnations(handle: JobHandle) -> list[int]:
    return [worker.incarnation for worker in handle.status().workers]


def all_run(handle: JobHandle) -> bool:
    return all(worker.state is WorkerState.RUNNING for worker in handle.status().workers)


@pytest.fixture
def stopped() -> Iterator[list[int]]:
    """Pids that a test stopped, which go on at its end."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        if process.is_alive(pid):
            os.kill(pid, signal.SIGCONT)


def running(cluster: LocalCluster, folder: Path) -> JobHandle:
    handle = cluster.submit(ticking(folder))
    eventually(lambda: all_run(handle), timeout=100, message="the workers did not run")
    return handle


def node_of_first(cluster: LocalCluster, handle: JobHandle) -> int:
    """Index of the node that has the job's first worker."""
    node = handle.status().workers[0].node
    return [one.node for one in cluster.nodes].index(node or "")


def test_a_killed_agent_is_lost_long_before_its_lease_ends(local_cluster: Cluster, tmp_path: Path) -> None:
    cluster = local_cluster(nodes=2, devices=2, env={"UNIFIED_LEASE_S": "600"})
    handle = running(cluster, tmp_path)
    index = node_of_first(cluster, handle)
    pid = cluster.kill_agent(index)
    eventually(lambda: cluster.nodes[index].state == "LOST", timeout=100, message="the node is not lost")
    assert cluster.nodes[index].reason == f"its agent (pid {pid}) ended"
    eventually(lambda: all_run(handle) and 1 in incarnations(handle), timeout=100, message="nothing was replaced")
    ticks = [line.split() for line in lines(tmp_path, "ticks")]
    for rank in {tick[0] for tick in ticks}:
        mine = [tick for tick in ticks if tick[0] == rank]
        assert len({tick[1] for tick in mine}) <= 2
        changes = sum(one[1] != other[1] for one, other in itertools.pairwise(mine))
        assert changes == len({tick[1] for tick in mine}) - 1, "two incarnations of one rank wrote at the same time"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stopped_s", "lease_s"),
    [pytest.param(5.0, 4.0, id="longer-than-its-lease"), pytest.param(10.0, Intervals().lease_s, id="ten-seconds")],
)
def test_an_agent_that_is_stopped_for_a_while_loses_no_incarnation(
    local_cluster: Cluster, tmp_path: Path, stopped: list[int], stopped_s: float, lease_s: float
) -> None:
    cluster = local_cluster(nodes=2, devices=2, env={"UNIFIED_LEASE_S": str(lease_s)})
    handle = running(cluster, tmp_path)
    stopped += cluster.agent_pids
    for pid in cluster.agent_pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(stopped_s)
    assert {node.state for node in cluster.nodes} == {"ALIVE"}
    for pid in cluster.agent_pids:
        os.kill(pid, signal.SIGCONT)
    seen = len(lines(tmp_path, "ticks"))
    eventually(lambda: len(lines(tmp_path, "ticks")) > seen + 50, message="the workers do not go on")
    assert incarnations(handle) == [0, 0]
    assert {node.state for node in cluster.nodes} == {"ALIVE"}


@pytest.mark.slow
def test_a_host_that_stands_still_for_longer_than_its_lease_comes_back_without_its_workers(
    local_cluster: Cluster, tmp_path: Path, stopped: list[int]
) -> None:
    """All of a node is frozen, its lease keeper too, as a virtual machine may be."""
    cluster = local_cluster(nodes=2, devices=2, env={"UNIFIED_LEASE_S": "4"})
    handle = running(cluster, tmp_path)
    index = node_of_first(cluster, handle)
    agent = cluster.agent_pids[index]
    old = cluster.workers(handle)
    stopped += [agent, *(child.pid for child in psutil.Process(agent).children(recursive=True))]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    eventually(lambda: cluster.nodes[index].state == "LOST", timeout=100, message="the node is not lost")
    eventually(lambda: all_run(handle) and 1 in incarnations(handle), timeout=100, message="nothing was replaced")
    for pid in reversed(stopped):
        if pid == agent:
            time.sleep(0.5)  # the keeper is the first to run again
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: cluster.nodes[index].state == "ALIVE", timeout=100, message="the node does not come back")
    assert cluster.agent_pids[index] == agent
    frozen = [pid for pid in old.values() if pid in stopped]
    assert frozen
    eventually(
        lambda: not any(process.is_alive(pid) for pid in frozen), timeout=100, message="an old incarnation goes on"
    )
    after = incarnations(handle)
    time.sleep(2.0)
    assert incarnations(handle) == after, "the return disturbs nobody"


@pytest.mark.slow
def test_an_agent_that_hangs_is_ended_by_its_keeper_before_others_replace_its_workers(
    local_cluster: Cluster, tmp_path: Path, stopped: list[int]
) -> None:
    cluster = local_cluster(nodes=2, devices=2, env={"UNIFIED_LEASE_S": "5"})
    handle = running(cluster, tmp_path)
    index = node_of_first(cluster, handle)
    pid = cluster.kill_agent(index, signal.SIGSTOP)
    stopped.append(pid)
    eventually(lambda: not process.is_alive(pid), timeout=100, message="an agent that hangs lives on")
    eventually(lambda: all_run(handle) and 1 in incarnations(handle), timeout=100, message="nothing was replaced")
    assert cluster.nodes[index].reason == f"its agent (pid {pid}) ended"
    ended = [
        line for line in (cluster.home / f"node-{index + 1}.log").read_text().splitlines() if "lease-ended" in line
    ]
    assert "the agent has done nothing for" in ended[0]
