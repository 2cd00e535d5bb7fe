"""Buffers of host memory that are used again, and copies of tensors in them.

A copy into memory that was written before is several times as fast as one into fresh memory, which has no pages yet.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import mmap
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from unified.tensors.copy import Copy, copy_memory
from unified.tensors.walk import identity_of, is_lazy, is_plain, tensors_in

ALIGN = 64
"""Alignment of each tensor in a buffer, in bytes."""


class BufferPool:
    """Buffers that are kept for reuse. Safe for threads.

    Args:
        one_size: all buffers in use have about one size: if all idle buffers are too small, free them.
        max_idle: number of idle buffers that are kept; None: all.
    """

    def __init__(self, *, one_size: bool = False, max_idle: int | None = None) -> None:
        self._one_size = one_size
        self._max_idle = max_idle
        self._idle: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int, *, pinned: bool = False) -> torch.Tensor:
        """Return a buffer of at least `nbytes` bytes, the smallest idle one or a new one; OSError: no memory."""
        with self._lock:
            fitting = [each for each in self._idle if each.numel() >= nbytes and each.is_pinned() >= pinned]
            if fitting:
                found = min(fitting, key=torch.Tensor.numel)
                self._drop([found])
                return found
            if self._one_size:
                self._drop(list(self._idle))
        if pinned:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        memory = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a hint: fewer page faults
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def put_back(self, buffer: torch.Tensor) -> None:
        """Keep a buffer for the next `take`. It takes no lock: a finalizer may call it in the middle of `take`."""
        if self._max_idle is None or len(self._idle) < self._max_idle:
            self._idle.append(buffer)

    def borrow(self, nbytes: int) -> Any:
        """Return writable memory as `take` does. It comes back once nothing, such as a tensor, refers to it."""
        buffer = self.take(nbytes)
        window = (ctypes.c_ubyte * nbytes).from_buffer(buffer.numpy())  # type: ignore[arg-type]  # of numpy's stubs
        weakref.finalize(window, self.put_back, buffer).atexit = False
        return window

    def trim(self, num_kept: int = 0) -> None:
        """Give idle buffers back to the system, except the `num_kept` largest."""
        with self._lock:
            self._drop(sorted(self._idle, key=torch.Tensor.numel, reverse=True)[num_kept:])

    def close(self) -> None:
        """Give idle buffers back to the system, and keep none from now on."""
        self._max_idle = 0
        self.trim()

    def _drop(self, buffers: Sequence[torch.Tensor]) -> None:
        """Called under the lock. It works in place, because `put_back` may append meanwhile."""
        gone = set(map(id, buffers))
        for index in reversed(range(len(self._idle))):
            if id(self._idle[index]) in gone:
                del self._idle[index]


@dataclasses.dataclass(eq=False, repr=False)
class HostCopy:
    """A copy in a buffer of a pool; it stays unchanged until `release`."""

    value: Any
    """The copied tensors, in the same containers; None after `release`."""
    nbytes: int
    """Size of the tensors."""
    memory: torch.Tensor | None
    """The buffer; None if the copy needs none, and after `release`."""
    _arrived: Sequence[Any]
    _pool: BufferPool

    def wait(self) -> None:
        """Wait until the copies from GPUs have been made."""
        for event in self._arrived:
            event.synchronize()

    def release(self) -> None:
        """Give the buffer back to the pool. Can be called twice."""
        memory, self.memory, self.value = self.memory, None, None
        if memory is not None:
            self._pool.put_back(memory)


def stage(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], streams: dict[torch.device, Any] | None = None
) -> list[Any]:
    """Copy tensors into host memory; only begin the copies from GPUs. Return for each GPU the CUDA event of their end.

    Args:
        targets: contiguous tensors of the shapes of `sources`; casts are made on the GPU.
        streams: None: copies run on the computing stream, so that later work waits for them. Else they run on streams
            of their own, which are kept in this dict by device.
    """
    plain: list[Copy] = []
    by_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            if source.is_cuda:
                by_device.setdefault(source.device, []).append((target, source))
            elif source.dtype == target.dtype and source.is_contiguous() and not is_lazy(source):
                plain.append(Copy(target.data_ptr(), source.data_ptr(), source.nbytes))
            else:
                target.copy_(source)
        arrived = [_copy_off(device, pairs, streams) for device, pairs in by_device.items()]
        copy_memory(plain, torch.get_num_threads())
    return arrived


def stage_state(state: Any, pool: BufferPool) -> HostCopy:
    """Copy a state dict, or any other nest of containers, to the CPU.

    Plain dense tensors in dicts, lists and tuples go into one buffer of the pool; tensors that are tied (the same
    memory, shape and strides) stay tied. Everything else is deep-copied.
    """
    tensors = {id(tensor): tensor for tensor in tensors_in(state) if is_plain(tensor)}
    starts: dict[object, int] = {}
    nbytes = 0
    for tensor in tensors.values():
        if (identity := identity_of(tensor)) not in starts:
            starts[identity] = nbytes
            nbytes += -(-tensor.nbytes // ALIGN) * ALIGN
    memory = pool.take(nbytes, pinned=any(tensor.is_cuda for tensor in tensors.values())) if nbytes else None
    copies: dict[object, torch.Tensor] = {}
    sources: list[torch.Tensor] = []
    for tensor in tensors.values():
        if (identity := identity_of(tensor)) not in copies:
            copies[identity] = _place(tensor, memory, starts[identity])
            sources.append(tensor.detach())
    arrived = stage([each.detach() for each in copies.values()], sources)
    memo: dict[int, Any] = {number: copies[identity_of(tensor)] for number, tensor in tensors.items()}
    return HostCopy(copy.deepcopy(state, memo), nbytes, memory, arrived, pool)


def nbytes_of(state: Any) -> int:
    """Return the bytes of the tensors in a nest of containers; tied tensors may be counted twice."""
    return sum({id(tensor): tensor.nbytes for tensor in tensors_in(state) if tensor.layout == torch.strided}.values())


def _copy_off(
    device: torch.device,
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    streams: dict[torch.device, Any] | None,
) -> Any:
    """Begin the copies from one GPU; return the event of their end."""
    stream = computing = torch.cuda.current_stream(device)
    if streams is not None:
        if device not in streams:
            streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = streams[device]
        stream.wait_stream(computing)  # the stream that computes these tensors
    with torch.cuda.stream(stream):
        for target, source in pairs:
            target.copy_(source.to(target.dtype).contiguous(), non_blocking=True)
            source.record_stream(stream)  # a temporary tensor may be freed before the copy has begun
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
    return event


def _place(tensor: torch.Tensor, memory: torch.Tensor | None, start: int) -> torch.Tensor:
    """Return the tensor in `memory`, still without values, to which `tensor` is to be copied."""
    if tensor.numel() == 0 or memory is None:
        placed = torch.empty(tensor.shape, dtype=tensor.dtype)
    else:
        # A storage of its own for each: torch.save writes whole storages.
        placed = torch.frombuffer(memory.numpy(), dtype=tensor.dtype, count=tensor.numel(), offset=start)
        placed = placed.view(tensor.shape)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(placed, requires_grad=tensor.requires_grad)
    return placed
