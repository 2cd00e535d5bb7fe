"""Waiting for a job in front of a person: news to the display, Ctrl-C and SIGTERM to the job."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from queue import Empty

from unified.client.connection import MasterConnection
from unified.client.display import Display
from unified.client.follow import (
    Drained,
    Follower,
    FollowFailed,
    Interrupted,
    MasterAnswers,
    MasterSilent,
    News,
    OutputRead,
    StatusChanged,
)
from unified.client.handle import MASTER_GRACE_S
from unified.client.logs import LogReader
from unified.client.report import STOPPED_BY_USER
from unified.client.signals import exit_code, handled, signal_name
from unified.errors import ClusterError, MasterUnreachableError, UnifiedError
from unified.job.spec import OutputFiles
from unified.protocol.client_master import JobStatus, StopJob
from unified.protocol.records import Stage

DRAINED_S = 5.0
"""After the job's end, how long its last output may take on a terminal."""
REFRESH_S = 0.2
FORCE_S = 2.0
MAX_FOLLOWED = 16


class Watch:
    """One wait for the end of one job.

    Args:
        files: by role, what of its output goes to files and is not shown.
        problem: says why waiting is of no use any more (an embedded master that died), or None.
    """

    def __init__(
        self,
        connection: MasterConnection,
        job_id: str,
        display: Display,
        *,
        with_logs: bool = True,
        files: Mapping[str, OutputFiles] | None = None,
        problem: Callable[[], str | None] = lambda: None,
        stops_job: bool = True,
    ) -> None:
        self._connection = connection
        self._job_id = job_id
        self._display = display
        self._problem = problem
        self._stops_job = stops_job
        self._files = files or {}
        self._keep = display.wants_all
        """Nobody watches: the output is written to the last line, however long that takes."""
        self._reader = self._open_reader() if with_logs else None
        self._follower = Follower(connection, job_id, self._reader)
        self._ended: JobStatus | None = None
        self._ended_at = 0.0
        self._is_drained = self._reader is None
        self._stopped_by = 0
        """The signal that had the job stopped."""
        self._is_master_silent = False
        self._left_out = 0

    def run(self) -> JobStatus:
        """The job's last status.

        Raises:
            SystemExit: after a second Ctrl-C or SIGTERM (the job was told to end at once), or after the first where
                watching does not own the job: 130 or 143.
            MasterUnreachableError: the master was away for longer than `MASTER_GRACE_S`.
            ClusterError: waiting is of no use any more.
        """
        self._follower.start()
        try:
            with handled(lambda number: self._follower.news.put(Interrupted(number))):
                while True:
                    self._take(self._next())
                    self._display.refresh()
                    if self._ended and (self._is_drained or self._is_drained_too_long()):
                        return self._ended
        finally:
            self._follower.request_stop()

    @property
    def exit_code(self) -> int:
        """Of a process that watched the job until its end: the job's, or 143 if it was SIGTERM that stopped it."""
        code = 1 if self._ended is None or self._ended.exit_code is None else self._ended.exit_code
        return exit_code(self._stopped_by) if self._stopped_by and code == STOPPED_BY_USER else code

    def join(self) -> None:
        """Wait for the threads behind it; call it after the connection was closed, which ends their requests."""
        self._follower.join()

    def _open_reader(self) -> LogReader:
        if self._keep:
            return LogReader(self._connection, self._job_id, mode="keep", files=self._files)
        return LogReader(self._connection, self._job_id, mode="live", max_workers=MAX_FOLLOWED, files=self._files)

    def _is_drained_too_long(self) -> bool:
        return not self._keep and time.monotonic() - self._ended_at > DRAINED_S

    def _next(self) -> News | None:
        try:
            return self._follower.news.get(timeout=REFRESH_S)
        except Empty:
            return None

    def _take(self, news: News | None) -> None:
        match news:
            case None:
                self._check_cluster()
            case StatusChanged(status):
                self._show_status(status)
            case OutputRead(outputs):
                self._display.output(outputs)
                self._follower.shown()
            case MasterSilent(since, error):
                self._check_cluster()
                self._bear_silence(since, error)
            case MasterAnswers():
                if self._is_master_silent:
                    self._is_master_silent = False
                    self._display.note(f"{self._job_id}  the master at {self._connection.address} answers again")
            case FollowFailed(error):
                raise error
            case Interrupted(number):
                self._interrupt(number)
            case Drained():
                self._is_drained = True

    def _show_status(self, status: JobStatus) -> None:
        self._display.update(status)
        left_out = self._reader.left_out if self._reader is not None else 0
        if left_out and left_out != self._left_out:
            self._display.note(
                f"{status.job_id}  shows the output of {MAX_FOLLOWED} workers and not of {left_out} more: "
                f"unified logs {status.job_id} --role ROLE --rank RANK"
            )
        self._left_out = left_out
        if status.stage == Stage.STOPPED:
            self._ended, self._ended_at = status, time.monotonic()

    def _check_cluster(self) -> None:
        problem = self._problem()
        if problem is not None:
            raise ClusterError(problem)

    def _bear_silence(self, since: float, error: MasterUnreachableError | None) -> None:
        if error is not None and time.monotonic() - since > MASTER_GRACE_S:
            raise MasterUnreachableError(
                f"the master at {self._connection.address} was away for {MASTER_GRACE_S:g} s. Job {self._job_id} goes "
                f"on without it; when it is back, `unified status {self._job_id}` shows it."
            ) from error
        if not self._is_master_silent:
            self._is_master_silent = True
            self._display.note(
                f"{self._job_id}  the master at {self._connection.address} does not answer; the job goes on, "
                f"waiting up to {MASTER_GRACE_S:g} s"
            )

    def _interrupt(self, number: int) -> None:
        is_second = self._stopped_by != 0
        self._stopped_by = self._stopped_by or number
        if not self._stops_job:
            raise SystemExit(exit_code(number))
        name = signal_name(number)
        is_interrupt = self._stopped_by == signal.SIGINT
        request = StopJob(
            job=self._job_id, force=is_second, reason=f"{name} in its driver", interrupt=is_interrupt
        )  # fmt: skip
        if is_second:
            self._display.note(f"{self._job_id}  ended at once")
            try:
                self._connection.request(request, timeout_s=FORCE_S)
            except UnifiedError as error:
                self._display.note(f"{self._job_id}  could not be told to end: {error}")
            raise SystemExit(exit_code(number))
        self._display.note(f"{self._job_id}  stopping in order; {name} again ends it at once")
        # Its effect shows in the status; waiting here would hold up the second one. A master that is away hears it
        # when it is back.
        self._connection.send(request, timeout_s=MASTER_GRACE_S)
