"""Options that many commands share: the master and the connection to it, a job's name, a submission's exit code."""

from __future__ import annotations

import os
import re
import time
from argparse import ArgumentParser, ArgumentTypeError, _ActionsContainer
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from unified.client.handle import JobHandle
    from unified.client.preload import Preload

NumberT = TypeVar("NumberT", int, float)
_MASTER_HELP = "The master's address; else $UNIFIED_MASTER, or that of `unified up`; local: a driver's own cluster."
DEBUGPY_HELP = "Have each worker wait for VS Code (debugpy), on its node's loopback: the first at this port, and so on."
_HIGHEST = 2**31 - 1
NAME_HELP = "The job's name; else $UNIFIED_JOB_NAME, else the file's with four digits: train-3f2a for train.py."
_NAME_VARIABLES = ("UNIFIED_JOB_NAME", "DLROVER_UNIFIED_JOB_NAME")
NO_CLUSTER_TO_LEAVE = (
    "--detach needs a master that goes on without this command: `unified up` starts one; or give it with --master "
    "tcp://HOST:PORT or UNIFIED_MASTER. (A cluster of the command's own would end with it.)"
)


def add_job(parser: ArgumentParser, *, is_optional: bool = False) -> None:
    text = "A job's id, also without its suffix, or its name: the newest such job."
    parser.add_argument("job", metavar="JOB", nargs="?" if is_optional else None, help=text)


def add_master(parser: ArgumentParser) -> None:
    parser.add_argument("--master", metavar="tcp://HOST:PORT", help=_MASTER_HELP)


def add_ship(parser: _ActionsContainer) -> None:
    parser.add_argument(
        "--ship",
        action="store_true",
        help="Send the working directory along, without what .gitignore says: it is the workers' own.",
    )
    parser.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="PATTERN",
        help="Files that stay here, such as '*.ckpt'.",
    )


def add_json(parser: _ActionsContainer) -> None:
    parser.add_argument("--json", action="store_true", help="Print data for programs.")


def at_least(lowest: NumberT) -> Callable[[str], NumberT]:
    """Return the `type` of an argument: a number of the kind of `lowest`, not below it and not beyond 31 bits."""

    def read(text: str) -> NumberT:
        try:
            value = type(lowest)(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not a number") from None
        if not value >= lowest:
            raise ArgumentTypeError(f"{text} is below {lowest:g}")
        if value > _HIGHEST:
            raise ArgumentTypeError(f"{text} is above {_HIGHEST}")
        return value

    return read


def moment(text: str) -> float:
    """Return seconds since 1970 for an argument: a date and time in ISO 8601, or a time ago such as 10m."""
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
        return time.time() - float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]
    try:
        return max(0.0, datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError, OSError):
        text = f"{text!r} is no time: write 90s, 10m, 2h or 1d for so long ago, or such as 2026-01-31T12:00"
        raise ArgumentTypeError(text) from None


def chosen_name(given: str | None, script: str, env: Mapping[str, str], *, key: str = "") -> str:
    """Return the name that was given, else the environment's, else one made from the script's.

    Args:
        key: a text that commands on several hosts have in common, so that they choose the same name; else empty.
    """
    named = next((env[variable] for variable in _NAME_VARIABLES if env.get(variable)), "")
    return given or named or (_plain(key) if key else job_name(script))


def job_name(script: str) -> str:
    """Return ``train-3f2a`` for train.py: two runs of one script are two jobs."""
    return f"{_plain(Path(script).stem)}-{os.urandom(2).hex()}"


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:50] or "run"


def begin_cluster(preload: Preload, modules: Sequence[str] = ()) -> Callable[[], None]:
    """Begin to start a cluster for the job that this command will submit; the cluster ends with this process.

    Return a function that ends the cluster at once, unless a job has taken it.
    """
    from unified.client.embedded import EmbeddedCluster

    cluster = EmbeddedCluster()
    cluster.preload, cluster.modules = preload, list(modules)
    cluster.begin()
    from unified.client import submission  # imported while the cluster starts

    submission.begun.append(cluster)

    def end_unused() -> None:
        if cluster in submission.begun:
            submission.begun.remove(cluster)
            cluster.stop(timeout_s=0.0)

    return end_unused


def outcome(submitted: int | JobHandle) -> int:
    """Return the exit code of a job that was waited for; for any other, print its id and return 0."""
    if isinstance(submitted, int):
        return submitted
    print(submitted.job_id)
    submitted.close()
    return 0
