"""``unified stop JOB``: end a job, in order or at once."""

from __future__ import annotations

from typing import Annotated

import typer

from unified.cli.options import Job, Master, connect
from unified.client.handle import JobHandle
from unified.protocol.client_master import StopJob
from unified.protocol.records import Stage


def stop(
    job: Job,
    master: Master = None,
    force: Annotated[bool, typer.Option("--force", help="Kill its workers at once, without a grace period.")] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not wait until it has ended.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for its end.", min=0)] = 60.0,
) -> None:
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
