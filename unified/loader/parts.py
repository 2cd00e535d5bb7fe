"""What of a `torch.utils.data.DataLoader` goes to the processes that fetch for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from unified.job.by_value import dumps


@dataclass(frozen=True, eq=False)
class LoaderParts:
    """A dataset, and how to make batches of it.

    Attributes:
        dataset: map-style (`dataset[key]`) or iterable.
        collate_fn: makes a batch of a list of samples, or converts one sample where there are no batches.
        worker_init_fn: called with the stream's id in each process that fetches, or None.
        is_iterable: the dataset is iterated over; tasks say nothing.
        has_batches: a task is a list of keys; else one key.
        batch_size: of an iterable dataset.
        drop_last: of an iterable dataset.
        name: of the dataset, for messages.
    """

    dataset: Any
    collate_fn: Callable[[Any], Any]
    worker_init_fn: Callable[[int], Any] | None = None
    is_iterable: bool = False
    has_batches: bool = False
    batch_size: int | None = None
    drop_last: bool = False
    name: str = "the dataset"

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> LoaderParts:
        """Those of a loader."""
        return cls(
            dataset=loader.dataset,
            collate_fn=loader.collate_fn,
            worker_init_fn=loader.worker_init_fn,
            is_iterable=isinstance(loader.dataset, IterableDataset),
            has_batches=loader.batch_sampler is not None,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            name=f"dataset {type(loader.dataset).__name__}",
        )

    def pack(self) -> bytes:
        """As bytes that any process of the job can read: classes and functions of a script, and lambdas, go by value.

        Raises:
            TypeError, pickle.PicklingError: something in it cannot be pickled.
        """
        return dumps(self)


def tasks_of(loader: DataLoader[Any]) -> Iterator[Any]:
    """What to ask for in one epoch: the sampler's keys, batch by batch; without an end for an iterable dataset."""
    if isinstance(loader.dataset, IterableDataset):
        return itertools.repeat(None)
    keys: Iterable[Any] = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return iter(keys)
