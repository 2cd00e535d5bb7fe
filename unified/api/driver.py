"""Submit a job that is given as JSON: ``python -m unified.api.driver '{"job_name": …, "dl_config": {…}}'``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from unified.api.builder.dljob import submit
from unified.errors import UsageError
from unified.job.config import JobConfig

if TYPE_CHECKING:
    from unified.client.handle import JobHandle

__all__ = ["main", "submit"]


def main(args: Sequence[str] | None = None, blocking: bool = True) -> int | JobHandle:
    """Submit the job that the first argument describes: a `JobConfig` as JSON, of this project or of upstream.

    Args:
        args: by default those of the command line.
        blocking: as for `submit`.

    Raises:
        UsageError: there is no argument.
        JobError: the argument describes no job; the error names role and field.
    """
    args = sys.argv[1:] if args is None else args
    if not args:
        raise UsageError("give a job as JSON: the output of JobConfig(…).model_dump_json().")
    config = JobConfig.model_validate_json(args[0])
    # The document has every field, so a field with its default value counts as not given.
    fields = JobConfig.model_fields
    config.model_fields_set.difference_update(
        {name for name in fields if getattr(config, name) == fields[name].default}
    )
    return submit(config, blocking)


if __name__ == "__main__":
    raise SystemExit(main())
