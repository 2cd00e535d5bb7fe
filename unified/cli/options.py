"""Options that many commands share, and the connection they lead to."""

from __future__ import annotations

from typing import Annotated

import typer

from unified.client.address import connect_seconds, require_master
from unified.client.connection import MasterConnection
from unified.keys import find_key

Master = Annotated[
    str | None,
    typer.Option("--master", metavar="tcp://HOST:PORT", help="The master's address; else $UNIFIED_MASTER."),
]
Json = Annotated[bool, typer.Option("--json", help="Print data for programs.")]
Job = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, or its name for the newest job of that name.")]


def connect(master: str | None) -> MasterConnection:
    """A connection to the master of ``--master`` or ``UNIFIED_MASTER``.

    Raises:
        UsageError: neither is given, an interval of the environment is not a number, or the key file is of no use.
    """
    address = require_master(master)
    return MasterConnection(address, key=find_key(address), timeout_s=connect_seconds())
