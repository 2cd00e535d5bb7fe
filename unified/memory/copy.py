"""Copies of many pieces of memory by a few threads, in the time that the memory needs and not Python; addresses."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

SLICE_NBYTES = 16 << 20
"""Size of the slices of large pieces that threads share. For less, one more thread would cost more than it saves."""
MAX_THREADS = 4
"""Most threads: more of them wait for the memory of one processor."""


_PyBuffer = ctypes.c_void_p * 10
"""Py_buffer of the C API, whose first word is the address, as words: two of its eleven fields share one."""
_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.c_void_p,)


def address_of(buffer: bytes | bytearray | memoryview) -> int:
    """Return the address of a contiguous buffer, read-only ones too. Good as long as the buffer is not resized.
    BufferError: it is not contiguous."""
    found = _PyBuffer()
    _get_buffer(buffer, ctypes.addressof(found), 0)
    address = found[0] or 0
    _release_buffer(ctypes.addressof(found))
    return address


class Copy(NamedTuple):
    """A copy to make: addresses of memory that stays where it is meanwhile, and bytes."""

    target: int
    source: int
    nbytes: int


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def copy_memory(copies: Sequence[Copy], num_threads: int) -> None:
    """Copy all of them. Other threads of Python run meanwhile.

    torch's own ``copy_`` lets its threads meet after each tensor, and they wait for each other where cores are busy.
    For little, fewer threads than `num_threads` are used.
    """
    useful = sum(copy.nbytes for copy in copies) // SLICE_NBYTES
    num_others = min(num_threads, MAX_THREADS, useful) - 1
    if num_others < 1:
        _copy(iter(copies))
        return
    queue = iter([each for copy in copies for each in _slices(copy)])  # one that all take from
    started = []
    with contextlib.suppress(RuntimeError):  # where no more threads can be had, those that there are do it
        for _ in range(num_others):
            thread = threading.Thread(target=_copy, args=(queue,), name="memory-copy")
            thread.start()
            started.append(thread)
    _copy(queue)
    for thread in started:
        thread.join()


def _slices(copy: Copy) -> Iterator[Copy]:
    for start in range(0, copy.nbytes, SLICE_NBYTES):
        yield Copy(copy.target + start, copy.source + start, min(SLICE_NBYTES, copy.nbytes - start))


def _copy(queue: Iterator[Copy]) -> None:
    for target, source, nbytes in queue:
        ctypes.memmove(target, source, nbytes)
