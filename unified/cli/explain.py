"""``unified explain``: what was decided about a job or a worker, and why, oldest first."""

from __future__ import annotations

from argparse import ArgumentParser

from unified.cli.options import add_json, add_master, at_least, connect
from unified.cli.text import print_json
from unified.client.connection import MasterConnection
from unified.client.report import event_text
from unified.errors import RefusedError, UsageError
from unified.job.names import WorkerRef, parse_worker
from unified.protocol.client_master import Explain, GetJob, JobList, JobStatus, ListJobs, Story

SEARCHED_JOBS = 20


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("subject", metavar="JOB|WORKER", help="A job, JOB/WORKER, or a worker's name.")
    parser.add_argument(
        "worker", nargs="?", default="", metavar="WORKER", help="A worker of that job, such as trainer-0."
    )
    add_master(parser)
    parser.add_argument(
        "--limit", type=at_least(1), default=500, metavar="N", help="At most this many of the newest lines (500)."
    )
    add_json(parser)


def explain(subject: str, worker: str, master: str | None, limit: int, json: bool) -> None:
    """Say what was decided about a job, or one worker of it, with the reasons."""
    job, _, named = subject.partition("/")
    if named and worker:
        raise UsageError(f"two workers are named, {named!r} and {worker!r}: write JOB/WORKER or JOB WORKER.")
    with connect(master) as connection:
        story = _tell(connection, job, named or worker, limit)
    if json:
        print_json(story.events)
    elif not story.events:
        print(f"nothing was decided about {subject} yet")
    else:
        print("\n".join(event_text(event) for event in story.events))


def _tell(connection: MasterConnection, job: str, worker: str, limit: int) -> Story:
    try:
        return connection.ask(Explain(job=job, worker=worker, limit=limit), Story)
    except RefusedError as refusal:
        if worker or refusal.code != "not-found":
            raise
        try:
            wanted = parse_worker(job)
        except UsageError:
            raise refusal from None
        home = _job_with(connection, wanted)
        if home is None:
            raise
        return connection.ask(Explain(job=home, worker=job, limit=limit), Story)


def _job_with(connection: MasterConnection, wanted: WorkerRef) -> str | None:
    """The newest job that has such a worker."""
    newest = sorted(connection.ask(ListJobs(), JobList).jobs, key=lambda job: job.submitted_at, reverse=True)
    for line in newest[:SEARCHED_JOBS]:
        status = connection.ask(GetJob(job=line.job_id), JobStatus)
        if any((worker.role, worker.rank) == wanted for worker in status.workers):
            return line.job_id
    return None
