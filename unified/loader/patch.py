"""`patch_dataloader_ray()`: every `DataLoader` gets our workers."""

from __future__ import annotations

from functools import wraps
from types import TracebackType
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from unified.loader.iterator import DataLoaderIter


class DataLoaderPatch:
    """What `patch_dataloader_ray` did; `undo` it, or use it as a context manager."""

    def __init__(self) -> None:
        self._original: Any = None
        self._leave_single_process = False

    def apply(self, *, leave_single_process: bool = False) -> None:
        """Patch; a second time changes only what it leaves alone."""
        self._leave_single_process = leave_single_process
        if self._original is not None:
            return
        original = self._original = DataLoader._get_iterator

        @wraps(original)
        def get_iterator(loader: DataLoader[Any]) -> Any:
            if loader.num_workers == 0 and (self._leave_single_process or get_worker_info() is not None):
                return original(loader)  # a process that loads data starts none for a loader within its dataset
            return DataLoaderIter(loader, close_at_end=not loader.persistent_workers)

        DataLoader._get_iterator = get_iterator  # type: ignore

    def undo(self) -> None:
        """Give torch its own iterators back; those that were made meanwhile go on."""
        if self._original is not None:
            DataLoader._get_iterator = self._original  # type: ignore[method-assign]
            self._original = None

    def __enter__(self) -> DataLoaderPatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


_PATCH = DataLoaderPatch()


def patch_dataloader_ray(*, leave_single_process: bool = False) -> DataLoaderPatch:
    """From now on ``iter(loader)`` of a `DataLoader` gives a `DataLoaderIter`.

    Called early in ``run()``, it moves the loading of data out of this worker without a change elsewhere. With
    `persistent_workers` the iterator is kept from one epoch to the next, as torch does; without it, a loader's own
    processes are started for each epoch. A loader with ``num_workers=0`` is served by as many workers as the loading
    role has, or by one process; the random numbers that its dataset draws are then those of a worker.

    Args:
        leave_single_process: let loaders with ``num_workers=0`` load in this process, as torch does.

    Returns:
        the patch, to be undone with ``undo()``, or at the end of a ``with`` block.
    """
    _PATCH.apply(leave_single_process=leave_single_process)
    return _PATCH
