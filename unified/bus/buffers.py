"""Where the memory of a buffer lies: what Python's own buffers do not tell."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unified.bus.codec.tensors import Buffer


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


def address_of(buffer: Buffer) -> int:
    """Where a contiguous buffer lies, read-only ones too. Good as long as the buffer is not resized.

    Raises:
        BufferError: it is not contiguous.
    """
    found = _PyBuffer()
    _get_buffer(buffer, ctypes.addressof(found), 0)
    address = found.buf or 0
    _release_buffer(ctypes.addressof(found))
    return address
