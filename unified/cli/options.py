"""Options that many commands share, and the connection they lead to."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from typing import TypeVar

from unified.client.connection import MasterConnection
from unified.config.addresses import connect_seconds, require_master
from unified.security.keys import find_key

NumberT = TypeVar("NumberT", int, float)


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
    """A connection to the master of ``--master`` or ``UNIFIED_MASTER``.

    Raises:
        UsageError: neither is given, an interval of the environment is not a number, or the key file is of no use.
    """
    address = require_master(master)
    return MasterConnection(address, key=find_key(address), timeout_s=connect_seconds())
