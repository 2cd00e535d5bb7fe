"""Values that a worker reported, pulled from its agents through the master.

Each incarnation of a worker has a file of its own (`unified_agent.logs.series`), which is read like a log. Reading goes
backwards, from the newest line, so that the last hundred points of a long run cost one request.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from functools import partial, reduce
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Literal, NamedTuple

from msgspec import DecodeError, structs
from msgspec.json import Decoder

from unified.client.connection import MasterConnection
from unified.errors import RefusedError
from unified.protocol.client_master import LogChunk, ReadLog
from unified.protocol.records import CallSpan, WorkerReport

BLOCK_BYTES = 256 * 1024
Series = Literal["metrics", "trace"]
_report: Decoder[WorkerReport] = Decoder(WorkerReport)
_span: Decoder[CallSpan] = Decoder(CallSpan)


class KeptReports(NamedTuple):
    """Series of one worker, the oldest point first."""

    reports: list[WorkerReport]
    missing: list[str]
    """Reasons for which the reports of some incarnations could not be read."""

    @property
    def num_thinned(self) -> int:
        """Number of points between these that were thinned out."""
        pairs = [(old, new) for old, new in pairwise(self.reports) if old.incarnation == new.incarnation]
        return sum(max(0, new.number - old.number - 1) for old, new in pairs)


def read_reports(
    connection: MasterConnection,
    job: str,
    worker: str,
    newest: int,
    *,
    since: float = 0.0,
    limit: int = 1000,
    within_s: float = math.inf,
) -> KeptReports:
    """Return the newest reports of a worker over all its incarnations. Blocks for a few requests to the master.

    Args:
        newest: the worker's newest incarnation, as in `WorkerStatus`; -1: none has started yet.
        since: leave out reports of this time (seconds since 1970) or before.
        limit: greatest number of reports; the newest are returned.
        within_s: seconds after which no earlier incarnation is read; the reports read by then are returned.

    Raises:
        RefusedError: the job or the worker is not known.
        MasterUnreachableError: nobody answered in time.
    """
    reports: list[WorkerReport] = []
    missing: list[str] = []
    ends_at = time.monotonic() + within_s
    for incarnation in range(newest, -1, -1):
        if time.monotonic() > ends_at:
            missing.append(f"incarnations before {incarnation + 1} were not read within {within_s:g} s")
            break
        try:
            backwards = _backwards(connection, job, worker, incarnation)
            for _, parts in groupby(backwards, attrgetter("number", "step")):
                report = reduce(lambda new, old: structs.replace(new, metrics={**old.metrics, **new.metrics}), parts)
                if report.at <= since or len(reports) >= limit:
                    return KeptReports(reports[::-1], missing)
                reports.append(report)
        except RefusedError as refusal:
            if incarnation == newest and refusal.code != "unavailable":
                raise
            missing.append(str(refusal))
            if refusal.code != "unavailable":
                break  # the master remembers nothing of this incarnation, nor of earlier ones
    return KeptReports(reports[::-1], missing)


def _backwards(connection: MasterConnection, job: str, worker: str, incarnation: int) -> Iterator[WorkerReport]:
    """Yield the points of one incarnation, the newest first. A point that was reported in parts comes in parts."""
    for line in _lines_backwards(connection, job, worker, incarnation, "metrics"):
        with contextlib.suppress(DecodeError):  # an empty line, or a line whose beginning was rotated away
            yield _report.decode(line)


def read_spans(connection: MasterConnection, job: str, worker: str, incarnation: int, *, limit: int) -> list[CallSpan]:
    """Return the newest spans of the calls of one incarnation, oldest first; none if it has no ``UNIFIED_TRACE``.

    Raises as `read_reports` does.
    """
    spans: list[CallSpan] = []
    for line in _lines_backwards(connection, job, worker, incarnation, "trace"):
        with contextlib.suppress(DecodeError):
            spans.append(_span.decode(line))
        if len(spans) >= limit:
            break
    return spans[::-1]


def _lines_backwards(
    connection: MasterConnection, job: str, worker: str, incarnation: int, stream: Series
) -> Iterator[bytes]:
    def read(offset: int, nbytes: int) -> tuple[int, bytes]:
        """Return data and its offset, which is larger than asked for if a rotation removed the first part."""
        ask = partial(_ask, connection, job, worker, incarnation, stream)
        chunk = ask(offset, nbytes)
        start, data = chunk.offset, chunk.data
        while len(data) < nbytes and chunk.data and chunk.next_offset < chunk.size:  # a read ends where its file ends
            chunk = ask(start + len(data), nbytes - len(data))
            data += chunk.data
        return start, data

    start, block = read(-BLOCK_BYTES, BLOCK_BYTES)
    block = block[: block.rfind(b"\n") + 1]  # the last line may be about to be written
    rest = b""
    while True:
        rest, *lines = (block + rest).split(b"\n")
        yield from reversed(lines)
        end = start
        if end > 0:
            start, block = read(max(0, end - BLOCK_BYTES), min(end, BLOCK_BYTES))
        if start >= end:
            yield rest
            return
        block = block[: end - start]


def _ask(
    connection: MasterConnection, job: str, worker: str, incarnation: int, stream: Series, offset: int, max_bytes: int
) -> LogChunk:
    request = ReadLog(
        job=job, worker=worker, incarnation=incarnation, stream=stream, offset=offset, max_bytes=max_bytes
    )
    return connection.ask(request, LogChunk)
