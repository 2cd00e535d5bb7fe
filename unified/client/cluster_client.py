"""A client of a running master: its jobs, and handles on them."""

from __future__ import annotations

import threading

from unified.client.connection import MasterConnection, connect_master, connect_to
from unified.client.handle import JobHandle
from unified.errors import UsageError
from unified.protocol.client_master import GetJob, JobLine, JobList, JobStatus, ListJobs
from unified.values import ClosedOnExit


class ClusterClient(ClosedOnExit):
    """A client of the jobs of one master, as `unified.connect` returns it. Any thread may use it. Close it, or use it
    as a context manager.

    Attributes:
        address: ``tcp://HOST:PORT`` of the master.
    """

    def __init__(self, connection: MasterConnection) -> None:
        self.address = connection.address
        self._connection = connection
        self._lock = threading.Lock()
        self._handles: list[JobHandle] = []

    def __repr__(self) -> str:
        return f"ClusterClient({self.address!r})"

    def jobs(self) -> list[JobLine]:
        """Return the jobs that the master knows, also ended ones: `job_id`, `name`, `stage`, … of each.

        Raises:
            MasterUnreachableError: the master did not answer.
        """
        return self._connection.ask(ListJobs(), JobList).jobs

    def job(self, job: str) -> JobHandle:
        """Return a handle on a job, as `submit` does: `status`, `logs`, `call`, `group`, `stop`, …

        The handle has its own connection, which ends with `close` of the handle or of this client.

        Args:
            job: its id, or its name for the newest job of that name.

        Raises:
            RefusedError: the master knows no such job.
            MasterUnreachableError: the master did not answer.
        """
        with self._lock:
            if self._connection.is_closed:
                raise UsageError("this ClusterClient was closed: call unified.connect() again.")
            found = self._connection.ask(GetJob(job=job), JobStatus)
            handle = JobHandle(connect_to(self.address), found.job_id)
            self._handles = [each for each in self._handles if not each.connection.is_closed] + [handle]
        return handle

    def close(self) -> None:
        """Close the connection, and the handles that came from here. The jobs go on."""
        with self._lock:
            handles, self._handles = self._handles, []
            self._connection.close()
        for handle in handles:
            handle.close()


def connect(master: str | None = None) -> ClusterClient:
    """Connect to a running master, to see and control its jobs and to call their workers from any process.

    The cluster key, if the cluster has one, is found as commands find it: for ``unified up`` by the address, else in
    ``UNIFIED_KEY_FILE`` or the default file.

    Args:
        master: ``tcp://HOST:PORT``; None means the environment's ``UNIFIED_MASTER``, else the master of
            ``unified up``, else of this user's only job with a cluster of its own on this host.

    Raises:
        UsageError: (a ValueError) no master is named, or the name is no address.
        MasterUnreachableError: no master answers there.
        RefusedError: the master has another cluster key.
        KeyFileError: the cluster key cannot be read, or others may read it.
    """
    client = ClusterClient(connect_master(master))
    try:
        client.jobs()
    except BaseException:
        client.close()
        raise
    return client
