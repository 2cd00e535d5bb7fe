"""The output of workers, pulled from their agents through the master.

`StreamCursor` is pure: it says what to read next and turns the answer into text. `LineView` makes lines of the text,
with the worker's name in front. `LogReader` sends the requests. Readers pull, so a worker that prints too fast costs
only its own log file: a live reader that is more than 1 MiB behind skips to the end, and says how much it left out and
where the whole log is. A reader in mode `keep` skips nothing, and the worker waits for it.

Lines of several streams come in the order of time: `LineQueue` holds a line back while a stream that still has older
output to be read may have an earlier one. Agents keep the times at which output was written in files of their own,
which `LogReader` reads beside the output.
"""

from __future__ import annotations

import codecs
import contextlib
import heapq
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from string import Template
from typing import Literal, NamedTuple

from msgspec import structs
from msgspec.json import encode as encode_json

from unified.client.connection import MasterConnection, PendingReply
from unified.client.folding import FOLD_S, LineFolder
from unified.client.report import short_name, size_text
from unified.errors import ClusterError, ProtocolError, RefusedError
from unified.job.names import parse_worker
from unified.job.spec import OutputFiles
from unified.protocol.client_master import JobStatus, LogChunk, ReadLog, WorkerStatus
from unified.protocol.records import LOG_TIME, LogStream, Stage
from unified.values import Value

CHUNK_BYTES = 32768
KEEP_CHUNK_BYTES = 262144
BEHIND_BYTES = 1 << 20
MAX_LINE_CHARS = 8192
LIVE_PAUSE_S = 0.05
"""Pause between two reads of one stream: with CHUNK_BYTES a live reader shows at most 0.65 MB/s a stream."""
IDLE_PAUSE_S = 0.5
MAX_IDLE_READS_S = 400
"""Reads a second of all silent streams together: with more streams, each is read less often."""
MAX_IN_FLIGHT = 32
KEEP_IN_FLIGHT = 8
"""Number of reads of KEEP_CHUNK_BYTES in flight: at most 2 MiB are in transit through the master."""
DRAIN_S = 2.0
"""Seconds without new output, after a job's end, until a reader stops waiting for the end of a log."""
KEEP_DRAIN_S = 10.0
QUIET_S = 1.0
"""Seconds after which a partial line that does not go on is shown."""
_TIME_CHARS = len("2026-01-31T12:00:00.0")
MAX_WAITING = 100_000
"""Number of lines that wait for earlier ones, above which only the streams are read that may have those."""
RENEW_S = 5.0
"""Seconds after which a reader in mode `keep` that cannot go on shows again that it is still there."""
SEARCH_WITHIN_S = 5.0
_SEARCH = """
import re, sys
search = re.compile(sys.argv[1].encode()).search
sys.stdout.buffer.writelines(line for line in sys.stdin.buffer if search(line.rstrip(b"\\r\\n")))
"""

Stream = Literal["out", "err"]
_TIMES: dict[Stream, LogStream] = {"out": "out.times", "err": "err.times"}
Mode = Literal["once", "live", "keep"]


class LineFilter(NamedTuple):
    """Selects lines on the host that has them."""

    grep: str = ""
    """Regular expression; empty: every line."""
    since: float = 0.0
    """Seconds since 1970; 0: from the first line on."""
    until: float = 0.0


ALL_LINES = LineFilter()


class OutputSource(NamedTuple):
    """One output stream of one incarnation of one worker."""

    prefix: str
    """Names the worker in front of a line: ``[trainer-0] ``, ``[trainer-0#1] `` for its second incarnation."""
    stream: Stream
    is_prefixed: bool = False
    """The prefix is written in any case."""
    worker: str = ""
    """Short name: ``trainer-0``."""
    incarnation: int = 0


class LogLine(Value, frozen=True, kw_only=True):
    """One line of a worker's output, as data."""

    role: str
    rank: int
    incarnation: int
    """0 for the first."""
    stream: Stream
    """``out`` or ``err``."""
    at: float = 0.0
    """Time at which the worker wrote it, to a tenth of a second: seconds since 1970 by its node's clock. 0: unknown."""
    line: str = ""
    """Text of the line, without its end."""
    note: str = ""
    """Note of Unified about output that is missing here; then `line` is empty."""


