"""``unified timeline``: where a job's time went, as a file that Perfetto and Chrome open."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser
from pathlib import Path

import msgspec

from unified.cli.options import add_job, add_master
from unified.client.connection import connect_master
from unified.client.reports import read_reports, read_spans
from unified.client.views.timeline import Timeline
from unified.errors import RefusedError, UsageError
from unified.protocol import client_master

MAX_EVENTS = 10_000
MAX_POINTS = 5000
MAX_TRACED = 256
"""Number of workers whose calls are read."""
MAX_SPANS = 20_000
"""Number of newest spans that are read of each incarnation."""


def timeline_arguments(parser: ArgumentParser) -> None:
    add_job(parser)
    add_master(parser)
    parser.add_argument("--output", "-o", metavar="FILE", required=True, help="The file to write, such as trace.json.")


def timeline(job: str, master: str | None, output: str) -> None:
    """Write a job's timeline for https://ui.perfetto.dev: stages, rounds, incarnations, failures, saves, what rank 0 of
    each role reported, and the calls of workers with UNIFIED_TRACE=calls."""
    with connect_master(master) as connection:
        status = connection.ask(client_master.GetJob(job=job), client_master.JobStatus)
        job_id, workers, made = status.job_id, status.workers, Timeline(status, time.time())
        missing = [f"the calls of all workers but {MAX_TRACED}"] if len(workers) > MAX_TRACED else []
        request = client_master.Explain(job=job_id, limit=MAX_EVENTS)
        made.add_events(connection.ask(request, client_master.Story).events)
        for worker in (each for each in workers if each.rank == 0):
            found = read_reports(connection, job_id, worker.name, worker.incarnation, limit=MAX_POINTS)
            made.add_series(worker.name, found.reports)
            missing += found.missing
        for worker in workers[:MAX_TRACED]:
            for incarnation in range(worker.incarnation + 1):
                try:
                    spans = read_spans(connection, job_id, worker.name, incarnation, limit=MAX_SPANS)
                    made.add_calls(worker.name, incarnation, spans)
                except RefusedError as refusal:  # for example, its node is gone
                    missing.append(str(refusal))
    trace = made.trace()
    try:
        Path(output).write_bytes(msgspec.json.encode(trace))
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror}.") from None
    print(f"{output}: {len(trace['traceEvents'])} events; open it at https://ui.perfetto.dev")
    print("".join(f"unified: left out: {line}\n" for line in dict.fromkeys(missing)), end="", file=sys.stderr)
