"""CUDA tensors: sent by handle to a process of the same host that sees the same device, otherwise by bytes.

By handle, the reader gets a tensor on the device, over a copy made there for this message: neither side sees the
other's writes. When the reader drops the tensor, the memory goes back to the sender's allocator (torch counts this). By
bytes, the tensor is copied through pinned memory, and arrives on the CPU.

A handle whose message is lost keeps its memory until the sender ends: torch has no way to take it back.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from unified.bus.buffers import Buffer, needed
from unified.bus.codec.tensors import DeviceTensor, Windows, build_tensor, tensor_bytes
from unified.errors import ProtocolError

HANDLE, BYTES = "handle", "bytes"
"""Routes of a tensor: the first word of its first frame. Its second frame has the bytes, or is empty."""


def choose_route(device: str, seen_by_reader: Collection[str], *, is_same_process: bool = False) -> str:
    """Choose the route of a tensor on the device with this UUID: by handle to another process that sees the device,
    otherwise by bytes. A reader on another host sees no device here, and a process cannot open its own handle."""
    return HANDLE if device and device in seen_by_reader and not is_same_process else BYTES


def settle(buffers: Sequence[Any], seen_by_reader: Collection[str], *, is_same_process: bool = False) -> list[Buffer]:
    """Return the buffers of `encode(…, devices=True)` for one reader, with CUDA tensors replaced by frames
    (`choose_route`). Call it once for each reader."""
    frames: list[Buffer] = []
    for index, buffer in enumerate(buffers):
        if isinstance(buffer, DeviceTensor):
            route = choose_route(_uuid(buffer.tensor), seen_by_reader, is_same_process=is_same_process)
            frames += _by_handle(buffer.tensor) if route == HANDLE else _by_bytes(buffer.tensor)
        elif not (index and isinstance(buffers[index - 1], DeviceTensor)):  # the place of its second frame
            frames.append(buffer)
    return frames


def rebuild(first: Buffer, second: Buffer, windows: Windows) -> Any:
    """Rebuild a tensor from its two frames; ProtocolError: they are invalid, or its device is not visible here."""
    word, *content = msgspec.msgpack.decode(first)
    if word == BYTES:
        dtype, shape = content
        return build_tensor(windows.writable(second), shape, dtype, False)
    if word != HANDLE:
        raise ProtocolError(f"{word!r} is no route of a CUDA tensor.")
    uuid, arguments = content
    torch = needed("torch")
    reductions = needed("torch.multiprocessing.reductions")
    count = torch.cuda.device_count()
    index = next((each for each in range(count) if _uuid_of(torch, each) == uuid), None)
    if index is None:
        raise ProtocolError(f"a tensor on CUDA device {uuid} came, which this process does not see.")
    values = list(pickle.loads(arguments))
    values[_DEVICE_ARGUMENT] = index
    return reductions.rebuild_cuda_tensor(*values)


_DEVICE_ARGUMENT = 6
"""Index of the argument of `rebuild_cuda_tensor` that numbers the device in the sender's process."""


def _by_handle(tensor: Any) -> list[Buffer]:
    torch = needed("torch")
    reductions = needed("torch.multiprocessing.reductions")
    try:
        with torch.cuda.device(tensor.device):
            copy = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
            _, arguments = reductions.reduce_tensor(copy)
    except RuntimeError:  # no room on the device, or memory of a kind that has no handles
        return _by_bytes(tensor)
    return [msgspec.msgpack.encode([HANDLE, _uuid(tensor), pickle.dumps(arguments)]), b""]


def _by_bytes(tensor: Any) -> list[Buffer]:
    data, shape, dtype = tensor_bytes(needed("torch"), tensor)
    return [msgspec.msgpack.encode([BYTES, dtype, shape]), data]


def _uuid(tensor: Any) -> str:
    return _uuid_of(needed("torch"), tensor.device.index) if tensor.is_cuda else ""


def _uuid_of(torch: Any, index: int) -> str:
    """Return the UUID as NVML writes it; empty where torch does not know it."""
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return "" if uuid is None else f"GPU-{uuid}"
