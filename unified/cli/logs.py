"""``unified logs JOB``: what its workers printed, each line with its worker in front."""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Annotated

import typer

from unified.cli.options import Job, Master, connect
from unified.cli.text import first_line
from unified.client.handle import JobHandle
from unified.client.logs import LogReader, Stream
from unified.client.streams import printable
from unified.errors import UsageError, nearest
from unified.job.names import parse_worker
from unified.protocol.client_master import JobStatus

LINE_BYTES = 400
"""How long a line may be on average for ``--tail`` to find all it wants."""


class Streams(StrEnum):
    """Which output."""

    OUT = "out"
    ERR = "err"
    BOTH = "both"


STREAMS: dict[Streams, tuple[Stream, ...]] = {
    Streams.OUT: ("out",),
    Streams.ERR: ("err",),
    Streams.BOTH: ("out", "err"),
}


def logs(
    job: Job,
    worker: Annotated[str, typer.Argument(metavar="[WORKER]", help="One worker, such as trainer-0.")] = "",
    master: Master = None,
    role: Annotated[str | None, typer.Option(help="Only this role.")] = None,
    rank: Annotated[int | None, typer.Option(help="Only this rank.", min=0)] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    stream: Annotated[Streams, typer.Option(help="Which output.")] = Streams.BOTH,
    tail: Annotated[int | None, typer.Option(help="Begin at the last N lines of each worker.", min=0)] = None,
) -> None:
    """Print what a job's workers printed, those of its newest life and of earlier ones."""
    if worker:
        role, rank = parse_worker(worker)
    streams: tuple[Stream, ...] = STREAMS[stream]
    with connect(master) as connection:
        handle = JobHandle(connection, job)
        status = handle.status()
        _check(status, role, rank)
        handle = JobHandle(connection, status.job_id)
        tail_bytes = None if tail is None else max(1, tail * LINE_BYTES)
        reader = LogReader(
            connection,
            status.job_id,
            role=role,
            rank=rank,
            mode="live" if follow else "once",
            tail_bytes=tail_bytes,
            streams=streams,
        )
        reader.update(status)
        is_silent, is_terminal = True, sys.stdout.isatty()
        for line in _lines(reader, handle, follow, tail):
            is_silent = False
            sys.stdout.write(f"{printable(line) if is_terminal else line}\n")
            if follow:
                sys.stdout.flush()
        if is_silent:
            print(f"no output yet; job {status.job_id} is {status.stage}: {first_line(status.reason)}", file=sys.stderr)


def _lines(reader: LogReader, handle: JobHandle, follow: bool, tail: int | None) -> Iterator[str]:
    if tail is not None:
        yield from _last(reader.read_present(), tail)
    if follow:
        yield from reader.follow(handle.status)
    else:
        yield from reader.rest()


def _last(lines: Iterable[str], count: int) -> Iterator[str]:
    """The last lines of each worker, told apart by the name in front."""
    by_worker: defaultdict[str, deque[str]] = defaultdict(lambda: deque(maxlen=count))
    for line in lines:
        by_worker[line.partition("] ")[0]].append(line)
    for kept in by_worker.values():
        yield from kept


def _check(status: JobStatus, role: str | None, rank: int | None) -> None:
    """Refuse a role or rank that the job does not have."""
    roles = {found.name: found for found in status.roles}
    if role is not None and role not in roles:
        raise UsageError(
            f"job {status.job_id} has no role {role!r}.{nearest(role, roles)} It has: {', '.join(roles) or 'none'}."
        )
    ranks = max((roles[name].total for name in ([role] if role is not None else roles)), default=0)
    if rank is not None and rank >= ranks:
        raise UsageError(f"{role or 'no role of job ' + status.job_id} has {ranks} workers, so no rank {rank}.")
