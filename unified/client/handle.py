"""A handle on a job, for the process that submitted it or that is connected to its master."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from unified.client.connection import MasterConnection
from unified.client.left_logs import keep_status
from unified.client.logs import LogFilter, LogReader
from unified.client.mirror import JobWatch
from unified.client.report import headline_text, state_html, summarise
from unified.errors import MasterUnreachableError, RefusedError, UnifiedError
from unified.job.driver import submitter
from unified.protocol.client_master import (
    Done,
    GetJob,
    JobStatus,
    RestartWorkers,
    ResumeJob,
    StopJob,
    SuspendJob,
    WorkerStatus,
)
from unified.protocol.records import Stage, WorkerState
from unified.values import ClosedOnExit

if TYPE_CHECKING:
    from unified.bus.calls.future import RpcFuture
    from unified.client.embedded import EmbeddedCluster
    from unified.client.outside import OutsideCaller, OutsideGroup

POLL_S = 5.0
GLANCE_S = 1.0
MASTER_GRACE_S = 300.0
"""Seconds for which a wait tolerates a master that is away. The job goes on without it."""


def restart_workers(
    connection: MasterConnection,
    job_id: str,
    workers: Iterable[str] = (),
    *,
    timeout: float | None = None,
    asked: Callable[[dict[str, int]], None] = lambda incarnations: None,
) -> None:
    """Restart workers, or the whole job if none is named, as `JobHandle.restart` does.

    Args:
        asked: called, before the wait, with the next incarnation of each worker that restarts.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    left = connection.ask(RestartWorkers(job=job_id, workers=list(workers)), Done).incarnations
    asked(left)
    watch = JobWatch(connection, job_id)
    while left:
        wait_s = POLL_S if deadline is None else max(0.0, min(POLL_S, deadline - time.monotonic()))
        status = watch.next_status(wait_s)
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


