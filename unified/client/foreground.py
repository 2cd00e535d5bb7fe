"""A job in the foreground: where to look, progress and output while it runs, and a summary at its end.

Two threads follow the job: one its status, by long poll, and one its workers' output, by pulls. Both put their news
into one queue with one consumer, so that only one thread touches the display. Ctrl-C and SIGTERM go to the job.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Literal, NamedTuple

from unified.client.connection import MasterConnection, PendingReply
from unified.client.display import Display, open_display
from unified.client.handle import MASTER_GRACE_S, JobHandle
from unified.client.left_logs import keep_status
from unified.client.logs import RENEW_S, LogReader, Mode, Output
from unified.client.mirror import JobWatch
from unified.client.output import Prefix, TracebackFilter
from unified.client.report import STOPPED_BY_USER, end_lines, event_text, headline_text, short_name
from unified.client.terminal import PASSED_ON, exit_code, handled, lasting, printable, signal_name
from unified.errors import MasterUnreachableError, RefusedError, UnifiedError
from unified.job.driver import STORY_FOLDER
from unified.job.spec import JobSpec, OutputFiles
from unified.protocol.client_master import Explain, JobStatus, SignalWorkers, StopJob, Story, SuspendJob
from unified.protocol.records import Stage, WorkerState
from unified.threads import start_thread

POLL_S = 1.0
"""Seconds for which the master may hold a request for the status."""
SILENT_S = 2.9
"""Seconds without an answer after which the master counts as silent."""
STATUS_PAUSE_S = 0.05
"""Pause between two answers, so that a job that reports every step does not flood its driver."""
MAX_UNSHOWN = 4
MIN_PAUSE_S = 0.002
"""Pause between two rounds of reads, so that other threads can run."""
DRAINED_S = 5.0
"""Seconds after the job's end for which a terminal waits for its last output."""
REFRESH_S = 0.2
FORCE_S = 2.0
MAX_FOLLOWED = 16
ALLOCATION = "SLURM_JOB_ID"
"""Variable that is set within an allocation of SLURM. There SIGTERM means the end of the allocation, not of the job."""
EXIT_SUSPENDED = os.EX_TEMPFAIL


def run_in_foreground(handle: JobHandle, prefix: Prefix, spec: JobSpec, passed_on: Collection[int] = PASSED_ON) -> int:
    """Show a job until it has ended, close its handle, and return its exit code; pass these signals on to workers."""
    cluster = handle.cluster
    watch: Watch | None = None
    if prefix == "auto" and sum(role.total for role in spec.roles) > 1:
        prefix = "always"
    try:
        with open_display(prefix=prefix) as display:
            display.note(_where(handle))
            files = {role.name: role.output_files for role in spec.roles if role.output_files is not None}
            for found in files.values():
                if found.is_written:
                    display.note(f"{handle.job_id}  files of what ranks print: {found.log_dir}/{found.run_id}")
            check = (cluster or handle.connection).check
            suspends = cluster is None and ALLOCATION in os.environ
            watch = Watch(
                handle.connection,
                handle.job_id,
                display,
                files=files,
                check=check,
                on_signal="suspend" if suspends else "stop",
                passed_on=passed_on,
            )
            status = watch.run()
            command = f"unified explain {handle.job_id} --master {handle.connection.address}"
            home = os.environ.get(STORY_FOLDER) if cluster is None else cluster.home
            story = _keep_story(handle, Path(home)) if home else command
            if cluster is not None:
                keep_status(cluster.home, status)
        err = lasting(sys.stderr)
        is_shown = status.end is not None and watch.tracebacks.has_shown(status.end.failure.traceback)
        lines = end_lines(status, story=story, is_traceback_shown=is_shown)
        if status.stage != Stage.STOPPED:
            hint = "" if STORY_FOLDER in os.environ else f"; it goes on with: unified resume {status.job_id}"
            lines = [f"{status.job_id}  {status.reason}{hint}"]
        err.write("".join(f"{printable(line) if err.isatty() else line}\n" for line in lines))
        err.flush()
    except RefusedError as error:
        if cluster is None or watch is None or not watch.stopped_by:
            raise
        print(f"{handle.job_id}  ends with its cluster, and without a record: {error}", file=lasting(sys.stderr))
        return exit_code(watch.stopped_by)
    except SystemExit:  # the second Ctrl-C or SIGTERM: no grace period
        if cluster is not None:
            cluster.stop(timeout_s=0.0)
        raise
    finally:
        handle.close()
        if watch is not None:
            watch.join()
    return watch.exit_code


