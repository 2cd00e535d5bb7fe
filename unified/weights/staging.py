"""The sender's own memory, kept from one version to the next: pinned where tensors come from a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unified.weights.transfer_plan import Bucket


class Staged:
    """A bucket in memory of ours: `tensors` are to be read once `wait` has returned, until `Stager.put_back`."""

    def __init__(self, tensors: list[torch.Tensor], memory: torch.Tensor | None, arrived: Sequence[Any]) -> None:
        self.tensors = tensors
        self.memory = memory
        self._arrived = arrived

    def wait(self) -> None:
        """Until the copies have been made."""
        for event in self._arrived:
            event.synchronize()


class Stager:
    """Copies buckets off the model where they cannot be sent from its own memory.

    Copies off a GPU go through pinned memory, on a stream of their own beside what the model computes; casts happen on
    the GPU.
    """

    def __init__(self) -> None:
        self._idle: list[torch.Tensor] = []
        self._streams: dict[torch.device, Any] = {}

    def stage(self, bucket: Bucket, tensors: Sequence[torch.Tensor], *, keep: bool) -> Staged:
        """Make a bucket's tensors ready to be sent.

        Args:
            tensors: of the bucket, in its order, cast or not.
            keep: the model's own memory may change before they were sent.
        """
        wanted = [getattr(torch, entry.dtype) for entry in bucket.entries]
        if not keep and all(map(_is_ready, tensors, wanted)):
            return Staged(list(tensors), None, ())
        with torch.no_grad():
            memory = self._take(bucket.nbytes, pinned=any(tensor.is_cuda for tensor in tensors))
            copies = [
                memory[start : start + entry.nbytes].view(dtype).view(entry.shape)
                for start, entry, dtype in zip(bucket.offsets, bucket.entries, wanted, strict=True)
            ]
            arrived = [
                self._copy_off(device, [pair for pair in zip(tensors, copies, strict=True) if pair[0].device == device])
                for device in {tensor.device for tensor in tensors if tensor.is_cuda}
            ]
            for tensor, copy in zip(tensors, copies, strict=True):
                if not tensor.is_cuda:
                    copy.copy_(tensor)
        return Staged(copies, memory, arrived)

    def put_back(self, staged: Staged) -> None:
        """Its memory may be used again."""
        if staged.memory is not None:
            self._idle.append(staged.memory)
            staged.memory, staged.tensors = None, []

    def trim(self, num_kept: int) -> None:
        """Give idle memory back to the system, but for so many buckets, the largest."""
        self._idle.sort(key=lambda memory: memory.numel(), reverse=True)
        del self._idle[num_kept:]

    def _take(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        fitting = [each for each in self._idle if each.numel() >= nbytes and each.is_pinned() >= pinned]
        if fitting:
            memory = min(fitting, key=lambda each: each.numel())
            self._idle = [each for each in self._idle if each is not memory]
            return memory
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)

    def _copy_off(self, device: torch.device, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """Begin to copy off one GPU; an event that happens when it is done."""
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))  # what computes these tensors
        with torch.cuda.stream(stream):
            for tensor, copy in pairs:
                ours = tensor.to(copy.dtype).contiguous()
                copy.copy_(ours, non_blocking=True)
                tensor.record_stream(stream)  # a gathered one may be freed before the copy has begun
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        return event


def _is_ready(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype == dtype and tensor.is_contiguous() and not _is_lazy(tensor)


def _is_lazy(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()
