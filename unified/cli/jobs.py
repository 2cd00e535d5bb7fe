"""``unified jobs``: the jobs that the master knows."""

from __future__ import annotations

from argparse import ArgumentParser

from unified.cli.options import add_json, add_master, connect
from unified.cli.text import first_line, moment, print_json, table, terminal_width
from unified.protocol.client_master import JobList, ListJobs


def add_arguments(parser: ArgumentParser) -> None:
    add_master(parser)
    add_json(parser)


def jobs(master: str | None, json: bool) -> None:
    """List jobs, newest first."""
    with connect(master) as connection:
        found = connection.ask(ListJobs(), JobList).jobs
    found = sorted(found, key=lambda job: job.submitted_at, reverse=True)
    if json:
        print_json(found)
    elif not found:
        print("no jobs")
    else:
        rows = [
            [
                job.job_id,
                job.stage,
                "-" if job.exit_code is None else job.exit_code,
                job.num_workers,
                moment(job.submitted_at),
                moment(job.ended_at),
                first_line(job.reason),
            ]
            for job in found
        ]
        print(
            "\n".join(
                table(["JOB", "STAGE", "EXIT", "WORKERS", "SUBMITTED", "ENDED", "REASON"], rows, terminal_width())
            )
        )
