"""A real cluster for tests, on this machine. A test that leaves anything behind fails.

Installing unified makes the fixture known to pytest; there is nothing to import::

    def test_my_job(local_cluster):
        cluster = local_cluster(nodes=2, devices=2)
        handle = cluster.submit(my_job, "demo")
        assert handle.wait(timeout=30) == 0

`local_cluster` is a factory: each call starts a master and `nodes` agents with `devices` virtual devices each, with
short intervals, and returns a `LocalCluster`. At the end of the test every cluster is stopped, and the test fails if a
process, a socket, an open descriptor, a thread or a file in /dev/shm is left. Zombies do not count.

`eventually` waits for a condition that has no event::

    eventually(lambda: handle.status().stage == "RUNNING", timeout=10, message="the job did not run")

This module never imports torch. It imports only pytest and the standard library until the fixture is used.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, Unpack

import pytest

if TYPE_CHECKING:
    from unified.client.connection import MasterConnection
    from unified.client.handle import JobHandle
    from unified.job.options import SubmitOptions
    from unified.job.spec import JobSpec
    from unified.protocol.client_master import JobLine, JobStatus, NodeStatus

FAST = {"UNIFIED_HEARTBEAT_S": "0.2", "UNIFIED_LEASE_S": "2", "UNIFIED_SETTLE_S": "0.2"}
"""Environment of a test's cluster, so that a lost node is noticed soon."""
SETTLE_S = 30.0
POLL_S = 0.01
SHARED_MEMORY = Path("/dev/shm")

T = TypeVar("T")


class Submittable(Protocol):
    """A `DLJob`, or anything else with its `submit`."""

    def submit(
        self, job_name: str | None = None, /, blocking: bool = True, **options: Unpack[SubmitOptions]
    ) -> Any: ...


