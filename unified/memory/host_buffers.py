"""A state dict copied into memory of ours, which is kept and used again, so that training goes on at once."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from unified.memory.copy import Copy, copy_memory

ALIGN = 64
"""Bytes; of every tensor's beginning."""


class Staged:
    """A state dict whose tensors nobody changes, until it is released.

    Attributes:
        tree: as the user's, its tensors on the CPU.
        nbytes: of the tensors.
    """

    def __init__(self, tree: Any, nbytes: int, memory: torch.Tensor | None, arrived: list[Any]) -> None:
        self.tree = tree
        self.nbytes = nbytes
        self.memory = memory
        self._arrived = arrived

    def wait(self) -> None:
        """Until the copies off a GPU have been made."""
        for event in self._arrived:
            event.synchronize()


class Stager:
    """Copies state dicts. Memory that was written to before takes a copy several times as fast as fresh memory, so it
    is kept: as much as saves hold at a time.
    """

    def __init__(self) -> None:
        self._idle: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def stage(self, state: Any) -> Staged:
        """Copy a state dict, or any other nest of containers.

        Plain dense tensors in dicts, lists and tuples go into the memory that is kept; tensors that are tied (the same
        memory, shape and strides) stay tied. Everything else is deep-copied.
        """
        tensors = {id(tensor): tensor for tensor in _tensors(state) if _is_plain(tensor)}
        places: dict[object, int] = {}
        nbytes = 0
        for tensor in tensors.values():
            if (mark := _mark(tensor)) not in places:
                places[mark] = nbytes
                nbytes += -(-tensor.nbytes // ALIGN) * ALIGN
        memory = self._take(nbytes, pinned=any(tensor.is_cuda for tensor in tensors.values())) if nbytes else None
        made: dict[object, torch.Tensor] = {}
        memo: dict[int, Any] = {}
        copies: list[Copy] = []
        with torch.no_grad():
            for number, tensor in tensors.items():
                if (mark := _mark(tensor)) not in made:
                    made[mark] = _copied(tensor, memory, places[mark], copies)
                memo[number] = made[mark]
        copy_memory(copies, torch.get_num_threads())
        devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        arrived = [_event(device) for device in devices]
        return Staged(copy.deepcopy(state, memo), nbytes, memory, arrived)

    def put_back(self, staged: Staged) -> None:
        """Its memory may be used again. Can be called twice."""
        with self._lock:
            if staged.memory is not None:
                self._idle.append(staged.memory)
            staged.memory, staged.tree = None, None

    def clear(self) -> None:
        """Give what is idle back to the system."""
        with self._lock:
            self._idle.clear()

    def _take(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        with self._lock:
            fitting = [each for each in self._idle if each.numel() >= nbytes and each.is_pinned() >= pinned]
            if fitting:
                memory = min(fitting, key=lambda each: each.numel())
                self._idle = [each for each in self._idle if each is not memory]
                return memory
            self._idle.clear()  # too small, now and next time
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Every tensor in containers, once for each place that it is at."""
    pending, seen = [tree], set[int]()
    while pending:
        node = pending.pop()
        if isinstance(node, torch.Tensor):
            yield node
        elif isinstance(node, Mapping | list | tuple) and id(node) not in seen:
            seen.add(id(node))
            pending.extend(node.values() if isinstance(node, Mapping) else node)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _mark(tensor: torch.Tensor) -> object:
    """Equal for tensors that are tied."""
    if tensor.numel() == 0:
        return id(tensor)
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, type(tensor))


def _copied(tensor: torch.Tensor, memory: torch.Tensor | None, start: int, copies: list[Copy]) -> torch.Tensor:
    """A tensor in our memory; `copies` gets what is still to be copied there."""
    if tensor.numel() == 0 or memory is None:
        copied = torch.empty(tensor.shape, dtype=tensor.dtype)
    else:
        # A storage of its own for each: torch.save writes whole storages.
        copied = torch.frombuffer(memory.numpy(), dtype=tensor.dtype, count=tensor.numel(), offset=start)
        copied = copied.view(tensor.shape)
        if tensor.is_cuda or not tensor.is_contiguous():
            # Copies off a GPU run on the stream that computes, so that what comes after them waits for them.
            copied.copy_(tensor, non_blocking=tensor.is_cuda)
        else:
            copies.append(Copy(copied.data_ptr(), tensor.data_ptr(), tensor.nbytes))
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
    return copied


def _event(device: torch.device) -> Any:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def nbytes_of(state: Any) -> int:
    """Bytes of the tensors in a nest of containers; those that are there twice may be counted twice."""
    return sum({id(tensor): tensor.nbytes for tensor in _tensors(state) if tensor.layout == torch.strided}.values())
