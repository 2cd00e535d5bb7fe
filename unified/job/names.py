"""Names of jobs and workers, and ranges of nodes, as users write them: building, checks and parsing."""

from __future__ import annotations

import re
from typing import NamedTuple

from unified.errors import JobNameError, UsageError

MAX_NAME = 63
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_WORKER = re.compile(r"(?P<role>.+)_(?P<world>\d+)-(?P<rank>\d+)_(?P<local_world>\d+)-(?P<local_rank>\d+)\Z")
_SHORT = re.compile(r"(?P<role>.+)-(?P<rank>\d+)\Z")


class WorkerRef(NamedTuple):
    """Reference to a worker by its role and its rank in the role."""

    role: str
    rank: int


def check_job_name(name: str) -> str:
    """Return `name`; raise `JobNameError` if it is not allowed."""
    if len(name) > MAX_NAME:
        raise JobNameError(f"job name {name[:20]!r}… has {len(name)} characters; at most {MAX_NAME} are allowed.")
    if not _JOB.match(name):
        raise JobNameError(
            f"job name {name!r} is not allowed: letters, digits and ._- only, beginning with a letter or digit."
        )
    return name


def parse_worker(name: str) -> WorkerRef:
    """Read a worker's full name, or the short form ``{role}-{rank}``; UsageError: the name has neither form."""
    found = _WORKER.match(name) or _SHORT.match(name)
    if found is None:
        raise UsageError(
            f"{name!r} is not a worker's name: write 'role-rank' (trainer-0) or the full name from `unified status`."
        )
    return WorkerRef(found["role"], int(found["rank"]))


def parse_nnodes(nnodes: int | str) -> tuple[int, int]:
    """Return the lowest and highest number of nodes of ``4``, ``"4"`` or a range such as ``"2:8"``.

    ValueError: the text has neither form, is below 1, or its lower end is above the higher one.
    """
    parts = str(nnodes).split(":")
    if not 1 <= len(parts) <= 2 or not all(part.strip().isdecimal() for part in parts):
        raise ValueError(f"nnodes={nnodes!r} is neither a number of nodes nor a range such as '2:8'.")
    low, high = int(parts[0]), int(parts[-1])
    if not 1 <= low <= high:
        raise ValueError(f"nnodes={nnodes!r}: at least one node is needed, and a range begins with its lower end.")
    return low, high