def eventually(predicate: Callable[[], T], timeout: float = 60.0, message: str = "") -> T:
    """Wait until `predicate()` is true, and return what it returned.

    Args:
        predicate: asked every 10 ms.
        timeout: seconds.
        message: the condition that did not come true, for the error.

    Raises:
        AssertionError: the condition did not become true in time.
    """
    deadline = time.monotonic() + timeout
    while not (value := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(
                f"{message or 'the condition did not become true'} (waited {timeout:g} s; last: {value!r})"
            )
        time.sleep(POLL_S)
    return value


class LocalCluster:
    """A master and agents, for one test.

    Args:
        nodes: number of agents; they are called node-1, node-2, …
        devices: virtual devices of each; None: the accelerators that this host really has.
        home: folder for logs and state.
        env: more environment for daemons and workers; it wins over the short intervals.
        restart_agents: how often an agent that dies is started again; 0: never.
        restart_master: the same for the master.
    """

    def __init__(
        self,
        nodes: int = 2,
        devices: int | None = 2,
        *,
        home: Path | None = None,
        env: Mapping[str, str] | None = None,
        restart_agents: int = 0,
        restart_master: int = 0,
    ) -> None:
        from unified.client.embedded import EmbeddedCluster

        self._cluster = EmbeddedCluster(
            nodes,
            devices,
            home=home,
            env={**FAST, **(env or {})},
            max_agent_restarts=restart_agents,
            max_master_restarts=restart_master,
        )
        self._connection: MasterConnection | None = None
        self._handles: list[JobHandle] = []
        self.was_hurt = False
        """True if a daemon was killed on purpose: its sockets may be left for its successor to remove."""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """``tcp://127.0.0.1:PORT`` of the master."""
        return self._cluster.address

    @property
    def home(self) -> Path:
        """Folder of the daemons' logs and state."""
        return self._cluster.home

    @property
    def master_pid(self) -> int:
        return self._cluster.master_pid

    @property
    def agent_pids(self) -> list[int]:
        """Pids of the agents, by node."""
        return self._cluster.agent_pids

    @property
    def connection(self) -> MasterConnection:
        """Return a connection to the master, closed with the cluster."""
        from unified.client.connection import connect_to

        if self._connection is None:
            self._connection = connect_to(self.address)
        return self._connection

    @property
    def nodes(self) -> list[NodeStatus]:
        """Return the nodes as the master sees them now."""
        from unified.protocol.client_master import ListNodes, NodeList

        return self.connection.ask(ListNodes(), NodeList).nodes

    @property
    def jobs(self) -> list[JobLine]:
        """Return the jobs that the master knows."""
        from unified.protocol.client_master import JobList, ListJobs

        return self.connection.ask(ListJobs(), JobList).jobs

    def start(self) -> Self:
        """Start everything and wait until every agent is registered."""
        self._cluster.start()
        return self

    def submit(self, job: Submittable | JobSpec, name: str | None = None, **options: Any) -> JobHandle:
        """Submit a job without waiting for it.

        Args:
            job: a `DLJob` (or its builder after ``build()``), or a `JobSpec`, which has its name already.
            options: as `DLJob.submit` takes them; for a `JobSpec`, ``wait`` alone.
        """
        from unified.client.submission import submit_job
        from unified.job.spec import JobSpec

        if isinstance(job, JobSpec):
            handle: JobHandle = submit_job(job, master=self.address, **options)
        else:
            handle = job.submit(name, blocking=False, master=self.address, **options)
        self._handles.append(handle)
        return handle

    def status(self, job: str) -> JobStatus:
        """Return a job of this cluster, by id or name."""
        from unified.protocol.client_master import GetJob, JobStatus

        return self.connection.ask(GetJob(job=job), JobStatus)

    def workers(self, job: str | JobHandle) -> dict[str, int]:
        """Return the pids of a job's workers that have a process, by full name."""
        from unified.protocol.records import WorkerState

        status = self.status(job if isinstance(job, str) else job.job_id)
        return {
            worker.name: worker.pid for worker in status.workers if worker.pid and worker.state != WorkerState.EXITED
        }

    def kill_agent(self, index: int, sig: int = signal.SIGKILL) -> int:
        """Send a signal to the agent of the node at `index`; return its pid."""
        pid = self.agent_pids[index]
        self.was_hurt = True
        os.kill(pid, sig)
        return pid

    def processes(self) -> list[str]:
        """Return every living process of the cluster, daemons and workers, as ``pid (command)``."""
        from unified.client.daemons import marked_processes
        from unified.client.embedded import CLUSTER_VARIABLE

        return [str(found) for found in marked_processes(f"{CLUSTER_VARIABLE}={self._cluster.cluster_id}")]

    def stop(self) -> list[str]:
        """Stop everything. Safe to call twice.

        Returns:
            Everything that was left behind and had to be removed: nothing, if all is well.
        """
        for handle in self._handles:
            handle.close()
        if self._connection is not None:
            self._connection.close()
        self._cluster.stop()
        return [
            left for left in self._cluster.left_behind if not (self.was_hurt and left.startswith("socket"))
        ] + self.processes()


class Belongings:
    """Threads, descriptors, shared memory and children of a process, compared before and after a test."""

    def __init__(self) -> None:
        gc.collect()
        self.threads = {thread for thread in threading.enumerate() if thread.is_alive()}
        self.descriptors = _descriptors()
        self.shared_memory = _shared_memory()
        self.children = _children()

    def left_since(self, before: Belongings) -> list[str]:
        threads = [f"thread {thread.name}" for thread in self.threads - before.threads]
        descriptors = [
            f"descriptor {number} ({target})"
            for number, target in sorted(self.descriptors.items())
            if before.descriptors.get(number) != target
        ]
        children = [
            f"process {self.children[child]}" for child in sorted(self.children.keys() - before.children.keys())
        ]
        return threads + descriptors + _unused(self.shared_memory - before.shared_memory) + children


def _descriptors() -> dict[int, str]:
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of this listing
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _children() -> dict[tuple[int, int], str]:
    """Return the living children of this process as ``pid (name)``, by pid and start; zombies do not count."""
    from unified.process import every_process

    found: dict[tuple[int, int], str] = {}
    for child in every_process():
        if child.parent == os.getpid() and child.is_alive:
            with contextlib.suppress(OSError):  # gone already
                name = Path(f"/proc/{child.pid}/comm").read_text().strip()
                found[child.pid, child.start_ticks] = f"{child.pid} ({name})"
    return found


def _shared_memory() -> set[str]:
    uid = os.getuid()
    found: set[str] = set()
    for entry in os.scandir(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else ():
        with contextlib.suppress(OSError):  # gone already
            if entry.stat(follow_symlinks=False).st_uid == uid:
                found.add(entry.name)
    return found


def _unused(names: Iterable[str]) -> list[str]:
    """Return the paths of the files that no living process, such as a program beside this test, has mapped or open.
    One look at the processes serves for all files, because a look takes seconds on a busy machine."""
    from unified.process import every_process, used_files

    paths = [f"{SHARED_MEMORY / name}" for name in sorted(names)]
    used = used_files(paths, (each.pid for each in every_process()))
    return [path for path in paths if path not in used and os.path.exists(path)]  # its owner may have removed it


def left_behind(before: Belongings, settle_s: float = SETTLE_S) -> list[str]:
    """Return what a test left, as far as it is still there after `settle_s`; empty if all is well. What programs beside
    the test leave for a moment does not count."""
    began = time.monotonic()
    since: dict[str, float] = {}
    while True:
        now = time.monotonic()
        since = {thing: since.get(thing, now) for thing in Belongings().left_since(before)}
        left = [thing for thing, at in since.items() if now - at >= settle_s]
        if left or not since or now - began > 2 * settle_s:
            return left
        time.sleep(POLL_S)


@pytest.fixture
def local_cluster(tmp_path: Path) -> Iterator[Callable[..., LocalCluster]]:
    """Factory of clusters: ``local_cluster(nodes=2, devices=2, **options)``, options as `LocalCluster` takes them."""
    clusters: list[LocalCluster] = []
    before = Belongings()

    def start(nodes: int = 2, devices: int | None = 2, **options: Any) -> LocalCluster:
        options.setdefault("home", tmp_path / f"cluster-{len(clusters) + 1}")
        cluster = LocalCluster(nodes, devices, **options)
        clusters.append(cluster)
        return cluster.start()

    yield start
    left = [thing for cluster in reversed(clusters) for thing in cluster.stop()]
    left += left_behind(before)
    if left:
        pytest.fail("the test left behind: " + "; ".join(left), pytrace=False)
