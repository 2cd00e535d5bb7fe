"""What this process keeps in memory, and what it gives back."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping

from unified.errors import OptionError

VARIABLE = "UNIFIED_KEEP_FREED_MB"
DEFAULT_MB = 512
_MADV_DONTNEED = 4
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8


def keep_freed(env: Mapping[str, str]) -> int:
    """Have this process keep up to ``UNIFIED_KEEP_FREED_MB`` (512) MiB of freed memory for its next arrays; 0: none.

    glibc gives an array of 32 MiB back to the system when it is freed, and the next one is made of pages that have to
    be cleared anew, which takes longer than filling it. Threads then share one arena, since only the first can hold
    large arrays; so call it before there are threads. Where the C library is another one nothing is done.

    Returns:
        MiB that are kept.

    Raises:
        OptionError: the variable is no number.
    """
    given = env.get(VARIABLE, str(DEFAULT_MB))
    if not given.isdecimal():
        raise OptionError(f"{VARIABLE}={given!r} is not a number of MiB (0: as the system does it).")
    kept_mb = int(given)
    if kept_mb == 0 or not _has_glibc():
        return 0
    mallopt = ctypes.CDLL(None).mallopt
    nbytes = min(kept_mb * 1024 * 1024, 2**31 - 1)  # it takes an int
    mallopt(_M_MMAP_THRESHOLD, nbytes)
    mallopt(_M_TRIM_THRESHOLD, nbytes)
    mallopt(_M_TOP_PAD, nbytes)  # else all is given back once it is more than the threshold
    mallopt(_M_ARENA_MAX, 1)
    return kept_mb


def give_back_idle() -> None:
    """Give the system what importing needed once: freed memory, and pages of libraries' files.

    Of torch's libraries 70 MB are read while they are loaded, most of it never again. What is needed after all is read
    anew, from the system's cache of files. Only pages that are the same as in the file are given back. Children find
    nothing missing: a fork does not pass such pages on.
    """
    libc = ctypes.CDLL(None)
    if _has_glibc():
        libc.malloc_trim(0)
    advise = libc.madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with contextlib.suppress(OSError, ValueError):
        for start, end in list(_unchanged_pages()):
            advise(start, end - start, _MADV_DONTNEED)


def _unchanged_pages() -> Iterator[tuple[int, int]]:
    """Addresses of mappings of files that cannot be written to, and of which no page was changed before that was so."""
    start = end = 0
    is_fixed_file = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first, *rest = line.split()
            if not first.endswith(":"):  # "7f00-7f80 r-xp 00000000 08:01 1234 /lib/libc.so.6"
                start, end = (int(number, 16) for number in first.split("-"))
                is_fixed_file = len(rest) > 4 and rest[4].startswith("/") and "w" not in rest[0] and "p" in rest[0]
            elif first == "Anonymous:" and rest[0] == "0" and is_fixed_file:
                yield start, end


def _has_glibc() -> bool:
    return "CS_GNU_LIBC_VERSION" in os.confstr_names and bool(os.confstr("CS_GNU_LIBC_VERSION"))