def _where(handle: JobHandle) -> str:
    if handle.cluster is not None:
        nodes, devices = len(handle.cluster.node_names), handle.cluster.devices_per_node
        offered = "its own devices" if devices is None else f"{devices} device{'s' if devices != 1 else ''}"
        return (
            f"{handle.job_id}  embedded cluster at {handle.connection.address} (`unified up` keeps one): {nodes} "
            f"node{'s' if nodes != 1 else ''} of {offered}; logs: {handle.cluster.home}"
        )
    slurm = f"--slurm {os.environ[ALLOCATION]} " if ALLOCATION in os.environ else ""
    look = f"unified {slurm}status {handle.job_id}"
    return f"{handle.job_id}  submitted to {handle.connection.address}; from elsewhere: {look}"


def _keep_story(handle: JobHandle, home: Path) -> str:
    """Write the job's story to a file, because the embedded master, which has it, is about to end."""
    path = home / f"explain-{handle.job_id}.txt"
    try:
        story = handle.connection.ask(Explain(job=handle.job_id), Story)
        path.write_text("".join(f"{event_text(event)}\n" for event in story.events))
    except (UnifiedError, OSError):
        return f"the daemons' logs in {home}"
    return f"less {path}"


class StatusChanged(NamedTuple):
    status: JobStatus
    at: float = 0.0
    """The master's clock when it sent the status."""


class OutputRead(NamedTuple):
    outputs: list[Output]


class MasterSilent(NamedTuple):
    """The master does not answer: a new silence, or one that goes on."""

    since: float
    """Monotonic time at which the silence began."""
    error: MasterUnreachableError | None = None
    """Error of a request that was given up."""


class MasterAnswers(NamedTuple):
    """The master answers again."""


class FollowFailed(NamedTuple):
    """Following cannot go on."""

    error: UnifiedError


class Interrupted(NamedTuple):
    """Ctrl-C, SIGTERM, or a signal to pass on. A signal handler puts it: the queue is safe for that."""

    signal_number: int


class OutputEnded(NamedTuple):
    """No more output will come."""


News = StatusChanged | OutputRead | MasterSilent | MasterAnswers | FollowFailed | Interrupted | OutputEnded


def is_over(status: JobStatus, *, suspends_job: bool) -> bool:
    """Return True if nothing of the job is left to follow: it has ended, or, with `suspends_job`, is suspended."""
    is_suspended = status.suspended is not None and not status.num_leaving
    return status.stage == Stage.STOPPED or (suspends_job and is_suspended)


class Follower:
    """Follows one job until it is over or `request_stop` is called."""

    def __init__(
        self, connection: MasterConnection, job: str, reader: LogReader | None, *, suspends_job: bool = False
    ) -> None:
        self._suspends_job = suspends_job
        self.news: SimpleQueue[News] = SimpleQueue()
        self._connection = connection
        self._job = job
        self._reader = reader
        self._stop = threading.Event()
        self._wake = threading.Event()
        """Ends the pause of the reader of logs: the job has ended, or nobody listens."""
        self._status: JobStatus | None = None
        self._unshown = threading.BoundedSemaphore(MAX_UNSHOWN)
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        self._threads.append(start_thread("unified-status", self._follow_status))
        if self._reader is not None:
            self._threads.append(start_thread("unified-logs", self._follow_logs))

    def shown(self) -> None:
        """Tell that one `OutputRead` was shown: a reader that waits for a slow terminal may go on."""
        self._unshown.release()

    def request_stop(self) -> None:
        """Ask the threads to end. They do after their present request, or when the connection is closed."""
        self._stop.set()
        self._wake.set()

    def join(self) -> None:
        """Stop and wait for both threads. Call it after the connection is closed, which ends their requests."""
        self.request_stop()
        for thread in self._threads:
            thread.join()

    def _follow_status(self) -> None:
        watch = JobWatch(self._connection, self._job)
        seen, has_more = (-1, "", ""), True
        silent_since: float | None = None
        while not self._stop.is_set():
            asked_at = time.monotonic()
            reply = self._connection.send(watch.request(0.0 if has_more else POLL_S))
            if silent_since is None and not reply.is_answered(SILENT_S):
                silent_since = asked_at
                self.news.put(MasterSilent(silent_since))
            try:
                has_more = not watch.take(reply)
                status = None if has_more else watch.status
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
            if status is None:
                continue
            at = watch.mirror.at
            if (now := (watch.version, watch.mirror.problem, headline_text(status, at))) != seen:
                seen = now
                self._status = status
                self.news.put(StatusChanged(status, at))
            if is_over(status, suspends_job=self._suspends_job):
                self._wake.set()
                return
            self._stop.wait(STATUS_PAUSE_S)

    def _follow_logs(self) -> None:
        reader = self._reader
        while reader is not None and not self._stop.is_set():
            try:
                status = self._status
                if status is not None:
                    reader.update(status)
                is_last = status is not None and is_over(status, suspends_job=self._suspends_job)
                for outputs in reader.drain() if is_last else reader.pull():
                    self._put(reader, outputs)
                if is_last:
                    break
            except UnifiedError as error:
                self.news.put(FollowFailed(error))
                break
            self._wake.wait(max(reader.pause_s(), MIN_PAUSE_S))
        self.news.put(OutputEnded())

    def _put(self, reader: LogReader, outputs: list[Output]) -> None:
        renew_at = time.monotonic() + RENEW_S
        while not self._unshown.acquire(timeout=0.1):
            if self._stop.is_set():
                return
            if time.monotonic() >= renew_at:
                reader.renew()
                renew_at = time.monotonic() + RENEW_S
        self.news.put(OutputRead(outputs))


