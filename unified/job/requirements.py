"""Packages that a job requires, as the user names them, in lines for pip."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from unified.errors import UsageError

MAX_BYTES = 1 << 20
"""Most bytes of a job's requirements."""


def read(given: str | Sequence[str], folder: str | None = None) -> list[str]:
    """Return the lines that pip is given.

    Args:
        given: requirements, or the path of a ``requirements.txt`` or a ``uv.lock``, which uv on this host reads.
        folder: folder that relative paths begin in; None: the current one.

    Raises:
        UsageError: the file is missing, is too large or needs another file, or uv is missing or does not take it.
    """
    if not isinstance(given, str):
        lines = list(given)
    else:
        path = Path(folder or os.getcwd()) / given
        try:
            text = _exported(path) if path.name == "uv.lock" else path.read_text()
        except OSError as error:
            raise UsageError(f"requirements: {path} cannot be read: {error.strerror}.") from None
        lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in lines:
        if re.match(r"\s*(-r|--requirement|-c|--constraint|-e|--editable)\b|\s*\.{0,2}/", line):
            raise UsageError(
                f"requirements: {line.strip()!r} refers to a file that nodes do not have: list its packages instead."
            )
    if sum(map(len, lines)) > MAX_BYTES:
        raise UsageError(f"requirements: {given!r} has more than {MAX_BYTES >> 20} MiB.")
    return lines


def _exported(lock: Path) -> str:
    command = ["uv", "export", "--frozen", "--no-emit-project", "--no-dev", "--quiet", "--project", str(lock.parent)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UsageError("requirements: uv reads a uv.lock, and there is no uv here: `pip install uv`.") from None
    if done.returncode:
        raise UsageError(f"requirements: uv does not take {lock}: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout
