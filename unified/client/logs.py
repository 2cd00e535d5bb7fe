"""The output of workers, pulled from their agents through the master, as lines with the worker's name in front.

`StreamCursor` is pure: it says what to read next and turns what came into lines. `LogReader` does the asking.
Reading is pull, so a worker that prints faster than anybody can read costs nothing but its own log file: a live
reader that falls more than 1 MiB behind skips to the end and says how much it left out and where the whole is.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterator
from typing import Literal

from unified.client.connection import MasterConnection, Reply
from unified.client.summary import short_name, size_text
from unified.errors import ClusterError, ProtocolError, RefusedError
from unified.protocol.client_master import JobStatus, LogChunk, ReadLog, WorkerStatus
from unified.protocol.records import Stage

CHUNK_BYTES = 32768
BEHIND_BYTES = 1 << 20
MAX_LINE_CHARS = 8192
LIVE_PAUSE_S = 0.05
"""Between two reads of one stream: with CHUNK_BYTES, what a live reader shows at most is 0.65 MB/s a stream."""
IDLE_PAUSE_S = 0.5
MAX_IN_FLIGHT = 32
DRAIN_S = 2.0
"""After a job's end, how long a log that does not end is waited for."""

Stream = Literal["out", "err"]


class StreamCursor:
    """How far one output stream of one life of one worker was read.

    Args:
        is_live: skip ahead when far behind, and pause between reads.
        offset: where to begin; negative means that many bytes before the end.
    """

    def __init__(
        self, worker: str, incarnation: int, stream: Stream, prefix: str, *, is_live: bool, offset: int = 0
    ) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.stream: Stream = stream
        self.prefix = prefix
        self.is_final = False
        self.is_caught_up = False
        """All was read that was there when reading began."""
        self.due_at = 0.0
        self._is_live = is_live
        self._offset = offset
        self._pause_s = LIVE_PAUSE_S
        self._drop_to_newline = False
        self._partial = ""
        self._present: int | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def request(self, job: str) -> ReadLog:
        """What to ask next."""
        return ReadLog(
            job=job,
            worker=self.worker,
            incarnation=self.incarnation,
            stream=self.stream,
            offset=self._offset,
            max_bytes=CHUNK_BYTES,
        )

    def take(self, chunk: LogChunk, now: float) -> list[str]:
        """Lines that are whole now, each with its prefix."""
        lines: list[str] = []
        if self._offset < 0:
            self._drop_to_newline = chunk.offset > 0
        elif self._offset < chunk.offset:  # rotated away: what was begun before the gap does not go on behind it
            lines += self.flush()
            self._decoder.reset()
            lines.append(self._skipped(chunk.offset - self._offset, chunk.path))
        lines += self._cut(self._decoder.decode(chunk.data))
        self._offset = chunk.next_offset
        behind = chunk.size - chunk.next_offset
        if self._is_live and behind > BEHIND_BYTES:
            target = chunk.size - CHUNK_BYTES
            lines.append(self._skipped(target - self._offset, chunk.path))
            self._restart_at(target)
        self._present = chunk.size if self._present is None else self._present
        self.is_caught_up = self._offset >= self._present
        self.is_final = chunk.is_final and self._offset >= chunk.size
        if self.is_final:
            lines += self.flush()
        self._pace(bool(chunk.data), now)
        return lines

    def flush(self) -> list[str]:
        """The line that was begun and not ended, if there is one."""
        partial, self._partial = self._partial, ""
        return [self._line(partial)] if partial else []

    def nothing(self, now: float) -> None:
        """The log cannot be read now (no such file yet, or its node is away)."""
        self.is_caught_up = True
        self._pace(False, now)

    def _restart_at(self, offset: int) -> None:
        self._offset = offset
        self._partial = ""
        self._drop_to_newline = True
        self._decoder.reset()

    def _pace(self, has_data: bool, now: float) -> None:
        self._pause_s = LIVE_PAUSE_S if has_data else min(IDLE_PAUSE_S, self._pause_s * 1.5)
        self.due_at = now + (self._pause_s if self._is_live or not has_data else 0.0)

    def _cut(self, text: str) -> list[str]:
        if self._drop_to_newline:
            _, newline, text = text.partition("\n")
            if not newline:
                return []
            self._drop_to_newline = False
        *whole, self._partial = (self._partial + text).split("\n")
        if len(self._partial) > MAX_LINE_CHARS:
            whole.append(self._partial)
            self._partial = ""
        return [self._line(line) for line in whole]

    def _line(self, line: str) -> str:
        # what a progress bar drew over, a terminal would not show either
        return f"[{self.prefix}] {line.rstrip(chr(13)).rpartition(chr(13))[2]}"

    def _skipped(self, num_bytes: int, path: str) -> str:
        where = f", whole log: {path}" if path else ""
        return f"[{self.prefix}] … {size_text(num_bytes)} skipped{where}"


