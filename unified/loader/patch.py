"""`patch_dataloader_ray()`: every `DataLoader` with workers of its own gets ours instead."""

from __future__ import annotations

from functools import wraps
from types import TracebackType
from typing import Any

from torch.utils.data import DataLoader

from unified.loader.iterator import DataLoaderIter


class DataLoaderPatch:
    """What `patch_dataloader_ray` did; `undo` it, or use it as a context manager."""

    def __init__(self) -> None:
        self._original: Any = None

    def apply(self) -> None:
        """Patch; a second time changes nothing."""
        if self._original is not None:
            return
        original = self._original = DataLoader._get_iterator

        @wraps(original)
        def get_iterator(loader: DataLoader[Any]) -> Any:
            if loader.num_workers == 0:
                return original(loader)
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


def patch_dataloader_ray() -> DataLoaderPatch:
    """From now on ``iter(loader)`` of a `DataLoader` with ``num_workers > 0`` gives a `DataLoaderIter`.

    Called early in ``run()``, it moves the loading of data out of this worker without a change elsewhere. With
    `persistent_workers` the iterator is kept from one epoch to the next, as torch does.

    Returns:
        the patch, to be undone with ``undo()``, or at the end of a ``with`` block.
    """
    _PATCH.apply()
    return _PATCH