class Output(NamedTuple):
    """Next piece of the output of one stream."""

    source: OutputSource
    text: str = ""
    note: str = ""
    """Note of ours about what is missing before `text`."""
    is_quiet: bool = False
    """Nothing has followed for a moment: a partial line is to be shown."""
    is_end: bool = False
    """Nothing follows, even if the text ends within a line."""
    at: float = 0.0
    """Time at which the text was written, as in `LogLine`."""


class Line(NamedTuple):
    """One line of a stream, or a note of ours in its place."""

    source: OutputSource
    text: str
    is_note: bool = False
    at: float = 0.0


class StreamCursor:
    """Position of a reader in one output stream of one incarnation of a worker.

    Args:
        mode: as for `LogReader`; ``live`` pauses also after a read that had data.
        offset: where to begin; negative means that many bytes before the end.
        lines: filter for the lines to read. With a filter no mode skips lines.
    """

    def __init__(
        self,
        worker: str,
        incarnation: int,
        source: OutputSource,
        *,
        mode: Mode = "once",
        offset: int = 0,
        lines: LineFilter = ALL_LINES,
    ) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.source = source
        self.is_final = False
        self.is_caught_up = False
        """The output that was there at the first read was read."""
        self.due_at = 0.0
        self.idle_s = IDLE_PAUSE_S
        """Longest pause between reads of a silent stream."""
        self.lines = lines
        self.has_moved = False
        """The last answer was about a further part of the stream, even if no line in it was selected."""
        self._is_live = mode == "live"
        self._keep = mode == "keep"
        self._offset = offset
        self._pause_s = LIVE_PAUSE_S
        self._drop_to_newline = False
        self._is_line_begun = False
        """A partial line waits, and was not reported as quiet yet."""
        self._text_at = 0.0
        self._present: int | None = None
        self._noted = ""
        self.newest_at = 0.0
        """Time of the newest output that was read. Infinite if it is unknown."""
        # In mode `keep` a file gets bytes that are no UTF-8 unchanged.
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape" if self._keep else "replace")

    def request(self, job: str, max_bytes: int = 0) -> ReadLog:
        return ReadLog(
            job=job,
            worker=self.worker,
            incarnation=self.incarnation,
            stream=self.source.stream,
            offset=self._offset,
            max_bytes=max_bytes or (KEEP_CHUNK_BYTES if self._keep or self.lines.grep else CHUNK_BYTES),
            keep=self._keep,
            **self.lines._asdict(),
        )

    def times_request(self, job: str, chunk: LogChunk) -> ReadLog | None:
        """Return the request for the times of a chunk; None if it is empty, or has only lines that match."""
        if not chunk.data or self.lines.grep:
            return None
        return ReadLog(
            job=job,
            worker=self.worker,
            incarnation=self.incarnation,
            stream=_TIMES[self.source.stream],
            offset=chunk.offset,
            max_bytes=chunk.next_offset - chunk.offset,
        )

    def take(self, chunk: LogChunk, now: float, times: bytes = b"") -> list[Output]:
        """Return the output in a chunk; `times` are its `LOG_TIME` records, if they are known."""
        found: list[Output] = []
        if self._offset < 0:
            self._drop_to_newline = chunk.offset > 0
        elif self._offset < chunk.offset and not (self.lines.since or self.lines.until):  # rotated away
            self._decoder.reset()
            found.append(self._skipped(chunk.offset - self._offset, chunk.path))
        if chunk.note and chunk.note != self._noted:
            found.append(Output(self.source, note=chunk.note))
        self._noted = chunk.note
        *earlier, (at, last) = self._by_time(chunk, times)
        for time_, part in earlier:
            if text := self._from_newline(self._decoder.decode(part)):
                found.append(Output(self.source, text, at=time_))
        text = self._from_newline(self._decoder.decode(last))
        self.has_moved = chunk.next_offset > self._offset
        self._offset = chunk.next_offset
        self.is_final = chunk.is_final and self._offset >= chunk.size
        if self.is_final:
            text += self._decoder.decode(b"", final=True)
        if text:
            self._is_line_begun, self._text_at = not text.endswith("\n"), now
        is_quiet = self._is_line_begun and now - self._text_at >= QUIET_S
        if text or is_quiet or self.is_final:
            self._is_line_begun = self._is_line_begun and not is_quiet
            found.append(Output(self.source, text, is_quiet=is_quiet, is_end=self.is_final, at=at))
        behind = chunk.size - chunk.next_offset
        if self._is_live and behind > BEHIND_BYTES and not any(self.lines):
            target = chunk.size - CHUNK_BYTES
            found.append(self._skipped(target - self._offset, chunk.path))
            self._offset = target
            self._drop_to_newline = True
            self._decoder.reset()
        self._present = chunk.size if self._present is None else self._present
        self.is_caught_up = self._offset >= self._present or not (self.has_moved or chunk.is_busy)
        self._set_pause(self.has_moved, now)
        return found

    def nothing(self, now: float) -> None:
        """Note that the log cannot be read now: there is no file yet, or its node is away."""
        self.is_caught_up, self.has_moved = True, False
        self._set_pause(False, now)

    def _set_pause(self, has_data: bool, now: float) -> None:
        self._pause_s = LIVE_PAUSE_S if has_data else min(self.idle_s, self._pause_s * 1.5)
        self.due_at = now + (self._pause_s if self._is_live or not has_data else 0.0)

    def _by_time(self, chunk: LogChunk, times: bytes) -> list[tuple[float, bytes]]:
        """Return the parts of a chunk, at least one, each with the time at which it was written (0: unknown)."""
        records = list(LOG_TIME.iter_unpack(times[: len(times) // LOG_TIME.size * LOG_TIME.size]))
        starts = [(max(offset - chunk.offset, 0), at) for offset, at in records]
        starts[:1] = [(0, starts[0][1] if starts else 0.0)]
        ends = [*(start for start, _ in starts[1:]), len(chunk.data)]
        parts = [(at, chunk.data[start:end]) for (start, at), end in zip(starts, ends, strict=True) if start < end]
        if chunk.data:
            self.newest_at = max(self.newest_at, parts[-1][0] or math.inf)
        return parts or [(0.0, b"")]

    def _from_newline(self, text: str) -> str:
        if self._drop_to_newline:
            _, newline, text = text.partition("\n")
            self._drop_to_newline = not newline
        return text

    def _skipped(self, num_bytes: int, path: str) -> Output:
        where = f", whole log: {path}" if path else ""
        return Output(self.source, note=f"{size_text(num_bytes)} skipped{where}")


class LineView:
    """Makes complete lines of many streams, each with its prefix unless `has_prefix` is False.

    Attributes:
        folder: folds equal lines of several workers into one. Lines wait in it until `due` returns them.
        is_data: each line is a `LogLine` as JSON.
        has_times: each line begins with its time.
    """

    def __init__(self, *, has_prefix: bool = True) -> None:
        self.folder: LineFolder | None = None
        self.is_data = False
        self.has_times = False
        self._has_prefix = has_prefix
        self._partials: dict[OutputSource, str] = {}

    def feed(self, outputs: Iterable[Output]) -> list[str]:
        """Return the lines that are complete now. A line that is cut off by a gap or an end counts as complete."""
        return self.show(line for output in outputs for line in self.lines(output))

    def show(self, lines: Iterable[Line]) -> list[str]:
        if self.folder is None:
            return [self._shown(line) for line in lines]
        for line in lines:
            self.folder.add(*self._texts(line))
        return self.due()

    def due(self, *, is_end: bool = False) -> list[str]:
        """Return the lines that have waited long enough for equal ones; with `is_end` all that wait."""
        return [] if self.folder is None else self.folder.take(is_end=is_end)

    def flush(self) -> list[str]:
        """Return all lines that wait, and the partial lines."""
        partials, self._partials = self._partials, {}
        return self.due(is_end=True) + [self._shown(Line(source, seen(text))) for source, text in partials.items()]

    def partials(self) -> list[str]:
        """Return the partial lines as they are now; they go on."""
        return [self._shown(Line(source, seen(text))) for source, text in self._partials.items()]

    def lines(self, output: Output) -> Iterator[Line]:
        """Yield the lines that are complete with this output."""
        source = output.source
        begun = self._partials.pop(source, "")
        if output.note:
            if begun:
                yield Line(source, seen(begun))
            yield Line(source, output.note, is_note=True)
            begun = ""
        *whole, rest = (begun + output.text).split("\n")
        if rest and (output.is_end or len(rest) > MAX_LINE_CHARS):
            whole.append(rest)
        elif rest:
            self._partials[source] = not_drawn_over(rest)
        for line in whole:
            yield Line(source, seen(line), at=output.at)

    def _shown(self, line: Line) -> str:
        if not self.is_data:
            return self._time(line.at) + "".join(self._texts(line))
        source = line.source
        role, rank = parse_worker(source.worker)
        found = LogLine(role=role, rank=rank, incarnation=source.incarnation, stream=source.stream, at=line.at)
        return encode_json(structs.replace(found, **{"note" if line.is_note else "line": line.text})).decode()

    def _time(self, at: float) -> str:
        if not self.has_times:
            return ""
        text = datetime.fromtimestamp(at).isoformat(timespec="milliseconds")[:_TIME_CHARS] if at else ""
        return f"{text:{_TIME_CHARS}} "

    def _texts(self, line: Line) -> tuple[str, str]:
        prefix = line.source.prefix if self._has_prefix or line.is_note else ""
        return prefix, f"… {line.text}" if line.is_note else line.text


class LineQueue:
    """Lines of several streams that wait for earlier ones."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, Line]] = []
        self._count = 0
        self._newest: dict[OutputSource, float] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, line: Line) -> None:
        """Add a line; one without a time goes behind the last one of its stream."""
        at = self._newest[line.source] = max(line.at, self._newest.get(line.source, 0.0))
        self._count += 1
        heapq.heappush(self._waiting, (at, self._count, line))

    def take(self, until: float) -> Iterator[Line]:
        """Yield the lines up to a time, in the order of time."""
        while self._waiting and self._waiting[0][0] <= until:
            yield heapq.heappop(self._waiting)[2]


def not_drawn_over(line: str) -> str:
    """Return the part of a line that a progress bar has not drawn over."""
    return line[line.rstrip("\r").rfind("\r") + 1 :]


def seen(line: str) -> str:
    """Return the part of a line that a terminal would show."""
    return not_drawn_over(line).rstrip("\r")


class LogFilter(NamedTuple):
    """Selects workers by role and rank (None: any), and their output."""

    role: str | None = None
    rank: int | None = None
    streams: tuple[Stream, ...] = ("out", "err")
    lines: LineFilter = ALL_LINES

    def takes(self, worker: WorkerStatus) -> bool:
        """Return True if the worker is selected and has a log, because it has started."""
        is_of_role = self.role is None or worker.role == self.role
        return worker.incarnation >= 0 and is_of_role and (self.rank is None or worker.rank == self.rank)


EVERYTHING = LogFilter()


class LogReader:
    """Reads the output of a job's workers.

    Args:
        wanted: the workers and streams to read.
        mode: ``once`` reads what is there; ``live`` follows for a person, and skips ahead when far behind; ``keep``
            follows, too, and agents keep all output until it was read.
        max_workers: the output of more workers is not read; `left_out` is their number.
        tail_bytes: begin that far before the end of each stream; None means at the beginning.
        files: by role, the output that goes to files of its own and is left out here.

    Attributes:
        view: makes the lines.
    """

    def __init__(
        self,
        connection: MasterConnection,
        job: str,
        wanted: LogFilter = EVERYTHING,
        *,
        mode: Mode = "once",
        max_workers: int | None = None,
        tail_bytes: int | None = None,
        files: Mapping[str, OutputFiles] | None = None,
    ) -> None:
        self._connection = connection
        self._job = job
        self._wanted = wanted
        self._mode = mode
        self._max_workers = max_workers
        self._offset = 0 if tail_bytes is None else -tail_bytes
        self._files = files or {}
        self._incarnations: dict[str, int] = {}
        self._cursors: list[StreamCursor] = []
        self.view = LineView()
        self._queue = LineQueue()
        self._is_over = False
        self.left_out = 0

    def update(self, status: JobStatus) -> None:
        """Note new incarnations, and the job's end."""
        left_out = 0
        for worker in sorted(status.workers, key=lambda worker: worker.rank):  # the first ranks of each role win
            if not self._wanted.takes(worker):
                continue
            is_full = self._max_workers is not None and len(self._incarnations) >= self._max_workers
            if is_full and worker.name not in self._incarnations:
                left_out += 1
            else:
                self._meet(worker)
        self.left_out = left_out
        self._is_over = status.stage == Stage.STOPPED

    def pull(self) -> Iterator[list[Output]]:
        """Read every stream that is due once, a few at a time; yield output worker by worker."""
        yield from self._pull(self._due())

    def _due(self) -> list[StreamCursor]:
        now = time.monotonic()
        return [cursor for cursor in self._cursors if self._is_over or cursor.due_at <= now]

    def pull_lines(self) -> Iterator[str]:
        """Read streams that are due once; yield the lines that are complete, and have no earlier one to wait for."""
        due, oldest = self._due(), self._read_until()
        if len(self._queue) > MAX_WAITING:
            due = [cursor for cursor in due if cursor.newest_at <= oldest]
        for outputs in self._pull(due, is_timed=self._is_timed):
            self._enqueue(outputs)
        yield from self.view.show(self._queue.take(self._read_until()))
        yield from self.view.due()

    @property
    def _is_timed(self) -> bool:
        return self.view.has_times or self.view.is_data or len(self._cursors) > 1

    def _enqueue(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            for line in self.view.lines(output):
                self._queue.add(line)

    def _read_until(self) -> float:
        """Return the time up to which all that was there at the first reads was read."""
        return min((cursor.newest_at for cursor in self._cursors if not cursor.is_caught_up), default=math.inf)

    def _pull(self, due: list[StreamCursor], *, is_timed: bool = False) -> Iterator[list[Output]]:
        count = KEEP_IN_FLIGHT if self._mode == "keep" else MAX_IN_FLIGHT
        for start in range(0, len(due), count):
            batch = due[start : start + count]
            replies = [self._connection.send(cursor.request(self._job)) for cursor in batch]
            found: list[Output] = []
            chunks = []
            for cursor, reply in zip(batch, replies, strict=True):
                chunk, lost = self._chunk(cursor, reply)
                found += lost
                if chunk is not None:
                    chunks.append((cursor, chunk))
            times = self._read_times(chunks) if is_timed else {}
            for cursor, chunk in chunks:
                found += cursor.take(chunk, time.monotonic(), times.get(cursor, b""))
            if found:
                yield found
        self._cursors = [cursor for cursor in self._cursors if not cursor.is_final]

    def _read_times(self, chunks: Iterable[tuple[StreamCursor, LogChunk]]) -> dict[StreamCursor, bytes]:
        """Return the times of chunks. A log may have none: an older one, or one that its node cannot send now."""
        wanted = [(cursor, cursor.times_request(self._job, chunk)) for cursor, chunk in chunks]
        sent = [(cursor, self._connection.send(request)) for cursor, request in wanted if request is not None]
        found: dict[StreamCursor, bytes] = {}
        for cursor, reply in sent:
            with contextlib.suppress(ClusterError, ProtocolError):
                answer = reply.result()
                if isinstance(answer, LogChunk):
                    found[cursor] = answer.data
        return found

    def renew(self) -> None:
        """Ask agents to keep logs while the reader pauses, because nobody takes the output that was read."""
        if self._mode == "keep":
            for cursor in self._cursors:
                self._connection.send(cursor.request(self._job, max_bytes=1))

    def pause_s(self) -> float:
        """Seconds until a stream is due."""
        now = time.monotonic()
        return max(0.0, min((cursor.due_at - now for cursor in self._cursors), default=LIVE_PAUSE_S))

    def drain(self, *, is_timed: bool = False) -> Iterator[list[Output]]:
        """Read the rest after the job's end, until nothing new came for `DRAIN_S` (`keep` or grep: `KEEP_DRAIN_S`)."""
        timeout_s = KEEP_DRAIN_S if self._mode == "keep" or self._wanted.lines.grep else DRAIN_S
        deadline = time.monotonic() + timeout_s
        while self._cursors and time.monotonic() < deadline:
            has_news = False
            cursors = list(self._cursors)
            for outputs in self._pull(self._due(), is_timed=is_timed):
                has_news = True
                yield outputs
            if has_news or any(cursor.has_moved for cursor in cursors):  # the consumer may have been slow
                deadline = time.monotonic() + timeout_s
            elif self._cursors:
                if self.view.folder is not None:
                    yield []  # so that lines that wait are shown
                time.sleep(LIVE_PAUSE_S)

    def read_present(self) -> Iterator[str]:
        """Yield the lines that were printed so far."""
        while not all(cursor.is_caught_up for cursor in self._cursors):
            yield from self.pull_lines()
            time.sleep(self.pause_s())

    def follow(self, status: Callable[[], JobStatus]) -> Iterator[str]:
        """Yield lines as they are printed, until the job has ended and all was read. Calls `status` between reads."""
        while True:
            now = status()
            self.update(now)
            if now.stage == Stage.STOPPED:
                break
            yield from self.pull_lines()
            time.sleep(min(max(self.pause_s(), LIVE_PAUSE_S), FOLD_S))
        yield from self.rest()

    def rest(self) -> Iterator[str]:
        """Yield the lines that are there now; if the job has ended, all that are left."""
        yield from self.read_present()
        if self._is_over:
            for outputs in self.drain(is_timed=self._is_timed):
                self._enqueue(outputs)
                yield from self.view.show(self._queue.take(math.inf))
        yield from self.view.flush()

    def _meet(self, worker: WorkerStatus) -> None:
        first = self._incarnations.get(worker.name, worker.incarnation - 1 if self._offset else -1) + 1
        if first > worker.incarnation:
            return
        for cursor in self._cursors:
            if cursor.worker == worker.name:
                cursor.due_at = 0.0  # the last output of earlier incarnations comes before that of the new one
        for incarnation in range(first, worker.incarnation + 1):
            name = short_name(worker) + (f"#{incarnation}" if incarnation else "")
            for stream in self._wanted.streams:
                files = self._files.get(worker.role)
                if files is not None and not files.is_shown(stream, worker.local_rank):
                    continue
                source = OutputSource(f"[{name}] ", stream, worker=short_name(worker), incarnation=incarnation)
                if files is not None and files.is_teed(stream, worker.local_rank):  # as torchrun writes it
                    prefix = Template(files.line_prefix).safe_substitute(
                        role_name=files.label, rank=worker.rank, local_rank=worker.local_rank, hostname=worker.node
                    )
                    source = source._replace(prefix=prefix, is_prefixed=True)
                self._cursors.append(
                    StreamCursor(
                        worker.name,
                        incarnation,
                        source,
                        mode=self._mode,
                        offset=self._offset,
                        lines=self._wanted.lines,
                    )
                )
        for cursor in self._cursors:
            cursor.idle_s = max(IDLE_PAUSE_S, len(self._cursors) / MAX_IDLE_READS_S)
        self._incarnations[worker.name] = worker.incarnation

    def _chunk(self, cursor: StreamCursor, reply: PendingReply) -> tuple[LogChunk | None, list[Output]]:
        """Return the next part of a stream, or None and a note of what is lost, if anything is."""
        try:
            answer = reply.result()
        except RefusedError as refusal:
            cursor.nothing(time.monotonic())
            is_unsearched = bool(cursor.lines.grep) and (refusal.code != "unavailable" or self._mode == "once")
            cursor.is_final = self._is_over or is_unsearched
            is_lost = is_unsearched or (self._is_over and refusal.code == "unavailable")
            note = Output(cursor.source, note=f"the rest is missing: {refusal}", is_end=True)
            return None, [note] if is_lost else []
        except (ClusterError, ProtocolError):  # the master is silent or replaced: the status says so, not the log
            cursor.nothing(time.monotonic())
            return None, []
        if not isinstance(answer, LogChunk):
            raise ProtocolError(f"the master answered ReadLog with {type(answer).__name__}.")
        if answer.note and answer.data and cursor.lines.grep:  # the agent did not search it
            answer = _searched(answer, cursor.lines.grep)
        return answer, []


def _searched(chunk: LogChunk, pattern: str) -> LogChunk:
    """Return a chunk with the matching lines alone. A child process searches, because it can be killed."""
    command = [sys.executable, "-I", "-S", "-c", _SEARCH, pattern]
    try:
        done = subprocess.run(command, input=chunk.data, capture_output=True, check=True, timeout=SEARCH_WITHIN_S)
    except (OSError, subprocess.SubprocessError) as error:
        is_slow = isinstance(error, subprocess.TimeoutExpired)
        why = "the pattern takes too long for it: search for a simpler one" if is_slow else f"not searched: {error}"
        return structs.replace(chunk, data=b"", note=f"{chunk.note}; {why}")
    return structs.replace(chunk, data=done.stdout)
