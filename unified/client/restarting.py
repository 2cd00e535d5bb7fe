"""Restarting workers of a job, and waiting until their new lives can be called."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from unified.errors import RefusedError
from unified.protocol.client_master import (
    ClientToMaster,
    Done,
    GetJob,
    JobStatus,
    MasterAnswer,
    RestartWorkers,
    WorkerStatus,
)
from unified.protocol.records import Stage, WorkerState

A = TypeVar("A", bound=MasterAnswer)
POLL_S = 5.0


class Ask(Protocol):
    """`MasterConnection.ask`."""

    def __call__(self, message: ClientToMaster, expected: type[A], /) -> A: ...


def restart_workers(
    ask: Ask,
    job_id: str,
    workers: Iterable[str] = (),
    *,
    timeout: float | None = None,
    asked: Callable[[dict[str, int]], None] = lambda lives: None,
) -> None:
    """Restart workers, or the whole job if none is named, and return when the new lives are READY, or further.

    Args:
        workers: full names or ``role-rank``; those who must restart with them do so, too.
        timeout: seconds; None: as long as the job lives.
        asked: called with the incarnation to come of each worker concerned, before it is waited for.

    Raises:
        RefusedError: the master does not know job or worker, or the job ends; its code is then ``ended``.
        TimeoutError: they were not READY within `timeout`; the restart goes on.
        MasterUnreachableError: the master did not answer.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    left = ask(RestartWorkers(job=job_id, workers=list(workers)), Done).lives
    asked(left)
    version = -1
    while left:
        wait_s = POLL_S if deadline is None else max(0.0, min(POLL_S, deadline - time.monotonic()))
        status = ask(GetJob(job=job_id, after_version=version, wait_s=wait_s), JobStatus)
        version = status.version
        ready = {worker.name for worker in status.workers if _is_up(worker, left)}
        left = {name: incarnation for name, incarnation in left.items() if name not in ready}
        if left and status.stage in (Stage.STOPPING, Stage.STOPPED):
            raise RefusedError("ended", f"job {job_id} ends before all workers have restarted: {status.reason}")
        if left and deadline is not None and time.monotonic() >= deadline:
            names = ", ".join(sorted(left)[:3])
            raise TimeoutError(f"{names} of job {job_id} restarted, and not within {timeout:g} s: {status.reason}")


def _is_up(worker: WorkerStatus, wanted: dict[str, int]) -> bool:
    if worker.name not in wanted or worker.incarnation < wanted[worker.name]:
        return False
    return worker.state not in (WorkerState.PENDING, WorkerState.STARTING)
