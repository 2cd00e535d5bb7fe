"""Many pieces of memory copied by a few threads, in the time that the memory needs and not Python."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple

SLICE_NBYTES = 8 << 20
"""Threads share large pieces in slices of this size."""
MAX_THREADS = 4
"""More wait for the memory of one processor."""


class Copy(NamedTuple):
    """Addresses of memory that stays where it is meanwhile, and bytes."""

    target: int
    source: int
    nbytes: int


def copy_memory(copies: Iterable[Copy], num_threads: int) -> None:
    """Copy all of them. Other threads of Python run meanwhile.

    torch's own ``copy_`` lets its threads meet after each tensor, and they wait for each other where cores are busy.

    Args:
        num_threads: at most; fewer are used for little.
    """
    slices = [each for copy in copies for each in _slices(copy)]
    useful = sum(each.nbytes for each in slices) // SLICE_NBYTES
    queue = iter(slices)  # one that all take from
    others = [
        threading.Thread(target=_copy, args=(queue,), name="checkpoint-copy")
        for _ in range(min(num_threads, MAX_THREADS, useful) - 1)
    ]
    for thread in others:
        thread.start()
    _copy(queue)
    for thread in others:
        thread.join()


def _slices(copy: Copy) -> Iterator[Copy]:
    for start in range(0, copy.nbytes, SLICE_NBYTES):
        yield Copy(copy.target + start, copy.source + start, min(SLICE_NBYTES, copy.nbytes - start))


def _copy(queue: Iterator[Copy]) -> None:
    for target, source, nbytes in queue:
        ctypes.memmove(target, source, nbytes)
