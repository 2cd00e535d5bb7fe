"""What the page's benchmark looks at: a real master with stand-in agents, a job over all of them, and ended jobs."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from benchmarks.bus import scale
from benchmarks.coordinator.master import master
from benchmarks.page.agents import PROBE, SHORT
from unified.api.builder import DLJob, DLJobBuilder
from unified.client.connection import MasterConnection
from unified.protocol.client_master import JobList, ListJobs

HERE = Path(__file__).parent
TARGET = "benchmarks.bus.scale_job.Callee"
PER_NODE = 8
CALM_MS = 500.0


class PaperCluster:
    """The cluster, once it is as large as it is to be.

    Attributes:
        address: of the master.
        job_id: the job over all nodes.
        told: newest totals of the agents' process.
        changes: workers a second that report.
    """

    def __init__(self, address: str, told: Callable[[], dict[str, Any]], say: Callable[[str], None]) -> None:
        self.address = address
        self.master = child("unified_master")
        self.job_id = ""
        self.told = told
        self.say = say
        self.changes = 0.0

    def fill(self, nodes: int, ended: int) -> None:
        """Have so many jobs end, and one run on all nodes."""
        scale.until(lambda: self.told().get("register_s"), f"{nodes} agents registered", self.told)
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(self._submit_short, range(ended)))
        scale.until(lambda: self._num_ended() >= ended, f"{ended} jobs ended", self.told)
        workers = nodes * PER_NODE
        with job(workers - 1).submit("pretrain", blocking=False, master=self.address) as handle:
            self.job_id = handle.job_id
            scale.until(lambda: scale.is_running(handle), "the job runs", self.told)
        scale.until(lambda: self.told()["running"] >= workers, f"{workers} workers run", self.told)
        scale.until(lambda: self.read_heartbeats()["beat_p99"] < CALM_MS, "heartbeats are quick again", self.told)

    def read_heartbeats(self) -> dict[str, Any]:
        """The heartbeats since the last reading, and how far behind the agents are."""
        windows = self.told()["windows"]
        self.say("read")
        scale.until(lambda: self.told()["windows"] > windows, "heartbeats were read", self.told)
        return self.told()

    def _submit_short(self, number: int) -> None:
        job(0).submit(f"{SHORT}-{number}", blocking=False, master=self.address).close()

    def _num_ended(self) -> int:
        with MasterConnection(self.address) as connection:
            return sum(each.ended_at is not None for each in connection.ask(ListJobs(), JobList).jobs)


@contextmanager
def cluster(folder: Path, nodes: int, ended: int, changes: float) -> Iterator[PaperCluster]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each agent is a socket of the master's
    with (
        patch.dict(os.environ, {"UNIFIED_CONNECT_S": "120"}),  # to place 10 000 workers takes the master seconds
        master(folder) as address,
        scale.load(address, nodes, PER_NODE, ("-m", "benchmarks.page.agents")) as load,
    ):
        found = PaperCluster(address, *load)
        found.fill(nodes, ended)
        found.changes = changes
        found.say(f"changes {changes}")
        yield found


def job(workers: int) -> DLJob:
    """A job of one worker, whose step tells a time, and of so many others."""
    builder: Any = DLJobBuilder().node_num(workers + 1).device_per_node(1).device_type("CPU")
    for role, number in (("trainer", workers), (PROBE, 1)):
        if number:
            builder = builder.role(role).run(TARGET).total(number).resource(user_defined={"sim": 1})
    built: DLJob = builder.build()
    return built


def child(module: str) -> psutil.Process:
    """The newest process that this one has started with ``-m MODULE``."""
    found = [each for each in psutil.Process().children() if module in each.cmdline()]
    return max(found, key=lambda each: each.create_time())


class Usage:
    """CPU that a process takes from now on, in percent of a core."""

    def __init__(self, process: psutil.Process) -> None:
        self.pid = process.pid
        self._process = process
        self._began, self._before = time.monotonic(), self._spent()

    def percent(self) -> float:
        return 100 * (self._spent() - self._before) / (time.monotonic() - self._began)

    def _spent(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)
