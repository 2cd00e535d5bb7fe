"""``unified logs JOB``: what its workers printed, each line with its worker in front."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator

from unified.cli.options import add_job, add_master, at_least, connect
from unified.client.handle import JobHandle
from unified.client.logs import LogFilter, LogReader, Stream
from unified.client.report import first_line
from unified.client.terminal import printable
from unified.errors import UsageError, nearest
from unified.job.names import parse_worker
from unified.protocol.client_master import JobStatus

LINE_BYTES = 400
"""Length that a line may have on average for ``--tail`` to find all it wants."""


STREAMS: dict[str, tuple[Stream, ...]] = {"out": ("out",), "err": ("err",), "both": ("out", "err")}


def logs_arguments(parser: ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument("worker", nargs="?", default="", metavar="WORKER", help="One worker, such as trainer-0.")
    add_master(parser)
    parser.add_argument("--role", help="Only this role.")
    parser.add_argument("--rank", type=at_least(0), help="Only this rank.")
    parser.add_argument("--follow", "-f", action="store_true", help="Go on until the job has ended.")
    parser.add_argument("--stream", choices=[*STREAMS], default="both", help="Which output.")
    parser.add_argument("--tail", type=at_least(0), metavar="N", help="Begin at the last N lines of each worker.")


def logs(
    job: str,
    worker: str,
    master: str | None,
    role: str | None,
    rank: int | None,
    follow: bool,
    stream: str,
    tail: int | None,
) -> None:
    """Print what a job's workers printed, those of its newest life and of earlier ones."""
    if worker:
        role, rank = parse_worker(worker)
    with connect(master) as connection:
        handle = JobHandle(connection, job)
        status = handle.status()
        _check(status, role, rank)
        handle = JobHandle(connection, status.job_id)
        tail_bytes = None if tail is None else max(1, tail * LINE_BYTES)
        reader = LogReader(
            connection,
            status.job_id,
            LogFilter(role, rank, STREAMS[stream]),
            mode="live" if follow else "once",
            tail_bytes=tail_bytes,
        )
        reader.update(status)
        is_silent, is_terminal = True, sys.stdout.isatty()
        for line in _lines(reader, handle, follow, tail):
            is_silent = False
            sys.stdout.write(f"{printable(line) if is_terminal else line}\n")
            if follow:
                sys.stdout.flush()
        if is_silent:
            print(
                f"no output yet; job {status.job_id} is {status.stage}: {first_line(status.reason)}",
                file=sys.stderr,
            )


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
