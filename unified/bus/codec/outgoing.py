"""The buffers of a value that is being encoded: each becomes a frame beside the body."""

from __future__ import annotations

from typing import Any

from unified.bus.buffers import Buffer
from unified.bus.codec.tensors import tensor_bytes

OUT_OF_BAND_BYTES = 16 * 1024
"""Below this a frame of its own costs more than the copy that it saves."""


class Outgoing:
    """Collects buffers.

    Args:
        devices: leave CUDA tensors where they are; `unified.bus.codec.cuda.settle` decides later how they travel.
    """

    def __init__(self, *, devices: bool = False) -> None:
        self.buffers: list[Any] = []
        self._devices = devices
        self._known: dict[tuple[int, int], int] = {}
        """Address and length of a tensor's memory: the number of its buffer."""

    def mark(self) -> int:
        """Return the number of frames so far, to come back to with `reset`."""
        return len(self.buffers)

    def reset(self, mark: int) -> None:
        """Forget what was added since `mark`: it is to be written in another way."""
        del self.buffers[mark:]
        self._known = {key: number for key, number in self._known.items() if number < mark}

    def add(self, data: Buffer) -> int:
        """The number of the frame that `data` becomes."""
        self.buffers.append(data)
        return len(self.buffers) - 1

    def aside(self, data: Buffer) -> int | bytes:
        """Small data itself, or the number of the frame that large data became."""
        return bytes(data) if memoryview(data).nbytes < OUT_OF_BAND_BYTES else self.add(data)

    def tensor(self, torch: Any, tensor: Any) -> tuple[int | memoryview, list[int], str]:
        """A dense tensor's memory if that is small, or the number of its frame; its shape and dtype.

        The same memory twice, as with tied weights, is one frame: it arrives as two tensors over one memory.
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
            self._known[key] = number  # the view in `buffers` keeps that memory from being used for anything else
        return number, shape, dtype

    def stays_on_device(self, tensor: Any) -> bool:
        return self._devices and tensor.is_cuda and tensor.numel() > 0

    def device_tensor(self, tensor: Any) -> int:
        """The number of the first of the two frames of a CUDA tensor: one for its handle, one for its bytes."""
        from unified.bus.codec.cuda import DeviceTensor

        first = self.add(DeviceTensor(tensor.detach()))  # type: ignore[arg-type]  # until `settle`
        self.add(b"")
        return first


def _is_as_it_lies(tensor: Any) -> bool:
    """Its bytes are those at its address."""
    return bool(tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg())
