"""Hidden files of writers that were killed: how they are called, and how the dead are told from the living."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

PREFIX = ".unified-"
SUFFIX = ".part"
SAFE_AGE_S = 60.0
"""A file so old, and not locked, has no writer: a writer takes its lock at once after making the file."""


def temporary_name(token: str) -> str:
    """Of a file that is being written; `token` is chosen at random."""
    return f"{PREFIX}{token}{SUFFIX}"


def is_temporary(name: str) -> bool:
    """Whether a file is called so."""
    return name.startswith(PREFIX) and name.endswith(SUFFIX)


def remove_leftovers(folder: Path, now: float | None = None) -> list[str]:
    """Remove what dead writers left in one folder, and name it. What cannot be removed stays: it is only hidden.

    Args:
        now: seconds since the epoch.
    """
    now = time.time() if now is None else now
    removed = []
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if is_temporary(name) and _is_dead(folder / name, now):
                with contextlib.suppress(OSError):
                    os.unlink(folder / name)
                    removed.append(name)
    return sorted(removed)


def _is_dead(path: Path, now: float) -> bool:
    try:
        # For writing: over NFS an exclusive lock asks for that.
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if now - os.fstat(descriptor).st_mtime < SAFE_AGE_S:
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # a writer holds it; or no locks on this file system, so that nobody can know
        return False
    finally:
        os.close(descriptor)
    return True
