"""Two threads that follow a job for a display: its status by long poll, its workers' output by pulls.

Both put what they find in one queue, which one consumer empties, so that a display is touched by one thread alone.
"""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import NamedTuple

from unified.client.connection import MasterConnection
from unified.client.logs import RENEW_S, LogReader, Output
from unified.errors import MasterUnreachableError, UnifiedError
from unified.protocol.client_master import GetJob, JobStatus
from unified.protocol.records import Stage

POLL_S = 1.0
"""How long the master may keep a question about the status."""
SILENT_S = 2.9
"""After so long without an answer the master counts as silent."""
STATUS_PAUSE_S = 0.05
"""Between two answers, so that a job that reports every step does not flood its driver."""
MAX_UNSHOWN = 4
MIN_PAUSE_S = 0.002
"""Between two rounds of reads, for whoever else has something to do."""


class StatusChanged(NamedTuple):
    status: JobStatus


class OutputRead(NamedTuple):
    outputs: list[Output]


class MasterSilent(NamedTuple):
    """The master does not answer, for the first time since it last did, or still."""

    since: float
    """Monotonic."""
    error: MasterUnreachableError | None = None
    """Of a request that was given up."""


class MasterAnswers(NamedTuple):
    """It was silent, and is not any more."""


class FollowFailed(NamedTuple):
    """Following cannot go on."""

    error: UnifiedError


class Interrupted(NamedTuple):
    """Ctrl-C or SIGTERM. A signal handler puts it: the queue is safe for that."""

    signal_number: int


class Drained(NamedTuple):
    """No more output will come."""


News = StatusChanged | OutputRead | MasterSilent | MasterAnswers | FollowFailed | Interrupted | Drained


class Follower:
    """Follows one job until it is STOPPED or `request_stop` is called."""

    def __init__(self, connection: MasterConnection, job: str, reader: LogReader | None) -> None:
        self.news: SimpleQueue[News] = SimpleQueue()
        self._connection = connection
        self._job = job
        self._reader = reader
        self._stop = threading.Event()
        self._status: JobStatus | None = None
        self._unshown = threading.BoundedSemaphore(MAX_UNSHOWN)
        self._threads = [threading.Thread(target=self._follow_status, name="unified-status", daemon=True)]
        if reader is not None:
            self._threads.append(threading.Thread(target=self._follow_logs, name="unified-logs", daemon=True))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def shown(self) -> None:
        """The consumer has shown one `OutputRead`: a reader that waits for a slow terminal may go on."""
        self._unshown.release()

    def request_stop(self) -> None:
        """Nobody listens any more. The threads end with their present request, or when the connection is closed."""
        self._stop.set()

    def join(self) -> None:
        """Wait for both threads, after `request_stop` and the closing of the connection."""
        self._stop.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _follow_status(self) -> None:
        version = -1
        silent_since: float | None = None
        while not self._stop.is_set():
            asked_at = time.monotonic()
            reply = self._connection.send(
                GetJob(job=self._job, after_version=version, wait_s=POLL_S if version >= 0 else 0.0)
            )
            if silent_since is None and not reply.is_answered(SILENT_S):
                silent_since = asked_at
                self.news.put(MasterSilent(silent_since))
            try:
                status = self._connection.take(reply, JobStatus)
            except MasterUnreachableError as error:
                silent_since = asked_at if silent_since is None else silent_since
                self.news.put(MasterSilent(silent_since, error))
                self._stop.wait(STATUS_PAUSE_S)
                continue
            except UnifiedError as error:
                self.news.put(FollowFailed(error))
                return
            if silent_since is not None:
                silent_since = None
                self.news.put(MasterAnswers())
            if status.version > version:
                version = status.version
                self._status = status
                self.news.put(StatusChanged(status))
            if status.stage == Stage.STOPPED:
                return
            self._stop.wait(STATUS_PAUSE_S)

    def _follow_logs(self) -> None:
        reader = self._reader
        while reader is not None and not self._stop.is_set():
            try:
                status = self._status
                if status is not None:
                    reader.update(status)
                is_over = status is not None and status.stage == Stage.STOPPED
                for outputs in reader.drain() if is_over else reader.pull():
                    self._put(reader, outputs)
                if is_over:
                    break
            except UnifiedError as error:
                self.news.put(FollowFailed(error))
                break
            self._stop.wait(max(reader.pause_s(), MIN_PAUSE_S))
        self.news.put(Drained())

    def _put(self, reader: LogReader, outputs: list[Output]) -> None:
        renew_at = time.monotonic() + RENEW_S
        while not self._unshown.acquire(timeout=0.1):
            if self._stop.is_set():
                return
            if time.monotonic() >= renew_at:
                reader.renew()
                renew_at = time.monotonic() + RENEW_S
        self.news.put(OutputRead(outputs))
