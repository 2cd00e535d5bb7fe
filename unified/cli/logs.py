"""``unified logs JOB``: the output of its workers, each line with its worker in front."""

from __future__ import annotations

import itertools
import re
import sys
import time
from argparse import ArgumentParser
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from msgspec.json import decode as decode_json

from unified.cli.options import add_job, add_master, at_least, moment
from unified.client.connection import connect_master
from unified.client.folding import LineFolder, is_wanted
from unified.client.handle import JobHandle
from unified.client.left_logs import left_by
from unified.client.logs import LineFilter, LogFilter, LogLine, LogReader, Stream
from unified.client.report import first_line, stage_text
from unified.client.terminal import printable
from unified.errors import RefusedError, UsageError, nearest
from unified.job.names import parse_worker
from unified.protocol.client_master import JobStatus

LINE_BYTES = 400
"""Greatest average length of a line with which ``--tail`` finds all its lines."""


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
    text = "On a terminal, show each line of each worker. Else equal ones are one: [trainer 0-511 ×512] …"
    parser.add_argument("--no-fold", action="store_true", help=text)
    text = "Only lines in which this regular expression (Python's) has a match; they are searched for on their hosts."
    parser.add_argument("--grep", default="", metavar="PATTERN", help=text)
    text = (
        "Only what was printed in this last time (90s, 10m, 2h, 1d), or since 2026-01-31T12:00, give or take a second."
    )
    parser.add_argument("--since", type=moment, default=0.0, metavar="TIME", help=text)
    text = "Begin each line with the time at which it was written, to a tenth of a second, by its node's clock."
    parser.add_argument("--times", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="Print each line as one JSON object, for programs.")
    parser.add_argument("--until", type=moment, default=0.0, metavar="TIME", help="Only what was printed before it.")


def logs(
    job: str,
    worker: str,
    master: str | None,
    role: str | None,
    rank: int | None,
    follow: bool,
    stream: str,
    tail: int | None,
    grep: str,
    since: float,
    until: float,
    no_fold: bool,
    times: bool,
    json: bool,
) -> None:
    """Print what a job's workers printed, of its newest incarnation and of earlier ones."""
    facts = _facts_of_data if json else _facts_of_text
    if worker:
        try:
            role, rank = parse_worker(worker)
        except UsageError as error:
            raise UsageError(f"{error} All workers of a role: --role {worker}.") from None
    pattern = _pattern(grep)
    # Hosts find lines, but not their times: with those, all lines are read, and searched here.
    wanted = LogFilter(role, rank, STREAMS[stream], LineFilter("" if times else grep, since, until))
    try:
        handle, status = _find(job, master)
    except (UsageError, RefusedError) as error:
        left = left_by(job, master, error)
        if since or until or times:
            raise UsageError(
                f"the times of lines are not known any more: the cluster of {left.job_id} has ended."
            ) from None
        lines = (line for line in left.lines(wanted, is_data=json) if pattern.search(facts(line).text))
        _print(lines if tail is None else _last(lines, tail, facts))
        return
    with handle:
        _check(status, role, rank)
        reader = LogReader(
            handle.connection,
            status.job_id,
            wanted,
            mode="live" if follow and not (times and grep) else "once",
            tail_bytes=None if tail is None or grep or any(wanted.lines) else max(1, tail * LINE_BYTES),
        )
        reader.update(status)
        if json:
            reader.view.is_data = True
        if times:
            reader.view.has_times = True
        folds = sys.stdout.isatty() and not (no_fold or times or json) and is_wanted()

        def is_found(line: _Facts) -> bool:
            return line.is_note or bool(pattern.search(line.text))

        def found(lines: Iterator[str]) -> Iterator[str]:
            return (line for line in lines if is_found(facts(line))) if times and grep else lines

        present = None if tail is None else _last(found(reader.read_present()), tail, facts)
        shown = itertools.chain(present or (), found(_new_lines(reader, handle, follow, folds)))
        if not _print(shown, flush=follow) and not (grep or any(wanted.lines)):
            print(
                f"no output yet; job {status.job_id} is {stage_text(status, time.time())}: {first_line(status.reason)}",
                file=sys.stderr,
            )


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"--grep {text!r} is no regular expression of Python: {error}.") from None


def _find(job: str, master: str | None) -> tuple[JobHandle, JobStatus]:
    connection = connect_master(master)
    try:
        status = JobHandle(connection, job).status()
        return JobHandle(connection, status.job_id), status  # the name may mean another job later
    except BaseException:
        connection.close()
        raise


def _print(lines: Iterable[str], *, flush: bool = False) -> bool:
    """Print the lines; return False if there are none."""
    has_any, is_terminal = False, sys.stdout.isatty()
    for line in lines:
        has_any = True
        sys.stdout.write(f"{printable(line) if is_terminal else line}\n")
        if flush:
            sys.stdout.flush()
    return has_any


def _new_lines(reader: LogReader, handle: JobHandle, follow: bool, folds: bool) -> Iterator[str]:
    if folds:
        reader.view.folder = LineFolder()
    yield from reader.follow(handle.status) if follow else reader.rest()


class _Facts(NamedTuple):
    worker: str
    """Worker and incarnation."""
    text: str
    is_note: bool


def _facts_of_text(line: str) -> _Facts:
    prefix, _, text = line.partition("] ")
    return _Facts(prefix.rpartition("[")[2], text, text.startswith("… "))


def _facts_of_data(line: str) -> _Facts:
    found = decode_json(line, type=LogLine)
    return _Facts(f"{found.role}-{found.rank}#{found.incarnation}", found.line, bool(found.note))


def _last(lines: Iterable[str], count: int, facts: Callable[[str], _Facts]) -> Iterator[str]:
    by_worker: defaultdict[str, deque[tuple[int, str]]] = defaultdict(lambda: deque(maxlen=count))
    for number, line in enumerate(lines):
        by_worker[facts(line).worker].append((number, line))
    yield from (line for _, line in sorted(itertools.chain(*by_worker.values())))


def _check(status: JobStatus, role: str | None, rank: int | None) -> None:
    """Refuse a role or rank that the job does not have."""
    roles = {found.name: found for found in status.roles}
    if role is not None and role not in roles:
        raise UsageError(
            f"job {status.job_id} has no role {role!r}.{nearest(role, roles)} It has: {', '.join(roles) or 'none'}."
        )
    ranks = max((roles[name].total for name in ([role] if role is not None else roles)), default=0)
    if rank is not None and rank >= ranks:
        whose = role or f"the largest role of job {status.job_id}"
        raise UsageError(f"{whose} has {ranks} workers, so there is no rank {rank}.")