class JobHandle(ClosedOnExit):
    """A job, as `submit(…, blocking=False)` or `unified.connect().job(…)` returns it. Close it, or use it as a context
    manager.

    An embedded cluster belongs to the handle of its job: closing the handle, or the end of this process, ends the
    cluster and the job. A job on another master goes on.

    Attributes:
        job_id: as ``unified status`` takes it.
    """

    def __init__(self, connection: MasterConnection, job_id: str, *, cluster: EmbeddedCluster | None = None) -> None:
        self.job_id = job_id
        self.connection = connection
        self.cluster = cluster
        self._outside: OutsideCaller | None = None
        self._ended: JobStatus | None = None
        self._making = threading.Lock()

    def __repr__(self) -> str:
        status = self._glance()
        if status is None:
            return f"JobHandle({self.job_id!r}, master={self.connection.address!r})"
        texts = [headline_text(status, time.time()), *(role.text for role in summarise(status))]
        return f"<JobHandle {'; '.join(texts)}>"

    def _repr_html_(self) -> str | None:
        status = self._glance()
        return None if status is None else state_html(status, time.time())

    def status(self) -> JobStatus:
        """The job as the master sees it now. After `wait` has seen the job's end: its last status."""
        return self._ended or self.connection.ask(GetJob(job=self.job_id), JobStatus)

    @property
    def slurm_id(self) -> str:
        """Id of the SLURM allocation of this process, as in `SlurmJob`; empty: none."""
        return os.environ.get("SLURM_JOB_ID", "")

    @property
    def state(self) -> str:
        """Stage of the job, such as ``RUNNING``, as in `SlurmJob`."""
        return str(self.status().stage)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the job has ended, and return its exit code: 0, 1 for a failure, 130 for a stop by a user.

        Then the handle gives back its threads and descriptors, and keeps the last status. A later `logs` opens new
        ones while it reads.

        Args:
            timeout: seconds; None waits as long as the job runs.

        Raises:
            TimeoutError: it still runs after `timeout`.
            MasterUnreachableError: the master was away for 5 minutes, or this handle was closed meanwhile.
            ClusterError: the embedded cluster broke down.
            KeyboardInterrupt: on Ctrl-C, or an interrupt of a notebook's kernel; the job goes on.
        """
        if self._ended is None:
            try:
                self._ended = self._await_end(timeout)
                if self.cluster is not None:
                    keep_status(self.cluster.home, self._ended)
            except KeyboardInterrupt:
                until = " until this process ends" if self.cluster is not None else ""
                raise KeyboardInterrupt(f"job {self.job_id} goes on{until}: wait() again, or stop() it") from None
        self._rest()
        return 1 if self._ended.exit_code is None else self._ended.exit_code

    def logs(self, follow: bool = False, role: str | None = None, rank: int | None = None) -> Iterator[str]:
        """Lines that the workers printed, each as ``[trainer-0] line``.

        Args:
            follow: go on until the job has ended. A reader that is far behind skips ahead, and a line says so.
            role, rank: only those workers.
        """
        reader = LogReader(self.connection, self.job_id, LogFilter(role, rank), mode="live" if follow else "once")
        try:
            if follow:
                yield from reader.follow(self.status)
            else:
                reader.update(self.status())
                yield from reader.rest()
        finally:
            if self._ended is not None:
                self._rest()

    def call(self, worker: str, method: str, /, *args: Any, **kwargs: Any) -> RpcFuture[Any]:
        """Call an `@rpc` method of one worker of the job and return at once: for monitoring and control.

        The call goes through the bus relay in the master. Results may be any Python objects, which are unpickled here.

        Args:
            worker: full name or ``role-rank``; for a role with one worker, also the role's name.
            method: the name under which it is registered.
            _timeout: seconds to the deadline; default 60.

        Returns:
            A `concurrent.futures.Future` that ends as `RoleActor.call` does in a worker.

        Raises:
            UsageError: (a ValueError) the job has no such worker, or an argument cannot be sent.
            RefusedError: the job has ended, or the master does not know it.
            MasterUnreachableError: the master did not answer.
            ClusterError: the relay cannot be reached from here.
        """
        return self._outside_caller().worker(worker).call(method, *args, **kwargs)

    def group(self, role: str) -> OutsideGroup:
        """The workers of a role, to be called from here: `group.call(…)` calls all, `group[0].call(…)` one.

        Raises:
            UsageError: (a ValueError) the job has no such role.
            RefusedError, MasterUnreachableError: as for `call`.
        """
        return self._outside_caller().group(role)

    def stop(self, force: bool = False) -> None:
        """Ask the master to stop the job, and return at once; `wait` waits for its end.

        Args:
            force: kill its workers at once, without a grace period.

        Raises:
            RefusedError: the master does not know the job. (To stop a job that has ended does nothing.)
        """
        self.connection.request(StopJob(job=self.job_id, force=force, reason=f"asked by {submitter()}"))

    def suspend(self, reason: str = "") -> None:
        """Ask the master to suspend the job, and return at once.

        The workers are stopped with their grace period. No restart limit is charged. The job waits until it is
        resumed, and then starts from its checkpoints and snapshots. A second `suspend` changes nothing.

        Args:
            reason: shown by ``unified status`` and ``unified explain``; empty: the process that asked.

        Raises:
            RefusedError: the job ends or has ended (code ``ended``), or the master does not know it.
        """
        self.connection.request(SuspendJob(job=self.job_id, reason=reason or f"asked by {submitter()}"))

    def resume(self) -> None:
        """Put the suspended job back into the queue, and return at once. Does nothing if it is not suspended.

        Raises:
            RefusedError: as for `suspend`.
        """
        self.connection.request(ResumeJob(job=self.job_id))

    def restart(self, *workers: str, timeout: float | None = None) -> None:
        """Restart the job, or only some of its workers, and return when the new incarnations are READY.

        No restart limit is charged. A rank of an elastic role restarts with its role.

        Args:
            workers: full names or ``role-rank``; none means the whole job.
            timeout: seconds; None waits as long as the job runs.

        Raises:
            RefusedError: the job ends or has ended (code ``ended``), or the master does not know it or a worker.
            TimeoutError: not all were READY after `timeout`; the restart goes on.
            MasterUnreachableError: the master did not answer.
        """
        restart_workers(self.connection, self.job_id, workers, timeout=timeout)

    def close(self) -> None:
        """Close the connection, and end the embedded cluster if there is one."""
        if self._outside is not None:
            self._outside.close()
        try:
            self.connection.close()
        finally:
            if self.cluster is not None:
                self.cluster.stop()

    def _rest(self) -> None:
        with self._making:
            outside, self._outside = self._outside, None
        if outside is not None:
            outside.close()
        self.connection.rest()

    def _glance(self) -> JobStatus | None:
        """Return the status if the master answers within `GLANCE_S`."""
        try:
            return self._ended or self.connection.ask(GetJob(job=self.job_id), JobStatus, timeout_s=GLANCE_S)
        except UnifiedError:
            return None

    def _outside_caller(self) -> OutsideCaller:
        from unified.client.outside import OutsideCaller  # imports the bus, which only calls need

        with self._making:
            if self._outside is None:
                self._outside = OutsideCaller(self.connection, self.job_id)
            return self._outside

    def _last_status(self, status: JobStatus) -> JobStatus:
        """Return the status of a job that has ended, with its workers if the master still knows them."""
        try:
            return self.connection.ask(GetJob(job=self.job_id), JobStatus)
        except RefusedError:
            return status

    def _await_end(self, timeout: float | None) -> JobStatus:
        deadline = None if timeout is None else time.monotonic() + timeout
        watch = JobWatch(self.connection, self.job_id, has_workers=False)
        answered_at = time.monotonic()
        while True:
            left = POLL_S if deadline is None else deadline - time.monotonic()
            try:
                status = watch.next_status(max(0.0, min(POLL_S, left)))
            except MasterUnreachableError:
                (self.cluster or self.connection).check()
                if not self.connection.is_open or time.monotonic() - answered_at > MASTER_GRACE_S:
                    raise
            else:
                answered_at = time.monotonic()
                if status.stage == Stage.STOPPED:
                    return self._last_status(status)
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(
                    f"job {self.job_id} still runs after {timeout:g} s: look at `unified status {self.job_id}`."
                )
