"""torch tensors as raw memory and back: without numpy (it may be missing), and without a copy where that is safe.

`Outgoing` collects the buffers of a value that is being encoded: each becomes a frame beside the body.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from unified.bus.buffers import Buffer, check_size, needed
from unified.errors import ProtocolError


def is_dense(torch: Any, tensor: Any) -> bool:
    """Return whether bytes, shape and dtype describe the tensor.

    torch's own pickling takes sparse, quantized and meta tensors, and tensors with attributes of the user.
    """
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta and not tensor.__dict__


def tensor_bytes(torch: Any, tensor: Any) -> tuple[memoryview, list[int], str]:
    """Return a dense tensor's memory (of a CPU copy if it is elsewhere, or not contiguous), shape and dtype."""
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
    """Copy a CUDA tensor into pinned memory of the CPU: several times as fast as into other memory.

    The pinned memory comes from torch's own cache, and goes back there.
    """
    try:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    except RuntimeError:  # no more memory can be pinned
        return tensor.cpu()
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host


def build_tensor(data: Buffer, shape: list[int], dtype_name: str, requires_grad: bool) -> Any:
    """Return a tensor over `data`, or over a copy of immutable bytes. ProtocolError: shape and dtype do not fit it."""
    torch = needed("torch")
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype) or dtype_name.startswith("q"):  # a quantized one without a scale crashes
        raise ProtocolError(f"torch here has no dtype {dtype_name!r} that can be sent as raw bytes.")
    view = memoryview(data)
    check_size(view, shape, dtype.itemsize)
    if view.nbytes == 0:
        tensor = torch.empty(shape, dtype=dtype)
    else:
        tensor = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=dtype).reshape(shape)
    return tensor.requires_grad_() if requires_grad else tensor


class Windows:
    """Writable memory for the tensors of one decoding: torch has no read-only tensors. With `is_only`, nobody will
    decode the same buffers again, so that buffers from a socket can be used as they are."""

    def __init__(self, *, is_only: bool) -> None:
        self._is_only = is_only
        self._open: dict[int, Any] = {}

    def writable(self, data: Buffer) -> Buffer:
        """Return the same data in memory that may be written to; nobody else sees the writes."""
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
    """Return the same memory, writable: a frame of ZeroMQ is read-only although nobody else has it."""
    import ctypes

    from unified.tensors.copy import address_of

    window = (ctypes.c_ubyte * view.nbytes).from_address(address_of(view))
    window.view = view  # type: ignore[attr-defined]  # the memory lives as long as the tensor over it
    return memoryview(window).cast("B")


OUT_OF_BAND_BYTES = 16 * 1024
"""Size below which a frame of its own costs more than the copy that it saves."""


class DeviceTensor(NamedTuple):
    """CUDA tensor among the buffers of a value that was encoded with `devices`, until `cuda.settle`."""

    tensor: Any

    @property
    def nbytes(self) -> int:
        return int(self.tensor.numel() * self.tensor.element_size())


class Outgoing:
    """Collector of buffers. With `devices`, CUDA tensors stay there: `unified.bus.codec.cuda.settle` routes them."""

    def __init__(self, *, devices: bool = False) -> None:
        self.buffers: list[Any] = []
        self._devices = devices
        self._known: dict[tuple[int, int], int] = {}
        """Numbers of buffers, by address and length of a tensor's memory."""

    def reset(self, num_kept: int) -> None:
        """Forget all but the first `num_kept` buffers: the later ones will be written in another way."""
        del self.buffers[num_kept:]
        self._known = {key: number for key, number in self._known.items() if number < num_kept}

    def add(self, data: Buffer) -> int:
        """Add a buffer, and return the number of its frame."""
        self.buffers.append(data)
        return len(self.buffers) - 1

    def aside(self, data: Buffer) -> int | bytes:
        """Return small data itself, or add large data and return the number of its frame."""
        return bytes(data) if memoryview(data).nbytes < OUT_OF_BAND_BYTES else self.add(data)

    def tensor(self, torch: Any, tensor: Any) -> tuple[int | memoryview, list[int], str]:
        """Return a dense tensor's memory if it is small, or the number of its frame; its shape and dtype.

        Tensors over the same memory, such as tied weights, share one frame, and arrive as tensors over one memory.
        """
        nbytes = tensor.numel() * tensor.element_size()
        is_large = nbytes >= OUT_OF_BAND_BYTES
        key = (tensor.data_ptr(), nbytes) if is_large and _is_as_it_lies(tensor) else (0, 0)
        number = self._known.get(key, -1)
        if number >= 0:
            return number, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        data, shape, dtype = tensor_bytes(torch, tensor)
        if not is_large:
            return data, shape, dtype
        number = self.add(data)
        if key[1]:
            self._known[key] = number  # the view in `buffers` keeps this memory from being reused
        return number, shape, dtype

    def stays_on_device(self, tensor: Any) -> bool:
        return self._devices and tensor.is_cuda and tensor.numel() > 0

    def device_tensor(self, tensor: Any) -> int:
        """Add the two frames of a CUDA tensor (handle, bytes), and return the number of the first."""
        first = self.add(DeviceTensor(tensor.detach()))  # type: ignore[arg-type]  # until `settle`
        self.add(b"")
        return first


def _is_as_it_lies(tensor: Any) -> bool:
    """Return whether the tensor's bytes are those at its address."""
    return bool(tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg())
