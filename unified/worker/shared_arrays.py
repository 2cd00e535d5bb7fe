"""Arrays in shared memory, where the other workers of the host can read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex

from unified.errors import UsageError
from unified.worker import context

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray


def shared_empty(shape: SupportsIndex | Sequence[SupportsIndex], dtype: DTypeLike = "float32") -> NDArray[Any]:
    """Return a numpy array in shared memory, to fill and then send to workers of the same host without a copy.

    Each receiver gets a read-only view of the same memory: as argument, result, item of a stream or a queue, alone or
    inside other values, whole or any contiguous part from 32 KiB on. Sending gives the array away: it is read-only from
    then on. Do not write to the memory through other views or a tensor either (torch has no read-only tensors):
    receivers would see it.

    For torch, ``torch.from_numpy(shared_empty(shape))`` is a tensor over it, to fill in place (``copy_``, ``out=``);
    ``torch.from_numpy(shared_empty(shape, "int16")).view(torch.bfloat16)`` has a type that numpy lacks.

    Without shared memory (outside a worker, for less than 64 KiB, when the quota or ``/dev/shm`` is used up, if the bus
    has no Unix sockets) this is an array like any other, and is copied when it is sent.

    Args:
        shape: as in `numpy.empty`. The items are not set: they hold what was in the memory before.
        dtype: any dtype without Python objects.

    Raises:
        UsageError: a dtype with Python objects, a negative size, or numpy is not installed.
    """
    try:
        import numpy
    except ImportError:
        raise UsageError("shared_empty() makes numpy arrays: pip install 'unified-runtime[torch]'.") from None
    kind = numpy.dtype(dtype)
    if kind.hasobject:
        raise UsageError(f"an array of dtype {kind} holds Python objects, and they cannot lie in shared memory.")
    sizes = tuple(map(index, shape if isinstance(shape, Sequence) else (shape,)))
    if any(size < 0 for size in sizes):
        raise UsageError(f"an array cannot have the shape {sizes}.")
    worker = context._current
    memory = None if worker is None else worker.bus.allocate(math.prod(sizes) * kind.itemsize)
    return numpy.empty(sizes, kind) if memory is None else numpy.ndarray(sizes, kind, memory)