class Watch:
    """One wait for the end of one job.

    Args:
        files: by role, the output that goes to files and is not shown.
        check: raises `ClusterError` if waiting is of no use any more (an embedded master has died).
        on_signal: effect of SIGTERM on the job. Ctrl-C stops the job, except with `leave`. With `suspend` the wait
            also ends when anybody suspends the job.
        passed_on: signals that go to the workers, unless this process handles or ignores them already.
    """

    def __init__(
        self,
        connection: MasterConnection,
        job_id: str,
        display: Display,
        *,
        with_logs: bool = True,
        files: Mapping[str, OutputFiles] | None = None,
        check: Callable[[], None] = lambda: None,
        on_signal: Literal["stop", "suspend", "leave"] = "stop",
        passed_on: Collection[int] = (),
    ) -> None:
        self._suspends_job, self._stops_job = on_signal == "suspend", on_signal != "leave"
        self._passed_on = passed_on
        self._connection = connection
        self._job_id = job_id
        self._display = display
        self._check = check
        self._keep = display.wants_all
        """No person watches: all output is written, without a time limit."""
        self._reader: LogReader | None = None
        if with_logs:
            max_workers = None if self._keep else MAX_FOLLOWED
            mode: Mode = "keep" if self._keep else "live"
            self._reader = LogReader(connection, job_id, mode=mode, max_workers=max_workers, files=files)
        self._follower = Follower(connection, job_id, self._reader, suspends_job=self._suspends_job)
        self._ended: JobStatus | None = None
        self._ended_at = 0.0
        self._is_drained = self._reader is None
        self.tracebacks = TracebackFilter()
        self.stopped_by = 0
        """The signal that had the job stopped."""
        self._is_master_silent = False
        self._left_out = 0
        self._losers: set[str] = set()
        """Workers whose dropped output was reported."""
        self._waits: set[str] = set()
        """Things that workers wait for before they begin, as far as they were reported."""

    def run(self) -> JobStatus:
        """Wait for the end of the job, and return its last status.

        Raises:
            SystemExit: 130 or 143, after a second Ctrl-C or SIGTERM (the job was told to end at once); with `leave`
                after the first.
            MasterUnreachableError: the master was away for longer than `MASTER_GRACE_S`.
            ClusterError: waiting is of no use any more.
        """
        self._follower.start()
        try:
            with handled(lambda number: self._follower.news.put(Interrupted(number)), self._passed_on):
                while True:
                    try:
                        news = self._follower.news.get(timeout=REFRESH_S)
                    except Empty:
                        self._check()
                    else:
                        self._take(news)
                    self._display.refresh()
                    is_late = not self._keep and time.monotonic() - self._ended_at > DRAINED_S
                    if self._ended and (self._is_drained or is_late):
                        self._display.update(self._ended)  # behind the last output
                        return self._ended
        finally:
            self._follower.request_stop()

    @property
    def exit_code(self) -> int:
        """Exit code for a process that watched until the end: the job's; 143 if SIGTERM stopped it, 75 if it is
        suspended.
        """
        if self._ended is not None and self._ended.stage != Stage.STOPPED:
            return EXIT_SUSPENDED
        code = 1 if self._ended is None or self._ended.exit_code is None else self._ended.exit_code
        return exit_code(self.stopped_by) if self.stopped_by and code == STOPPED_BY_USER else code

    def join(self) -> None:
        """Wait for the follower's threads. Call it after the connection is closed, which ends their requests."""
        self._follower.join()

    def _take(self, news: News) -> None:
        match news:
            case StatusChanged(status, at):
                self._show_status(status, at)
            case OutputRead(outputs):
                self._display.output(list(self.tracebacks.feed(outputs)))
                self._follower.shown()
            case MasterSilent(since, error):
                self._check()
                self._wait_for_master(since, error)
            case MasterAnswers():
                if self._is_master_silent:
                    self._is_master_silent = False
                    self._display.note(f"{self._job_id}  the master at {self._connection.address} answers again")
            case FollowFailed(error):
                raise error
            case Interrupted(number):
                self._interrupt(number)
            case OutputEnded():
                self._is_drained = True

    def _show_status(self, status: JobStatus, at: float) -> None:
        has_ended = is_over(status, suspends_job=self._suspends_job)
        for worker in status.workers:
            if worker.output_lost and worker.name not in self._losers:
                self._losers.add(worker.name)
                text = (
                    f"{status.job_id}  output of {short_name(worker)} on {worker.node} is dropped: {worker.output_lost}"
                )
                self._display.note(text)
            waits_for = worker.progress.waits_for if worker.progress is not None else ""
            if waits_for and worker.state is WorkerState.STARTING and waits_for not in self._waits:
                self._waits.add(waits_for)
                self._display.note(f"{status.job_id}  {short_name(worker)} on {worker.node} waits for {waits_for}")
        if not has_ended:
            self._display.update(status, at)
        left_out = self._reader.left_out if self._reader is not None else 0
        if left_out and left_out != self._left_out:
            self._display.note(
                f"{status.job_id}  shows the output of {MAX_FOLLOWED} workers and not of {left_out} more: "
                f"unified logs {status.job_id} --role ROLE --rank RANK"
            )
        self._left_out = left_out
        if has_ended:
            self._ended, self._ended_at = status, time.monotonic()

    def _wait_for_master(self, since: float, error: MasterUnreachableError | None) -> None:
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
        if number in self._passed_on:
            self._display.note(f"{self._job_id}  {signal_name(number)} goes to the workers that handle it")
            self._connection.send(SignalWorkers(job=self._job_id, signal=number), timeout_s=MASTER_GRACE_S)
            return
        is_second = self.stopped_by != 0
        self.stopped_by = self.stopped_by or number
        if not self._stops_job:
            raise SystemExit(exit_code(number))
        name = signal_name(number)
        reason, is_interrupt = f"{name} in its driver", self.stopped_by == signal.SIGINT
        if self._suspends_job and number == signal.SIGTERM:
            if not is_second:
                self._display.note(f"{self._job_id}  is suspended: {reason}")
            allocation = f"allocation {os.environ.get(ALLOCATION, '')} of SLURM ends"
            suspend = SuspendJob(job=self._job_id, reason=f"{allocation}: {reason}")
            self._connection.send(suspend, timeout_s=MASTER_GRACE_S, when_done=self._on_stop_answered)
            return
        request = StopJob(job=self._job_id, force=is_second, reason=reason, interrupt=is_interrupt)
        if is_second:
            self._display.note(f"{self._job_id}  ended at once")
            try:
                self._connection.request(request, timeout_s=FORCE_S)
            except UnifiedError as error:
                self._display.note(f"{self._job_id}  could not be told to end: {error}")
            raise SystemExit(exit_code(number))
        self._display.note(f"{self._job_id}  stopping in order; {name} again ends it at once")
        # Do not wait for the answer: that would delay a second signal. The status shows the effect. A master that is
        # away gets the request when it is back. One that can record nothing refuses it.
        self._connection.send(request, timeout_s=MASTER_GRACE_S, when_done=self._on_stop_answered)

    def _on_stop_answered(self, reply: PendingReply) -> None:
        try:
            reply.result()
        except UnifiedError as error:
            if isinstance(error, RefusedError) and error.code == "unavailable":
                self._follower.news.put(FollowFailed(error))
