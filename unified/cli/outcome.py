"""What a submission from the command line leaves: an exit code, or a job's id."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unified.client.handle import JobHandle

NO_CLUSTER_TO_LEAVE = (
    "--detach needs a master that goes on without this command: give it with --master tcp://HOST:PORT or "
    "UNIFIED_MASTER. (A cluster of the command's own would end with it.)"
)


def outcome(submitted: int | JobHandle) -> int:
    """The exit code of a job that was waited for; for one that was not, print its id and return 0."""
    if isinstance(submitted, int):
        return submitted
    print(submitted.job_id)
    submitted.close()
    return 0
