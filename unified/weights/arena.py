"""Memory for versions that are copied on arrival: taken for one, and used again once nobody looks at it any more.

Fresh memory is ten times slower to write to than memory that was touched before, so it is kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import weakref
from collections.abc import Sequence

import torch

from unified.weights.transfer_plan import Bucket, Manifest

MAX_IDLE = 2
"""One that the readers still use and one that is being filled make two in use; more than that were for slow readers."""


class Arena:
    """The tensors of one version, each at its place. The memory lives as long as any of them."""

    def __init__(self, window: object, buckets: Sequence[Bucket]) -> None:
        self._window = window
        self._starts = [sum(bucket.nbytes for bucket in buckets[:index]) for index in range(len(buckets))]
        self._buckets = buckets

    def fill(self, index: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of the tensors of a bucket."""
        bucket = self._buckets[index]
        copies = []
        for entry, offset, tensor in zip(bucket.entries, bucket.offsets, tensors, strict=True):
            if entry.nbytes == 0:
                copies.append(tensor)
                continue
            flat = torch.frombuffer(
                self._window, dtype=tensor.dtype, count=tensor.numel(), offset=self._starts[index] + offset
            )
            copies.append(flat.view(entry.shape).copy_(tensor))
        return copies


class ArenaPool:
    """Makes arenas. Safe for threads."""

    def __init__(self) -> None:
        self._idle: list[mmap.mmap] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def make(self, manifest: Manifest) -> Arena:
        """Memory for a version.

        Raises:
            OSError: the system has none.
        """
        nbytes = max(manifest.nbytes, mmap.PAGESIZE)
        memory = self._take(nbytes)
        window = (ctypes.c_ubyte * nbytes).from_buffer(memory)
        weakref.finalize(window, self._put_back, memory).atexit = False
        return Arena(window, manifest.buckets)

    def close(self) -> None:
        """Keep nothing from now on."""
        with self._lock:
            self._is_closed = True
            self._idle.clear()

    def _take(self, nbytes: int) -> mmap.mmap:
        with self._lock:
            fitting = [memory for memory in self._idle if nbytes <= len(memory) <= 2 * nbytes]
            if fitting:
                memory = min(fitting, key=len)
                self._idle = [each for each in self._idle if each is not memory]
                return memory
            self._idle.clear()  # of a model of another size
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a hint: fewer page faults
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def _put_back(self, memory: mmap.mmap) -> None:
        # A finalizer, perhaps in the middle of `_take` on this very thread: it must not wait for the lock.
        if not self._is_closed and len(self._idle) < MAX_IDLE:
            self._idle.append(memory)
