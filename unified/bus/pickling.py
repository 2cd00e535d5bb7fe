"""Any other Python object: pickle protocol 5, its large buffers out of band, tensors by their bytes wherever they hide.

Only workers of one job ever load what is dumped here.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Sequence
from typing import Any

from unified.bus.tensors import Buffer, build_tensor, is_dense, tensor_bytes
from unified.errors import UsageError


def dump_object(value: object, threshold: int) -> tuple[bytes, list[Buffer]]:
    """A pickle, and the buffers of at least `threshold` bytes that it left out.

    Raises:
        UsageError: the object, or something in it, cannot be pickled.
    """
    buffers: list[Buffer] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < threshold:
            return True
        buffers.append(view)
        return False

    try:
        out = io.BytesIO()
        # the plain pickler is twice as fast; the other one is needed only where a tensor can be inside
        pickler = _TensorPickler if "torch" in sys.modules else pickle.Pickler
        pickler(out, protocol=5, buffer_callback=keep_inside).dump(value)
    except Exception as error:  # __reduce__ is the user's code and raises what it likes
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise UsageError(
            f"a value of type {kind} cannot be sent: {type(error).__name__}: {error}. "
            "Send plain data, or make it picklable (no lambdas, open files, locks or generators)."
        ) from error
    return out.getvalue(), buffers


def load_object(data: Buffer, buffers: Sequence[Buffer]) -> Any:
    """The object. Arrays over its buffers are read-only."""
    return pickle.loads(data, buffers=[memoryview(buffer).toreadonly() for buffer in buffers])


class _TensorPickler(pickle.Pickler):
    """torch would write a tensor's storage through a second pickle, with two copies."""

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules["torch"]
        if type(value) is not torch.Tensor or not is_dense(torch, value):
            return NotImplemented
        data, shape, dtype = tensor_bytes(torch, value)
        return build_tensor, (pickle.PickleBuffer(data), shape, dtype, value.requires_grad)