class LogReader:
    """Reads the output of a job's workers, all of them or one role or one rank.

    Args:
        is_live: for following: skip ahead when far behind.
        max_workers: output of more workers than this is not read; `left_out` says how many.
        tail_bytes: begin that far before the end of each stream; None means at the beginning.
        streams: which of the two.
    """

    def __init__(
        self,
        connection: MasterConnection,
        job: str,
        *,
        role: str | None = None,
        rank: int | None = None,
        is_live: bool = False,
        max_workers: int | None = None,
        tail_bytes: int | None = None,
        streams: tuple[Stream, ...] = ("out", "err"),
    ) -> None:
        self._connection = connection
        self._job = job
        self._role = role
        self._rank = rank
        self._is_live = is_live
        self._max_workers = max_workers
        self._offset = 0 if tail_bytes is None else -tail_bytes
        self._streams = streams
        self._lives: dict[str, int] = {}
        self._cursors: list[StreamCursor] = []
        self._is_over = False
        self.left_out = 0

    def update(self, status: JobStatus) -> None:
        """Take notice of lives that are new, and of the job's end."""
        left_out = 0
        for worker in sorted(status.workers, key=lambda worker: worker.rank):  # the first ranks of each role win
            if not self._is_wanted(worker):
                continue
            is_full = self._max_workers is not None and len(self._lives) >= self._max_workers
            if is_full and worker.name not in self._lives:
                left_out += 1
            else:
                self._meet(worker)
        self.left_out = left_out
        self._is_over = status.stage == Stage.STOPPED

    def pull(self) -> list[str]:
        """Read every stream that is due, once; lines come worker by worker."""
        now = time.monotonic()
        due = [cursor for cursor in self._cursors if self._is_over or cursor.due_at <= now]
        lines: list[str] = []
        for start in range(0, len(due), MAX_IN_FLIGHT):
            batch = due[start : start + MAX_IN_FLIGHT]
            replies = [self._connection.send(cursor.request(self._job)) for cursor in batch]
            for cursor, reply in zip(batch, replies, strict=True):
                lines += self._finish(cursor, reply)
        self._cursors = [cursor for cursor in self._cursors if not cursor.is_final]
        return lines

    def pause_s(self) -> float:
        """Seconds until a stream is due."""
        now = time.monotonic()
        return max(0.0, min((cursor.due_at - now for cursor in self._cursors), default=LIVE_PAUSE_S))

    def drain(self, timeout_s: float) -> Iterator[list[str]]:
        """Read what is left after the job's end, for at most `timeout_s` without anything new."""
        deadline = time.monotonic() + timeout_s
        while self._cursors and time.monotonic() < deadline:
            lines = self.pull()
            if lines:
                deadline = time.monotonic() + timeout_s
                yield lines
            elif self._cursors:
                time.sleep(LIVE_PAUSE_S)

    def read_present(self) -> Iterator[list[str]]:
        """Read what was printed so far, once."""
        while not all(cursor.is_caught_up for cursor in self._cursors):
            yield self.pull()

    def flush(self) -> list[str]:
        """Lines that were begun and not ended, of streams still read."""
        return [line for cursor in self._cursors for line in cursor.flush()]

    def follow(self, status: Callable[[], JobStatus]) -> Iterator[str]:
        """Lines as they are printed, until the job has ended and all was read.

        Args:
            status: asks the master for the job's status; called between two reads.
        """
        while True:
            now = status()
            self.update(now)
            if now.stage == Stage.STOPPED:
                break
            yield from self.pull()
            time.sleep(max(self.pause_s(), LIVE_PAUSE_S))
        yield from self.rest()

    def rest(self) -> Iterator[str]:
        """Lines that are there now; all there will ever be, if the job has ended."""
        for lines in self.drain(DRAIN_S) if self._is_over else self.read_present():
            yield from lines
        yield from self.flush()

    def _is_wanted(self, worker: WorkerStatus) -> bool:
        if not worker.node:  # never had a place, so there is no log
            return False
        return (self._role is None or worker.role == self._role) and (self._rank is None or worker.rank == self._rank)

    def _meet(self, worker: WorkerStatus) -> None:
        first = self._lives.get(worker.name, worker.incarnation - 1 if self._offset else -1) + 1
        for incarnation in range(first, worker.incarnation + 1):
            prefix = short_name(worker) + (f"#{incarnation}" if incarnation else "")
            for stream in self._streams:
                self._cursors.append(
                    StreamCursor(worker.name, incarnation, stream, prefix, is_live=self._is_live, offset=self._offset)
                )
        self._lives[worker.name] = max(worker.incarnation, self._lives.get(worker.name, -1))

    def _finish(self, cursor: StreamCursor, reply: Reply) -> list[str]:
        try:
            answer = reply.result()
        except RefusedError:
            cursor.nothing(time.monotonic())
            cursor.is_final = self._is_over
            return []
        except (ClusterError, ProtocolError):  # silent or being replaced: the status tells the user, not the log
            cursor.nothing(time.monotonic())
            return []
        if not isinstance(answer, LogChunk):
            raise ProtocolError(f"the master answered ReadLog with {type(answer).__name__}.")
        return cursor.take(answer, time.monotonic())
