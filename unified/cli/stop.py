"""``unified stop JOB``: end a job, in order or at once."""

from __future__ import annotations

from argparse import ArgumentParser

from unified.cli.options import add_job, add_master, at_least, connect
from unified.client.handle import JobHandle
from unified.protocol.client_master import StopJob
from unified.protocol.records import Stage


def add_arguments(parser: ArgumentParser) -> None:
    add_job(parser)
    add_master(parser)
    parser.add_argument("--force", action="store_true", help="Kill its workers at once, without a grace period.")
    parser.add_argument("--no-wait", action="store_true", help="Do not wait until it has ended.")
    parser.add_argument(
        "--timeout", type=at_least(0.0), default=60.0, metavar="S", help="Seconds to wait for its end (60)."
    )


def stop(job: str, master: str | None, force: bool, no_wait: bool, timeout: float) -> None:
    """Stop a job and wait until it has ended."""
    with connect(master) as connection:
        found = JobHandle(connection, job).status()
        job_id = found.job_id  # a name may mean another job a moment later
        if found.stage == Stage.STOPPED:
            print(f"{job_id} had already ended with exit code {found.exit_code}")
            return
        connection.request(StopJob(job=job_id, force=force, reason="unified stop"))
        if no_wait:
            print(f"{job_id} is stopping")
            return
        JobHandle(connection, job_id).wait(timeout)
        print(f"{job_id} is stopped")
