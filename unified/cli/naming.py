"""What a job of the command line is called."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

NAME_HELP = "The job's name; else $UNIFIED_JOB_NAME, else the file's with four digits: train-3f2a for train.py."
_NAME_VARIABLES = ("UNIFIED_JOB_NAME", "DLROVER_UNIFIED_JOB_NAME")


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
