"""Values that a worker reported, pulled from its agents through the master.

Each life of a worker has a file of its own with a line for each report (`unified_agent.output`), which is read like a
log. Reading goes backwards, from the newest line, so that the last hundred points of a long run cost one request.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from msgspec import DecodeError
from msgspec.json import Decoder

from unified.client.connection import MasterConnection
from unified.errors import RefusedError
from unified.protocol.client_master import LogChunk, ReadLog
from unified.protocol.records import WorkerReport

BLOCK_BYTES = 256 * 1024
_report: Decoder[WorkerReport] = Decoder(WorkerReport)


class KeptReports(NamedTuple):
    """Reports of one worker, the oldest first."""

    reports: list[WorkerReport]
    missing: list[str]
    """Reasons for which the reports of some lives could not be read."""


def read_reports(
    connection: MasterConnection, job: str, worker: str, newest: int, *, since: float = 0.0, limit: int = 1000
) -> KeptReports:
    """Return the newest reports of a worker over all its lives. Blocks for a few requests to the master.

    Args:
        newest: the worker's newest incarnation, as `WorkerStatus` has it; -1 for one that has not lived yet.
        since: leave out what was reported at this time (seconds since 1970) or before.
        limit: number of reports, at most; of more than these the newest are returned.

    Raises:
        RefusedError: the job or the worker is not known.
        MasterUnreachableError: nobody answered in time.
    """
    reports: list[WorkerReport] = []
    missing: list[str] = []
    for incarnation in range(newest, -1, -1):
        try:
            for report in _backwards(connection, job, worker, incarnation):
                if report.at <= since or len(reports) >= limit:
                    return KeptReports(reports[::-1], missing)
                reports.append(report)
        except RefusedError as refusal:
            if incarnation == newest and refusal.code != "unavailable":
                raise
            missing.append(str(refusal))
            if refusal.code != "unavailable":
                break  # the master remembers nothing of this life, nor of earlier ones
    return KeptReports(reports[::-1], missing)


def _backwards(connection: MasterConnection, job: str, worker: str, incarnation: int) -> Iterator[WorkerReport]:
    """Yield the reports of one life, the newest first."""
    for line in _lines_backwards(connection, job, worker, incarnation):
        with contextlib.suppress(DecodeError):  # an empty line, or the end of one whose first part was rotated away
            yield _report.decode(line)


def _lines_backwards(connection: MasterConnection, job: str, worker: str, incarnation: int) -> Iterator[bytes]:
    """Yield the lines of one life, the newest first."""

    def read(offset: int, nbytes: int) -> tuple[int, bytes]:
        """Return what was asked for and its offset, which is larger than asked if a rotation removed the first part."""
        chunk = _ask(connection, job, worker, incarnation, offset, nbytes)
        start, data = chunk.offset, chunk.data
        while len(data) < nbytes and chunk.data and chunk.next_offset < chunk.size:  # a read ends where its file ends
            chunk = _ask(connection, job, worker, incarnation, start + len(data), nbytes - len(data))
            data += chunk.data
        return start, data

    start, block = read(-BLOCK_BYTES, BLOCK_BYTES)
    block = block[: block.rfind(b"\n") + 1]  # the last line may be about to be written
    rest = b""
    while True:
        rest, *lines = (block + rest).split(b"\n")
        yield from reversed(lines)
        if start == 0:
            yield rest
            return
        end = start
        start, block = read(max(0, end - BLOCK_BYTES), min(end, BLOCK_BYTES))
        if start >= end:
            return  # `rest` is the end of a line whose beginning was rotated away
        block = block[: end - start]


def _ask(
    connection: MasterConnection, job: str, worker: str, incarnation: int, offset: int, max_bytes: int
) -> LogChunk:
    request = ReadLog(
        job=job, worker=worker, incarnation=incarnation, stream="metrics", offset=offset, max_bytes=max_bytes
    )
    return connection.ask(request, LogChunk)
