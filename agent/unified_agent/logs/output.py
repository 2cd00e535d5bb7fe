"""Workers' output: one thread reads every pipe, writes files, rotates them, and reads them back.

The pipes are read as fast as the disk allows, so that a worker never waits long for its own output. At most `max_bytes`
times `max_files` of each stream are kept. A stream whose reader wants every byte (`ReadAgentLog.keep`) is the
exception: its pipe is not read while a rotation would remove unread bytes. The worker then waits in `write`, as with
any slow pipe.
What a worker reports is kept in a third file, `N.metrics.jsonl`, whose old points are thinned (`series`).
All file work of the agent is done here, never in its loop.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import selectors
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from msgspec import json, structs

from unified import error_file
from unified.core.timers import earliest
from unified.error_file import WrittenError
from unified.protocol.agent_master import OutputTail, ReadAgentLog
from unified.protocol.records import JobWorkerIncarnation, WorkerReport
from unified.protocol.worker_agent import Launch
from unified.threads import start_thread
from unified_agent.logs.archive import LogArchive
from unified_agent.logs.logfile import LogFile, LogSlice, last_lines, read_slice, read_through, segments_of
from unified_agent.logs.search import LogSearches, RunProgram
from unified_agent.logs.series import MAX_SERIES_BYTES, SeriesFile
from unified_agent.logs.tails import Tail, TailFeed
from unified_agent.logs.times import range_of, times_of

log = logging.getLogger("unified_agent")
PIPE_BYTES = 256 * 1024
CLOSE_S = 5.0
KEEP_S = 30.0
"""Time for which a pipe waits for a reader that wants every byte, after its last request."""
OTHER_FILES = {"metrics": "metrics.jsonl", "trace": "trace.jsonl", "profile": "profile"}
"""Suffixes of streams that are no output: JSON lines by the agent and by the worker (`unified.bus.tracing`), and the
profile of `unified profile`."""
ARCHIVE_READ_S = 60.0
TELL_LOST_S = 5.0
"""Time between two reports of dropped output."""
_CHUNK_BYTES = 65536
_LINE_BYTES = 4096
"""Bytes before an offset in which the beginning of its line is searched."""
_LAST_BYTES = 16 * 1024 * 1024
"""Most bytes read from the pipe of a dead worker: a child that it left may still write into the pipe."""

_encoder = json.Encoder()


class OutputClosed(NamedTuple):
    """The output of an incarnation is on disk."""

    incarnation: JobWorkerIncarnation
    code: int
    last_lines: str
    error: WrittenError | None = None
    """Error that the process wrote into its error file."""


class SliceRead(NamedTuple):
    """Answer to a request for output."""

    request_id: int
    slice: LogSlice


class OutputLost(NamedTuple):
    """Output of an incarnation was dropped, because the disk refused it."""

    incarnation: JobWorkerIncarnation
    stream: str
    text: str


class TailsRead(NamedTuple):
    """Newest output for the master to keep."""

    tails: list[OutputTail]


class OutputFailed(NamedTuple):
    """The thread has ended by a defect: workers would soon block on full pipes."""


class Destination(NamedTuple):
    """Destination of one stream of one incarnation, beyond its log file."""

    is_followed: bool = False
    """True if a reader that wants every byte will ask within `KEEP_S`."""
    copy: str = ""
    """File that also gets the stream, without a limit of its size; empty: none."""


LOG_ALONE = Destination()
OutputResult = OutputClosed | SliceRead | TailsRead | OutputLost | OutputFailed


def destinations(launch: Launch) -> tuple[Destination, Destination]:
    """Return the destinations of an incarnation's stdout and stderr, from its job's description."""
    return _destination(launch, "out"), _destination(launch, "err")


def _destination(launch: Launch, stream: Literal["out", "err"]) -> Destination:
    files = launch.spec.role(launch.role).output_files if launch.kind == "worker" else None
    if files is None:
        return Destination(is_followed=launch.spec.is_output_followed)
    return Destination(
        launch.spec.is_output_followed and files.is_shown(stream, launch.place.local_rank),
        files.file(stream, rank=launch.place.rank, local_rank=launch.place.local_rank, attempt=launch.incarnation),
    )


@dataclass(eq=False)
class _OutputStream:
    incarnation: JobWorkerIncarnation
    descriptor: int
    file: LogFile
    copy: LogFile | None
    """File of a `Destination.copy`, which never rotates."""
    keep_until: float
    """Time (monotonic) until which unread bytes must not be rotated away; 0: no reader wants every byte."""
    read_to: int = 0
    """Offset up to which the reader has every byte."""
    reported: str = ""
    """Losses that were reported."""
    tell_at: float = 0.0

    @property
    def lost(self) -> str:
        """Losses in words, of the log and of its copy; empty: none."""
        copied = f"{self.copy.path}: {self.copy.lost}" if self.copy is not None and self.copy.lost else ""
        return "; ".join(filter(None, (self.file.lost, copied)))

    def must_wait(self, now: float) -> bool:
        """Return True if the next write would remove bytes that the reader has not read."""
        return self.keep_until > now and not self.file.bytes_left and self.file.start_after_rotation > self.read_to

    def chunk_bytes(self) -> int:
        """Return how many bytes may be copied before the next call of `must_wait`."""
        return min(_CHUNK_BYTES, self.file.bytes_left or self.file.max_bytes) if self.keep_until else _CHUNK_BYTES


class OutputReader:
    """The thread that reads output. Everything public is called from the daemon's loop and returns at once."""

    def __init__(
        self,
        log_dir: Path,
        *,
        max_bytes: int,
        max_files: int,
        run: RunProgram,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log_dir = log_dir
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._searches = LogSearches(run)
        self._max_series_files = max(2, max_files)  # the newest file, and the file of thinned points
        self._clock = clock
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """Calls for the thread to make; None: end."""
        self._tails = TailFeed()
        self._archive: LogArchive | None = None
        self._results: deque[OutputResult] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.ready = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable when `take` has something."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._streams: dict[JobWorkerIncarnation, tuple[_OutputStream, _OutputStream]] = {}
        self._series: dict[JobWorkerIncarnation, SeriesFile] = {}
        """Files of reports, of the incarnations that have reported something."""
        self._num_given = self._num_written = 0
        """Bytes of reports that the loop gave to the thread, and that the thread has handled."""
        self._waiting: set[_OutputStream] = set()
        """Streams whose pipes are not read until a reader has caught up."""
        self._thread = start_thread("output", self._run)

    def open(
        self, incarnation: JobWorkerIncarnation, out: Destination = LOG_ALONE, err: Destination = LOG_ALONE
    ) -> tuple[int, int]:
        """Make pipes for a worker's stdout and stderr; return the ends to write to. OSError: no descriptors left."""
        out_read, out_write = _pipe()
        try:
            err_read, err_write = _pipe()
        except OSError:
            os.close(out_read)
            os.close(out_write)
            raise
        self._order(lambda: self._watch(incarnation, (out_read, err_read), (out, err)))
        return out_write, err_write

    def keep_reports(self, incarnation: JobWorkerIncarnation, reports: list[WorkerReport]) -> None:
        """Write a worker's reports to its file; drop them once its output was finished, or if the disk lags."""
        lines = _encoder.encode_lines([structs.replace(each, incarnation=incarnation.number) for each in reports])
        if len(lines) <= MAX_SERIES_BYTES and self._num_given - self._num_written <= 8 * MAX_SERIES_BYTES:
            self._num_given += len(lines)
            self._order(lambda: self._write_reports(incarnation, lines))

    def finish(self, incarnation: JobWorkerIncarnation, code: int) -> None:
        """Read what an ended process left in its pipes. Answered by `OutputClosed` with the same code."""
        self._order(lambda: self._finish(incarnation, code))

    def read(self, order: ReadAgentLog, request_id: int, error: str = "") -> None:
        """Read output, or, with an `error`, report only that. Answered by `SliceRead`. From any thread."""

        def answer(found: LogSlice) -> None:
            self._answer(SliceRead(request_id, found))

        if error:
            answer(LogSlice(error=error))
            return
        self._order(lambda: self._search(order, answer) if order.grep else answer(self._slice(order)))

    def archive(self, address: str) -> None:
        """Archive whole logs at an address, until `close`; UsageError: there is no such kind of store."""

        def read(path: Path, offset: int, nbytes: int) -> LogSlice:
            answer: queue.SimpleQueue[LogSlice] = queue.SimpleQueue()
            self._order(lambda: answer.put(read_through(path, offset, nbytes, self._max_files)))
            return answer.get(timeout=ARCHIVE_READ_S)

        self._archive = LogArchive(address, self._log_dir, self._max_files, read)

    def take(self) -> list[OutputResult]:
        """Return the answers since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.ready)
        return [self._results.popleft() for _ in range(len(self._results))]

    def close(self) -> None:
        """Drain every pipe and end the thread; a thread that hangs on a dead disk is left behind."""
        if self._archive is not None:
            self._archive.close()
        self._order(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.error("event=output-stuck the disk under %s has not answered for %g s", self._log_dir, CLOSE_S)
            return
        for descriptor in (self._wake, self.ready):
            os.close(descriptor)

    def _order(self, order: Callable[[], None] | None) -> None:
        self._orders.put(order)
        os.eventfd_write(self._wake, 1)

    # In the thread

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            log.exception("event=output-failed the thread that writes workers' output ended")
            self._answer(OutputFailed())

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(self._timeout_s()):
                if key.fd == self._wake:
                    if not self._execute_orders():
                        return
                elif self._selector.get_map().get(key.fd) is key:  # an order of this turn may have reused it
                    self._copy(key.data)
            if self._waiting:
                self._resume()
            if self._tails.due_at is not None and self._tails.due_at <= self._clock():
                self._send_tails(self._tails.take(self._clock()))

    def _timeout_s(self) -> float | None:
        due = earliest(self._tails.due_at, *(each.keep_until for each in self._waiting))
        return None if due is None else max(0.0, due - self._clock())

    def _send_tails(self, tails: Iterable[Tail | None]) -> None:
        """Read the parts of streams, and answer with them for the master."""
        read = []
        for tail in filter(None, tails):
            (*_, job_id, worker), (incarnation, stream) = tail.path.parent.parts, tail.path.name.split(".")
            data = read_through(tail.path, tail.offset, tail.nbytes, self._max_files)
            if data.data and stream in ("out", "err"):
                read.append(
                    OutputTail(
                        job_id=job_id,
                        worker=worker,
                        worker_incarnation=int(incarnation),
                        stream="out" if stream == "out" else "err",
                        offset=data.offset,
                        data=data.data,
                    )
                )
        if read:
            self._answer(TailsRead(read))

    def _resume(self) -> None:
        """Read pipes again if their reader has caught up, or has not asked for too long."""
        now = self._clock()
        for stream in [stream for stream in self._waiting if not stream.must_wait(now)]:
            self._waiting.remove(stream)
            self._selector.register(stream.descriptor, selectors.EVENT_READ, stream)

    def _execute_orders(self) -> bool:
        os.eventfd_read(self._wake)
        while not self._orders.empty():
            order = self._orders.get()
            if order is None:
                for incarnation in list(self._streams):
                    self._close_streams(incarnation)
                self._selector.close()
                return False
            order()
        return True

    def _finish(self, incarnation: JobWorkerIncarnation, code: int) -> None:
        last = self._close_streams(incarnation)
        written = error_file.read(error_file.beside(str(self._path(incarnation, "err"))))
        streams = (self._path(incarnation, "err"), self._path(incarnation, "out"))
        self._send_tails(self._tails.end(path, self._clock(), has_failed=code != 0) for path in streams)
        self._answer(OutputClosed(incarnation, code, last, written))

    def _answer(self, result: OutputResult) -> None:
        self._results.append(result)
        os.eventfd_write(self.ready, 1)

    def _path(self, incarnation: JobWorkerIncarnation, suffix: str) -> Path:
        return self._log_dir / incarnation.job_id / incarnation.worker / f"{incarnation.number}.{suffix}"

    def _watch(
        self, incarnation: JobWorkerIncarnation, pipes: tuple[int, int], destinations: tuple[Destination, Destination]
    ) -> None:
        streams = [
            _OutputStream(
                incarnation,
                descriptor,
                LogFile(self._path(incarnation, suffix), self._max_bytes, self._max_files, is_timed=True),
                LogFile(Path(destination.copy), sys.maxsize, 1, is_private=False) if destination.copy else None,
                self._clock() + KEEP_S if destination.is_followed else 0.0,
            )
            for descriptor, suffix, destination in zip(pipes, ("out", "err"), destinations, strict=True)
        ]
        with contextlib.suppress(OSError):  # left by an incarnation that a restored backup of the master has forgotten
            for suffix in OTHER_FILES.values():
                self._path(incarnation, suffix).unlink(missing_ok=True)
        for stream in streams:
            self._selector.register(stream.descriptor, selectors.EVENT_READ, stream)
            if self._archive is not None:
                self._archive.begin(stream.file.path)
        self._streams[incarnation] = (streams[0], streams[1])

    def _write_reports(self, incarnation: JobWorkerIncarnation, lines: bytes) -> None:
        self._num_written += len(lines)
        if incarnation not in self._streams:
            return
        if incarnation not in self._series:
            size = min(self._max_bytes, MAX_SERIES_BYTES)
            self._series[incarnation] = SeriesFile(
                self._path(incarnation, "metrics.jsonl"), size, self._max_series_files
            )
        self._series[incarnation].write_lines(lines)

    def _copy(self, stream: _OutputStream, *, is_last: bool = False) -> int:
        """Copy one chunk and return its size; 0 if there is none, the stream has to wait, or the pipe has ended."""
        now = self._clock()
        if not is_last and stream.must_wait(now):
            self._selector.unregister(stream.descriptor)
            self._waiting.add(stream)
            return 0
        try:
            data = os.read(stream.descriptor, _CHUNK_BYTES if is_last else stream.chunk_bytes())
        except BlockingIOError:
            return 0
        if data:
            if stream.copy is not None:
                stream.copy.write(data)
            stream.file.write(data, may_rotate=not (is_last and stream.keep_until > now))
            self._tails.wrote(stream.file.path, stream.file.end, now)
            if stream.lost != stream.reported and now >= stream.tell_at:
                self._tell_lost(stream, now)
        else:
            self._selector.unregister(stream.descriptor)
        return len(data)

    def _tell_lost(self, stream: _OutputStream, now: float) -> None:
        stream.reported, stream.tell_at = stream.lost, now + TELL_LOST_S
        name = "stdout" if stream.file.path.suffix == ".out" else "stderr"
        self._answer(OutputLost(stream.incarnation, name, stream.reported))

    def _close_streams(self, incarnation: JobWorkerIncarnation) -> str:
        """Read what is left, close the files, and return the last lines of stderr."""
        streams = self._streams.pop(incarnation, None)
        if streams is None:
            return ""
        if (series := self._series.pop(incarnation, None)) is not None:
            series.close()
        for stream in streams:
            if stream in self._waiting:
                self._waiting.remove(stream)
                self._selector.register(stream.descriptor, selectors.EVENT_READ, stream)
            num_bytes = 0
            while stream.descriptor in self._selector.get_map() and num_bytes < _LAST_BYTES:
                count = self._copy(stream, is_last=True)
                if not count:
                    break
                num_bytes += count
            if stream.descriptor in self._selector.get_map():
                self._selector.unregister(stream.descriptor)
            os.close(stream.descriptor)
            for file in (stream.file, stream.copy):
                if file is not None:
                    file.close()
            if stream.lost != stream.reported:
                self._tell_lost(stream, self._clock())
            if self._archive is not None:
                self._archive.end(stream.file.path)
        return last_lines(streams[1].file.path)

    def _search(self, order: ReadAgentLog, answer: Callable[[LogSlice], None]) -> None:
        """Answer with the matching lines of a part of the stream."""
        incarnation = JobWorkerIncarnation(order.job_id, order.worker, order.worker_incarnation)
        if fault := _fault(order):
            answer(LogSlice(error=fault))
            return
        path = self._path(incarnation, order.stream)
        try:
            segments = segments_of(path, self._max_files)
        except FileNotFoundError:  # nothing was printed yet, or the file was removed
            answer(LogSlice(is_missing=True))
            return
        except OSError as error:
            answer(LogSlice(error=f"it cannot be searched: {error.strerror}"))
            return
        is_growing = incarnation in self._streams
        self._searches.begin(order, path, segments, self._limits(path, order), is_growing=is_growing, answer=answer)

    def _limits(self, path: Path, order: ReadAgentLog) -> tuple[int, int]:
        """Return start and end offset of the output in an order's time range, from the beginning of a line."""
        if not (order.since or order.until):
            return 0, sys.maxsize
        start, end = range_of(path, order.since, order.until)
        before = read_slice(path, max(0, start - _LINE_BYTES), min(start, _LINE_BYTES), self._max_files).data
        if start and len(before) == min(start, _LINE_BYTES):
            start -= len(before) - 1 - before.rfind(b"\n")
        return start, end

    def _slice(self, order: ReadAgentLog) -> LogSlice:
        if fault := _fault(order):
            return LogSlice(error=fault)
        incarnation = JobWorkerIncarnation(order.job_id, order.worker, order.worker_incarnation)
        if order.stream in ("out.times", "err.times"):
            log_path = self._path(incarnation, order.stream.removesuffix(".times"))
            return LogSlice(times_of(log_path, order.offset, order.offset + order.max_bytes), order.offset)
        if order.stream in OTHER_FILES:
            path = self._path(incarnation, OTHER_FILES[order.stream])
            if not path.exists():
                return LogSlice()
            return read_slice(path, order.offset, order.max_bytes, self._max_series_files)
        stream = self._streams[incarnation][order.stream == "err"] if incarnation in self._streams else None
        if order.keep and stream is not None:
            stream.read_to = max(stream.read_to, order.offset)
            stream.keep_until = self._clock() + KEEP_S
        path = self._path(incarnation, order.stream)
        limits = self._limits(path, order)
        found = read_slice(path, order.offset, order.max_bytes, self._max_files, limits)
        if stream is None or limits[1] < sys.maxsize:  # the range ends before the bytes held in memory
            return found
        return stream.file.with_held(found, order.offset, order.max_bytes)


def _fault(order: ReadAgentLog) -> str:
    """Return why an order cannot be carried out; empty if it can."""
    parts = (order.job_id, order.worker)
    if any(not part or "/" in part or "\0" in part or part in (".", "..") for part in parts):
        return f"{'/'.join(parts)} is no worker of this node"
    if order.stream == "both":
        return "stdout and stderr are two files: read 'out' and 'err', each with an offset of its own"
    if order.grep and order.stream not in ("out", "err"):
        return "only what a worker printed can be searched"
    return ""


def _pipe() -> tuple[int, int]:
    read, write = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read, False)
    with contextlib.suppress(OSError):  # above this user's limit: the default size works, too
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return read, write
