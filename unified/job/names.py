"""Names of jobs, workers, modules and ports, and ranges of nodes, as users write them: building, checks and parsing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from unified.errors import JobNameError, UsageError

MAX_NAME = 63
MAX_PORTS = 64
"""Most ports of one worker."""
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_WORKER = re.compile(r"(?P<role>.+)_(?P<world>\d+)-(?P<rank>\d+)_(?P<local_world>\d+)-(?P<local_rank>\d+)\Z")
_SHORT = re.compile(r"(?P<role>.+)-(?P<rank>\d+)\Z")
_PORT = re.compile(r"(?<!\$)(\{?)\{port([0-9]{0,9})\}(\}?)")  # not ${port}, a variable of a shell


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


def check_modules(texts: Iterable[str]) -> list[str]:
    """Return the modules to preload, each once, of names or lists with commas; UsageError: a name is not allowed."""
    names = [name.strip() for text in texts for name in text.split(",")]
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(f"{name!r} is no name of a module to preload: write it as in an import, with dots.")
    return list(dict.fromkeys(names))


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


def num_ports(texts: Iterable[str]) -> int:
    """Return how many ports texts need: 1 for ``{port}``, 3 for ``{port2}``; UsageError: more than a worker has."""
    found = [(int(each[2] or 0) + 1, each[1] and each[3]) for text in texts for each in _PORT.finditer(text)]
    num = max((number for number, is_quoted in found if not is_quoted), default=0)
    if num > MAX_PORTS:
        raise UsageError(f"{{port{num - 1}}} is no port of a worker: the last is {{port{MAX_PORTS - 1}}}.")
    return num


def with_ports(text: str, ports: Sequence[int]) -> str:
    """Return the text with the names of ports replaced by their numbers, and ``{{port}}`` by ``{port}``."""
    return _PORT.sub(
        lambda each: each[0][1:-1] if each[1] and each[3] else f"{each[1]}{ports[int(each[2] or 0)]}{each[3]}", text
    )


def quoted_ports(text: str) -> str:
    """Return a text of which `with_ports` makes this one."""
    return _PORT.sub(r"{\g<0>}", text)
