"""Copies of many pieces of memory by a few threads, at the speed of the memory; addresses of buffers."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

SLICE_NBYTES = 16 << 20
"""Size of the slices of large pieces that threads share. For fewer bytes, one more thread costs more than it saves."""
MAX_THREADS = 4
"""Largest number of threads: more would only wait for the memory of one processor."""


_PyBuffer = ctypes.c_void_p * 10
"""Py_buffer of the C API as ten words. The first is the address; two of its eleven fields share a word."""
_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.c_void_p,)


def address_of(buffer: bytes | bytearray | memoryview) -> int:
    """Return the address of a buffer, also a read-only one, valid until a resize. BufferError: it is not contiguous."""
    found = _PyBuffer()
    _get_buffer(buffer, ctypes.addressof(found), 0)
    address = found[0] or 0
    _release_buffer(ctypes.addressof(found))
    return address


class Copy(NamedTuple):
    """A copy to make: addresses of memory, which must not move meanwhile, and the number of bytes."""

    target: int
    source: int
    nbytes: int


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def copy_memory(copies: Sequence[Copy], num_threads: int) -> None:
    """Make all copies. Other threads of Python run meanwhile.

    The threads of torch's own ``copy_`` synchronize after each tensor, and wait for each other if cores are busy.
    Few bytes are copied by fewer threads than `num_threads`.
    """
    useful = sum(copy.nbytes for copy in copies) // SLICE_NBYTES
    num_others = min(num_threads, MAX_THREADS, useful) - 1
    if num_others < 1:
        _copy(iter(copies))
        return
    queue = iter([each for copy in copies for each in _slices(copy)])  # shared by all threads
    started = []
    with contextlib.suppress(RuntimeError):  # no more threads: the started ones make the copies
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
