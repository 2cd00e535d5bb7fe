"""What the C library does with memory that is freed."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

from unified.errors import OptionError

VARIABLE = "UNIFIED_KEEP_FREED_MB"
DEFAULT_MB = 512
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_freed(env: Mapping[str, str]) -> int:
    """Have this process keep up to ``UNIFIED_KEEP_FREED_MB`` (512) MiB of freed memory for its next arrays; 0: none.

    glibc gives an array of 32 MiB back to the system when it is freed, and the next one is made of pages that have to
    be cleared anew, which takes longer than filling it. Threads then share one arena: only that one can hold arrays.
    Where the C library is another one nothing is done.

    Returns:
        MiB that are kept.

    Raises:
        OptionError: the variable is no number.
    """
    given = env.get(VARIABLE, str(DEFAULT_MB))
    if not given.isdecimal():
        raise OptionError(f"{VARIABLE}={given!r} is not a number of MiB (0: as the system does it).")
    kept_mb = int(given)
    if kept_mb == 0 or "CS_GNU_LIBC_VERSION" not in os.confstr_names or not os.confstr("CS_GNU_LIBC_VERSION"):
        return 0
    mallopt = ctypes.CDLL(None).mallopt
    nbytes = min(kept_mb * 1024 * 1024, 2**31 - 1)  # it takes an int
    mallopt(_M_MMAP_THRESHOLD, nbytes)
    mallopt(_M_TRIM_THRESHOLD, nbytes)
    mallopt(_M_ARENA_MAX, 1)
    return kept_mb
