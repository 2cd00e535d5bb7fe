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


class _PyBuffer(ctypes.Structure):
    """Py_buffer of the C API."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.c_void_p,)


def address_of(buffer: bytes | bytearray | memoryview) -> int:
    """Return the address of a contiguous buffer, read-only ones too. Good as long as the buffer is not resized.

    Raises:
        BufferError: it is not contiguous.
    """
    found = _PyBuffer()
    _get_buffer(buffer, ctypes.addressof(found), 0)
    address = found.buf or 0
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

    Args:
        num_threads: most threads; fewer are used for little.
    """
    useful = sum(copy.nbytes for copy in copies) // SLICE_NBYTES
    num_others = min(num_threads, MAX_THREADS, useful) - 1
    if num_others < 1:
        _copy(iter(copies))
        return
    queue = iter([each for copy in copies for each in _slices(copy)])  # one that all take from
    others = [threading.Thread(target=_copy, args=(queue,), name="memory-copy") for _ in range(num_others)]
    started = []
    with contextlib.suppress(RuntimeError):  # where no more threads can be had, those that there are do it
        for thread in others:
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
