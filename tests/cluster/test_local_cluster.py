"""The fixture for tests, on real daemons: a job from start to end, and that it notices what is left."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.conftest import Cluster
from unified import process
from unified.client.connection import MasterConnection
from unified.client.handle import JobHandle
from unified.job.spec import EntryPoint, JobSpec, Resources, RoleSpec
from unified.protocol.records import Stage, WorkerState
from unified.testing import SHARED_MEMORY, LocalCluster, eventually

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("without_torch")]

ENTRY = '''
import os, signal, subprocess, sys, time

def hello():
    print("hello from", os.environ["RANK"], flush=True)

def fail():
    raise KeyError("no such thing")

def pause():
    while True:
        signal.pause()

def share():
    from unified import current_worker, shared_empty

    shared = [shared_empty(300_000) for _ in range(3)]
    print(f"shares {current_worker().bus.inbox_id}", flush=True)
    pause()

def detach():
    """Leave a process that is in nobody's group and forgets where it came from."""
    script = "import os, signal; os.fork() and os._exit(0); os.setsid(); signal.pause()"
    subprocess.run([sys.executable, "-c", script])
'''


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., JobSpec]:
    """A job of simple workers that run a function of a module which is there for this test alone."""
    (tmp_path / "entry_of_test.py").write_text(ENTRY)

    def make(function: str, total: int = 2, **fields: object) -> JobSpec:
        role = RoleSpec(
            name="worker",
            kind="simple",
            entry_point=EntryPoint(kind="attribute", target="entry_of_test", attribute=function),
            total=total,
            resources=Resources(accelerator=1.0),
            max_restart=0,
        )
        return JobSpec(
            name=function,
            roles=[role],
            node_num=2,
            device_per_node=2,
            accelerator_type="CPU",
            sys_path=[str(tmp_path)],
            working_dir=str(tmp_path),
            stop_grace_s=1.0,
            **fields,  # type: ignore[arg-type]  # whatever the test says
        )

    return make


def running(cluster: LocalCluster, handle: JobHandle, count: int) -> dict[str, int]:
    """Pids of a job's workers, once that many run."""

    def find() -> bool:
        status = handle.status()
        assert status.stage != Stage.STOPPED, status.reason
        return sum(worker.state == WorkerState.RUNNING for worker in status.workers) == count

    eventually(find, timeout=100, message="the workers did not run")
    return cluster.workers(handle)


@pytest.mark.smoke
def test_a_job_runs_and_its_output_can_be_read(local_cluster: Cluster, make: Callable[..., JobSpec]) -> None:
    cluster = local_cluster(nodes=2, devices=1)
    assert [node.node for node in cluster.nodes] == ["node-1", "node-2"]
    handle = cluster.submit(make("hello"))
    assert handle.wait(timeout=200) == 0
    assert sorted(handle.logs()) == ["[worker-0] hello from 0", "[worker-1] hello from 1"]
    assert {worker.node for worker in handle.status().workers} == {"node-1", "node-2"}


def test_a_failure_names_worker_limit_and_traceback(local_cluster: Cluster, make: Callable[..., JobSpec]) -> None:
    cluster = local_cluster(nodes=1, devices=2)
    handle = cluster.submit(make("fail"))
    assert handle.wait(timeout=200) == 1
    end = handle.status().end
    assert end is not None
    assert end.failure.summary == "KeyError: 'no such thing'"
    assert 'raise KeyError("no such thing")' in end.failure.traceback
    assert "max_restart" in end.limit
    assert Path(end.log_file).is_file()


@pytest.mark.slow
def test_a_killed_agent_takes_its_workers_with_it(local_cluster: Cluster, make: Callable[..., JobSpec]) -> None:
    cluster = local_cluster(nodes=2, devices=1)
    handle = cluster.submit(make("pause"))
    workers = running(cluster, handle, 2)
    lost = {worker.name for worker in handle.status().workers if worker.node == "node-1"}
    cluster.kill_agent(0)
    eventually(
        lambda: not any(process.is_alive(workers[name]) for name in lost),
        timeout=100,
        message="workers outlived the agent",
    )
    eventually(lambda: [node.state for node in cluster.nodes] == ["LOST", "ALIVE"], message="the node is not lost")
    handle.stop(force=True)
    assert handle.wait(timeout=200) == 130


def sharing(cluster: LocalCluster, make: Callable[..., JobSpec]) -> Callable[[], list[Path]]:
    """Start a worker with three segments of shared memory; return a function that lists those that are there."""
    handle = cluster.submit(make("share", total=1))
    (line,) = eventually(lambda: [*handle.logs()], timeout=100)
    pattern = f"unified-{line.rpartition(' ')[2]}-*"
    assert len([*SHARED_MEMORY.glob(pattern)]) == 3
    return lambda: [*SHARED_MEMORY.glob(pattern)]


def test_the_lease_keeper_of_a_killed_agent_removes_the_shared_memory_of_its_workers(
    local_cluster: Cluster, make: Callable[..., JobSpec]
) -> None:
    cluster = local_cluster(nodes=1, devices=2)
    segments = sharing(cluster, make)
    cluster.kill_agent(0)
    eventually(lambda: not segments(), timeout=100)
    eventually(lambda: len(cluster.processes()) == 1, timeout=100, message="more than the master is left")


def test_a_cluster_that_ends_removes_the_shared_memory_that_killed_agents_left(
    local_cluster: Cluster, make: Callable[..., JobSpec]
) -> None:
    cluster = local_cluster(nodes=1, devices=2)
    segments = sharing(cluster, make)
    (keeper,) = [each for each in cluster.processes() if "lease keeper" in each]
    os.kill(int(keeper.split()[0]), signal.SIGKILL)
    cluster.kill_agent(0)
    cluster.stop()
    assert segments() == []


@pytest.mark.slow
def test_a_job_outlives_its_driver(local_cluster: Cluster, make: Callable[..., JobSpec], tmp_path: Path) -> None:
    cluster = local_cluster(nodes=1, devices=2)
    (tmp_path / "forever.py").write_text("import signal\nwhile True: signal.pause()\n")
    command = [sys.executable, "-m", "unified", "run", "--name=forever", "--master", cluster.address, "forever.py"]
    driver = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with MasterConnection(cluster.address) as connection:
        handle = JobHandle(connection, "forever")
        eventually(lambda: [job for job in cluster.jobs if job.stage == Stage.RUNNING], timeout=100)
        driver.kill()
        driver.wait()
        pids = running(cluster, handle, 1)
        assert all(process.is_alive(pid) for pid in pids.values())
        handle.stop()
        assert handle.wait(timeout=200) == 130
    eventually(lambda: not any(process.is_alive(pid) for pid in pids.values()), message="a worker outlived its job")


@pytest.mark.slow
def test_what_a_worker_left_is_named(tmp_path: Path, make: Callable[..., JobSpec]) -> None:
    cluster = LocalCluster(1, 2, home=tmp_path / "home").start()
    try:
        assert cluster.submit(make("detach", total=1)).wait(timeout=100) == 0
    finally:
        left = cluster.stop()
    assert cluster.processes() == []
    assert len(left) <= 1  # the agent may have found it first
    assert all("signal.pause()" in thing for thing in left)
