"""Suspending jobs, and waiting until their workers have saved and ended."""

from __future__ import annotations

import time

from unified.client.connection import MasterConnection
from unified.client.mirror import JobWatch
from unified.protocol.client_master import Done, JobList, ListJobs, SuspendJob
from unified.protocol.records import Stage


def suspend(connection: MasterConnection, job: str, reason: str, timeout_s: float | None) -> str:
    """Suspend a job, or all for an empty name, and wait until no worker is left; return what the master says.

    Args:
        timeout_s: seconds to wait; None: not at all.

    Raises:
        RefusedError: there is no such job, or it has ended.
        TimeoutError: workers are left.
    """
    note = connection.ask(SuspendJob(job=job, reason=reason), Done).note
    if timeout_s is not None:
        deadline = time.monotonic() + timeout_s
        for name in [job] if job else suspended(connection):
            _await_suspended(connection, name, deadline)
    return note


def suspended(connection: MasterConnection) -> list[str]:
    """Return the ids of the jobs that are suspended."""
    lines = connection.ask(ListJobs(), JobList).jobs
    return [line.job_id for line in lines if line.suspended is not None and line.stage != Stage.STOPPED]


def _await_suspended(connection: MasterConnection, job_id: str, deadline: float) -> None:
    watch = JobWatch(connection, job_id, has_workers=False)
    while True:
        left_s = deadline - time.monotonic()
        status = watch.next_status(max(0.0, min(1.0, left_s)))
        if not status.num_leaving or status.suspended is None:
            return
        if left_s <= 0:
            raise TimeoutError(f"{status.num_leaving} workers of {job_id} have not ended: `unified status {job_id}`.")
