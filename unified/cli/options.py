"""Options that many commands share: the master and the connection to it, a job's name, a submission's exit code."""

from __future__ import annotations

import os
import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from unified.client.connection import MasterConnection, connect_to
from unified.config.addresses import MASTER_VARIABLE, find_master
from unified.errors import UsageError

if TYPE_CHECKING:
    from unified.client.handle import JobHandle

NumberT = TypeVar("NumberT", int, float)
NAME_HELP = "The job's name; else $UNIFIED_JOB_NAME, else the file's with four digits: train-3f2a for train.py."
_NAME_VARIABLES = ("UNIFIED_JOB_NAME", "DLROVER_UNIFIED_JOB_NAME")
NO_CLUSTER_TO_LEAVE = (
    "--detach needs a master that goes on without this command: give it with --master tcp://HOST:PORT or "
    "UNIFIED_MASTER. (A cluster of the command's own would end with it.)"
)


def add_job(parser: ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="A job's id, or its name for the newest job of that name.")


def add_master(parser: ArgumentParser) -> None:
    parser.add_argument("--master", metavar="tcp://HOST:PORT", help="The master's address; else $UNIFIED_MASTER.")


def add_json(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="Print data for programs.")


def at_least(lowest: NumberT) -> Callable[[str], NumberT]:
    """The `type` of an argument: a number of that kind, not below `lowest`."""

    def read(text: str) -> NumberT:
        try:
            value = type(lowest)(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not a number") from None
        if not value >= lowest:
            raise ArgumentTypeError(f"{text} is below {lowest:g}")
        return value

    return read


def connect(master: str | None) -> MasterConnection:
    """A connection to the master of ``--master`` or ``UNIFIED_MASTER``."""
    address = find_master(master)
    if address is None:
        raise UsageError(
            f"which master? Give its address with --master tcp://HOST:PORT, or once with "
            f"`export {MASTER_VARIABLE}=tcp://HOST:PORT`. (`unified-master` prints it when it starts.)"
        )
    return connect_to(address)


def chosen_name(given: str | None, script: str, env: Mapping[str, str], *, key: str = "") -> str:
    """The name that was given, else the environment's, else one made from the script's.

    Args:
        key: what commands on several hosts have in common, so that they say the same name; else empty.
    """
    named = next((env[variable] for variable in _NAME_VARIABLES if env.get(variable)), "")
    return given or named or (_plain(key) if key else job_name(script))


def job_name(script: str) -> str:
    """``train-3f2a`` for train.py: two runs of one script are two jobs."""
    return f"{_plain(Path(script).stem)}-{os.urandom(2).hex()}"


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:50] or "run"


def outcome(submitted: int | JobHandle) -> int:
    """The exit code of a job that was waited for; for one that was not, print its id and return 0."""
    if isinstance(submitted, int):
        return submitted
    print(submitted.job_id)
    submitted.close()
    return 0
