"""torch tensors as raw memory and back: without numpy (torch may be there alone), without a copy where that is safe."""

from __future__ import annotations

import math
import sys
from importlib import import_module
from typing import Any

from unified.errors import ProtocolError

Buffer = bytes | bytearray | memoryview


def is_dense(torch: Any, tensor: Any) -> bool:
    """Its bytes, shape and dtype say all; sparse, quantized and meta tensors are pickled as torch does it."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta


def tensor_bytes(torch: Any, tensor: Any) -> tuple[memoryview, list[int], str]:
    """A dense tensor's memory (of a copy on the CPU where it is elsewhere, or not contiguous), shape and dtype."""
    import ctypes  # with torch only, which has loaded it already

    ours = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    nbytes = ours.numel() * ours.element_size()
    dtype = str(ours.dtype).removeprefix("torch.")
    if nbytes == 0:
        return memoryview(b""), list(tensor.shape), dtype
    window = (ctypes.c_ubyte * nbytes).from_address(ours.data_ptr())
    window.tensor = ours  # the memory lives as long as the view of it
    return memoryview(window).cast("B"), list(tensor.shape), dtype


def build_tensor(data: Buffer, shape: list[int], dtype_name: str, requires_grad: bool) -> Any:
    """The inverse of `tensor_bytes`: a tensor over `data`, or over a copy of immutable bytes.

    Raises:
        ProtocolError: shape and dtype do not fit the data.
    """
    torch = needed("torch")
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise ProtocolError(f"torch here has no dtype {dtype_name!r}.")
    view = memoryview(data)
    check_size(view, shape, dtype.itemsize)
    if view.nbytes == 0:
        tensor = torch.empty(shape, dtype=dtype)
    else:
        tensor = torch.frombuffer(_writable(view), dtype=dtype).reshape(shape)
    return tensor.requires_grad_() if requires_grad else tensor


def _writable(view: memoryview) -> object:
    """torch warns of memory that it may not write to, and has no way to keep to that.

    A frame that came over a socket is nobody else's, so that a tensor over it is harmless; bytes may be anybody's.
    """
    if not view.readonly:
        return view
    numpy = sys.modules.get("numpy")
    if numpy is None or isinstance(view.obj, bytes):
        return bytearray(view)
    import ctypes

    window = (ctypes.c_ubyte * view.nbytes).from_address(numpy.frombuffer(view, "u1").ctypes.data)
    window.view = view  # type: ignore[attr-defined]  # the memory lives as long as the tensor over it
    return window


def check_size(data: Buffer, shape: list[int], itemsize: int) -> None:
    """ProtocolError unless `data` holds exactly the items that `shape` claims."""
    held = memoryview(data).nbytes
    if any(type(size) is not int or size < 0 for size in shape) or math.prod(shape) * itemsize != held:
        raise ProtocolError(f"shape {shape} of {itemsize}-byte items does not fit a buffer of {held} bytes.")


def needed(module: str) -> Any:
    """Import numpy or torch because a value of it came."""
    try:
        return import_module(module)
    except ImportError:
        raise ProtocolError(
            f"a value of {module} came, and {module} is not installed here: pip install 'unified-runtime[torch]'."
        ) from None
