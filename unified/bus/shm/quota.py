"""How much of the shared memory of a host one process may have."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping

from unified.bus.shm.files import DIRECTORY
from unified.errors import UsageError

LIMIT_VARIABLE = "UNIFIED_SHM_LIMIT"
SHARE_OF_MOUNT = 0.25
RESERVE_OF_MOUNT = 0.05
"""Stays free for others: NCCL and data loaders use the same directory."""


def default_limit(directory: str = DIRECTORY, env: Mapping[str, str] | None = None) -> int:
    """Bytes that one process may hold in slots: ``UNIFIED_SHM_LIMIT``, else a quarter of the mount. 0: no pool.

    Raises:
        UsageError: the variable is no number of bytes.
    """
    env = os.environ if env is None else env
    given = env.get(LIMIT_VARIABLE, "")
    if given:
        if not given.isdecimal():
            raise UsageError(f"{LIMIT_VARIABLE}={given!r} is not a number of bytes (0 switches shared memory off).")
        return int(given)
    try:
        found = os.statvfs(directory)
    except OSError:
        return 0
    return int(found.f_blocks * found.f_frsize * SHARE_OF_MOUNT)


def check_room(directory: str, nbytes: int) -> None:
    """OSError unless a segment of so many bytes leaves the mount its reserve."""
    found = os.statvfs(directory)
    if found.f_bavail * found.f_frsize - nbytes < found.f_blocks * found.f_frsize * RESERVE_OF_MOUNT:
        raise OSError(errno.ENOSPC, "too little room is left")
