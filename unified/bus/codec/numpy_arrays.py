"""numpy arrays and numbers as raw memory and back."""

from __future__ import annotations

from typing import Any

from unified.bus.buffers import Buffer, check_size, needed
from unified.bus.shm.allocation import allocation_at, has_allocations
from unified.errors import ProtocolError

ARRAY_KINDS = "biufcmMSUV"
NUMBER_KINDS = "biufcmM"


def is_raw(dtype: Any, kinds: str = ARRAY_KINDS) -> bool:
    """Return whether short name and bytes suffice; other dtypes (structured, object, the user's) are pickled."""
    return bool(dtype.kind in kinds and dtype.isbuiltin != 2 and dtype.names is None and dtype.itemsize)


def array_bytes(numpy: Any, array: Any) -> tuple[memoryview, str, list[int], bool]:
    """Return an array's memory (of a copy if not contiguous), dtype, shape, and whether it lies column by column."""
    give_away(array)
    fortran = not array.flags.c_contiguous and array.flags.f_contiguous
    flat = numpy.ascontiguousarray(array.T if fortran else array).reshape(-1).view("u1")
    return memoryview(flat), array.dtype.str, list(array.shape), fortran


def give_away(array: Any) -> None:
    """Make an array that is being sent read-only, if its readers will share its memory."""
    if not has_allocations():
        return
    flags = array.flags
    is_whole = flags.c_contiguous or flags.f_contiguous
    if flags.writeable and is_whole and allocation_at(array.__array_interface__["data"][0], array.nbytes) is not None:
        flags.writeable = False


def build_array(data: Buffer, dtype_name: str, shape: list[int], fortran: bool) -> Any:
    """Return a read-only array over `data`: the inverse of `array_bytes`. ProtocolError: shape and dtype do not fit."""
    numpy = needed("numpy")
    dtype = _dtype(numpy, dtype_name, ARRAY_KINDS)
    check_size(data, shape, dtype.itemsize)
    flat = numpy.frombuffer(data, dtype=dtype) if memoryview(data).nbytes else numpy.empty(0, dtype)
    if not flat.flags.aligned:
        flat = flat.copy()
    array = flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)
    array.flags.writeable = False
    return array


def build_number(dtype_name: str, data: bytes) -> Any:
    """Return a numpy scalar; ProtocolError: the dtype does not fit the data."""
    numpy = needed("numpy")
    dtype = _dtype(numpy, dtype_name, NUMBER_KINDS)
    check_size(data, [], dtype.itemsize)
    return numpy.frombuffer(data, dtype=dtype)[0]


def _dtype(numpy: Any, name: str, kinds: str) -> Any:
    dtype = numpy.dtype(name)
    if dtype.subdtype is not None or not is_raw(dtype, kinds):
        raise ProtocolError(f"dtype {name!r} is not sent by its bytes.")
    return dtype
