"""The cluster that stays: ``unified up`` starts a process that keeps it until it has had no job for some time."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Sequence

import msgspec

from unified import process
from unified.client.connection import connect_to
from unified.client.daemons import Daemon
from unified.client.embedded import EmbeddedCluster, StartLimit
from unified.client.local_cluster import MAX_RESTARTS
from unified.config import clusters, settings
from unified.config.clusters import ClusterRecord
from unified.errors import ClusterError, MasterUnreachableError
from unified.protocol.client_master import JobLine, JobList, ListJobs
from unified.protocol.records import Stage

POLL_S = 5.0
START_POLL_S = 0.02
STOP_S = 30.0


def start_keeper(nodes: int, devices: int | None, idle_s: float) -> ClusterRecord:
    """Start the cluster that stays, detached from this process, and wait until it is ready.

    If another process starts one meanwhile, return that one.

    Raises:
        UsageError: this process may open too few files, or the name of a folder is not UTF-8.
        ClusterError: it could not be started; the message has its last words.
    """
    settings.check_descriptors()
    home = settings.home()
    try:
        settings.make_folder(home)
        clusters.sweep(settings.make_run_root())
        log_file = home / "up.log"
        arguments = msgspec.json.encode([nodes, devices, idle_s]).decode()
        daemon = Daemon("unified.client.keeper", [arguments], log_file, os.environ)
    except OSError as error:
        raise ClusterError(f"the cluster cannot be started: {error}") from None
    limit = StartLimit(log_file)
    try:
        while (found := clusters.kept_cluster()) is None:
            if daemon.wait(START_POLL_S) and clusters.kept_cluster() is None:
                raise ClusterError(f"the process that keeps the cluster {daemon.last_words()}")
            limit.check(f"the process {daemon.pid}, which keeps it, still starts it")
    except BaseException:
        daemon.signal(signal.SIGTERM)
        raise
    return found


def stop_keeper(kept: ClusterRecord) -> None:
    """End the cluster and its jobs in order, and wait for the end. Its process is killed after `STOP_S` seconds."""
    with contextlib.suppress(ProcessLookupError), contextlib.ExitStack() as stack:
        descriptor = os.pidfd_open(kept.pid)
        stack.callback(os.close, descriptor)
        if clusters.kept_cluster() == kept:  # the pid still belongs to it
            for number in (signal.SIGTERM, signal.SIGKILL):
                signal.pidfd_send_signal(descriptor, number)
                if select.select([descriptor], [], [], STOP_S)[0]:
                    return


def unfinished(kept: ClusterRecord) -> list[JobLine]:
    """Return the jobs of the cluster that run or wait; none if its master does not answer."""
    with connect_to(kept.address) as connection:
        try:
            jobs = connection.ask(ListJobs(), JobList).jobs
        except MasterUnreachableError:
            return []
    return [job for job in jobs if job.stage != Stage.STOPPED]


class Idleness:
    """The time for which a cluster has had no job.

    Args:
        limit_s: seconds; 0: no limit.
        now: seconds of any clock.
    """

    def __init__(self, limit_s: float, now: float) -> None:
        self._limit_s = limit_s
        self._since = now
        self._num_jobs = 0

    def is_over(self, jobs: Sequence[JobLine], now: float) -> bool:
        """Return True if the cluster, which has these jobs, may end now."""
        if len(jobs) != self._num_jobs or any(job.stage != Stage.STOPPED for job in jobs):
            self._num_jobs, self._since = len(jobs), now
        return self._limit_s > 0 and now - self._since >= self._limit_s


def main() -> int:
    """Keep a cluster until SIGTERM, or until it has had no job for the given time."""
    nodes, devices, idle_s = msgspec.json.decode(sys.argv[1], type=tuple[int, int | None, float])
    process.set_title("unified-up")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while clusters.lock(settings.run_root(), os.O_RDONLY) is None:  # the lock is held to the end of this process
        if clusters.kept_cluster() is not None:
            return 0
        time.sleep(START_POLL_S)
    os.ftruncate(sys.stderr.fileno(), 0)  # remove the log of earlier processes
    try:
        with EmbeddedCluster(nodes, devices, max_master_restarts=MAX_RESTARTS, idle_s=idle_s) as cluster:
            _keep(cluster, idle_s)
    except ClusterError as error:
        print(f"unified up: {error}", file=sys.stderr)
        return 1
    return 0


def _keep(cluster: EmbeddedCluster, idle_s: float) -> None:
    idleness = Idleness(idle_s, time.monotonic())
    with connect_to(cluster.address) as connection:
        while True:
            cluster.check()
            try:
                jobs = connection.ask(ListJobs(), JobList).jobs
            except MasterUnreachableError:  # the master is started again, or `check` raises
                continue
            if idleness.is_over(jobs, time.monotonic()):
                return print(f"no job for {idle_s:g} s: the cluster ends", file=sys.stderr)
            time.sleep(min(POLL_S, idle_s / 4) if idle_s else POLL_S)


if __name__ == "__main__":
    sys.exit(main())
