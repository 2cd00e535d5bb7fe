"""A job as JSON, submitted: ``python -m unified.api.driver '{"job_name": …, "dl_config": {…}}'``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

from unified.errors import UsageError
from unified.job.config import JobConfig
from unified.job.to_spec import to_spec

if TYPE_CHECKING:
    from unified.client.handle import JobHandle


@overload
def submit(config: JobConfig, blocking: Literal[True] = True) -> int: ...
@overload
def submit(config: JobConfig, blocking: Literal[False]) -> JobHandle: ...
@overload
def submit(config: JobConfig, blocking: bool = True) -> int | JobHandle: ...
def submit(config: JobConfig, blocking: bool = True) -> int | JobHandle:
    """Run a job that is described together with its options; see `unified.api.builder.DLJob.submit`."""
    from unified.client.submission import run_job, submit_job

    call, spec = run_job if blocking else submit_job, to_spec(config)
    if config.ship is False:
        return call(spec, master=config.master, wait=config.wait)
    from unified.client.code.archive import pack

    with pack(config.ship, config.exclude, spec.working_dir) as archive:
        return call(spec, master=config.master, wait=config.wait, archive=archive)


def main(args: Sequence[str] | None = None, blocking: bool = True) -> int | JobHandle:
    """Submit the job that the first argument describes: a `JobConfig` as JSON, of this project or of upstream.

    Args:
        args: by default those of the command line.
        blocking: as of `submit`.

    Raises:
        UsageError: there is no argument.
        JobError: it describes no job; the error names role and field.
    """
    args = sys.argv[1:] if args is None else args
    if not args:
        raise UsageError("a job is needed, as JSON: what JobConfig(…).model_dump_json() gives.")
    config = JobConfig.model_validate_json(args[0])
    # Such a document has every field, so one that is at its default was not asked for.
    fields = JobConfig.model_fields
    config.model_fields_set.difference_update(
        {name for name in fields if getattr(config, name) == fields[name].default}
    )
    return submit(config, blocking)


if __name__ == "__main__":
    raise SystemExit(main())
