"""The process that submits, as far as its workers care."""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

WORKING_DIR = "DLROVER_WORKING_DIR"
INHERITED = ("UNIFIED_COMPAT",)
"""Variables of this process that its job's workers have too, wherever they run; the job's own environment wins."""


class Driver(NamedTuple):
    """What workers take from the process that submits: where it works, and where it imports from."""

    working_dir: str
    sys_path: list[str]
    submitted_by: str
    """user@host:pid, for people."""
    env: Mapping[str, str] = {}
    """Of `INHERITED`, those that are set."""

    @classmethod
    def here(cls, env: Mapping[str, str] | None = None) -> Driver:
        """This process."""
        env = os.environ if env is None else env
        cwd = os.getcwd()
        script_dir = cwd if not sys.path or sys.path[0] == "" else sys.path[0]
        paths = [cwd] if sys.flags.safe_path else [script_dir, cwd]
        return cls(
            working_dir=env.get(WORKING_DIR) or cwd,
            sys_path=list(dict.fromkeys(str(Path(path).absolute()) for path in paths)),
            submitted_by=f"{_user()}@{os.uname().nodename}:{os.getpid()}",
            env={name: env[name] for name in INHERITED if env.get(name)},
        )


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container may run under a uid without a name
        return str(os.getuid())
