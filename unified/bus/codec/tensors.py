"""torch tensors as raw memory and back: without numpy (torch may be there alone), without a copy where that is safe."""

from __future__ import annotations

from typing import Any

from unified.bus.buffers import Buffer, check_size, needed
from unified.errors import ProtocolError


def is_dense(torch: Any, tensor: Any) -> bool:
    """Its bytes, shape and dtype say all.

    Sparse, quantized and meta tensors, and those with attributes of the user's, are pickled as torch does it.
    """
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta and not tensor.__dict__


def tensor_bytes(torch: Any, tensor: Any) -> tuple[memoryview, list[int], str]:
    """A dense tensor's memory (of a copy on the CPU where it is elsewhere, or not contiguous), shape and dtype."""
    import ctypes  # with torch only, which has loaded it already

    ours = tensor.detach().resolve_conj().resolve_neg()
    if ours.is_cuda:
        ours = to_host(torch, ours)
    ours = ours.cpu().contiguous()
    nbytes = ours.numel() * ours.element_size()
    dtype = str(ours.dtype).removeprefix("torch.")
    if nbytes == 0:
        return memoryview(b""), list(tensor.shape), dtype
    window = (ctypes.c_ubyte * nbytes).from_address(ours.data_ptr())
    window.tensor = ours  # the memory lives as long as the view of it
    return memoryview(window).cast("B"), list(tensor.shape), dtype


def to_host(torch: Any, tensor: Any) -> Any:
    """A CUDA tensor's copy on the CPU, by way of pinned memory: several times as fast as into any other.

    The pinned memory comes from torch's own cache of it and goes back there.
    """
    try:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    except RuntimeError:  # the system pins no more
        return tensor.cpu()
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host


def build_tensor(data: Buffer, shape: list[int], dtype_name: str, requires_grad: bool) -> Any:
    """The inverse of `tensor_bytes`: a tensor over `data`, or over a copy of immutable bytes.

    Raises:
        ProtocolError: shape and dtype do not fit the data.
    """
    torch = needed("torch")
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype) or dtype_name.startswith("q"):  # a quantized one without a scale is a crash
        raise ProtocolError(f"torch here has no dtype {dtype_name!r} that its bytes could say all of.")
    view = memoryview(data)
    check_size(view, shape, dtype.itemsize)
    if view.nbytes == 0:
        tensor = torch.empty(shape, dtype=dtype)
    else:
        tensor = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=dtype).reshape(shape)
    return tensor.requires_grad_() if requires_grad else tensor


class Windows:
    """Memory that the tensors of one decoding may write to: torch has no read-only tensors.

    Args:
        is_only: nobody will decode the same buffers again, so that what came over a socket can be handed out as it is.
    """

    def __init__(self, *, is_only: bool) -> None:
        self._is_only = is_only
        self._open: dict[int, Any] = {}

    def writable(self, data: Buffer) -> Buffer:
        """The same data, in memory that may be written to without anybody else's seeing it."""
        view = memoryview(data)
        source: Any = view.obj
        if hasattr(source, "open_window"):  # shared memory (`unified.bus.shm.reader`)
            window = self._open.get(id(source))
            if window is None:
                window = self._open[id(source)] = source.open_window(is_only=self._is_only)
            return bytearray(view) if window is None else source.through(window, view)
        if isinstance(source, bytes) or not self._is_only:
            return bytearray(view)
        return view if not view.readonly else _unlocked(view)


def _unlocked(view: memoryview) -> memoryview:
    """The same memory, to write to: for a frame of ZeroMQ, which is read-only though nobody else has it."""
    import ctypes

    from unified.memory.copy import address_of

    window = (ctypes.c_ubyte * view.nbytes).from_address(address_of(view))
    window.view = view  # type: ignore[attr-defined]  # the memory lives as long as the tensor over it
    return memoryview(window).cast("B")
