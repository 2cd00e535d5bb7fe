"""`DataLoaderIter`: iterates over a `torch.utils.data.DataLoader` whose batches other processes make."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from multiprocessing.context import BaseContext
from typing import Any, Self

import torch
from torch.utils.data import DataLoader, _utils, get_worker_info

from unified.bus.codec.codec import decode
from unified.bus.codec.serialized import SerializedValue
from unified.errors import UsageError, nearest
from unified.loader.epoch import Epoch, EpochSettings
from unified.loader.local_workers import LocalWorkers
from unified.loader.messages import LoaderWorkers
from unified.loader.role_workers import RoleWorkers, role_that_loads
from unified.loader.stream_host import LoaderParts, tasks_of
from unified.values import ClosedOnExit
from unified.worker.context import Worker, worker_here

DEFAULT_DEPTH = 2


class DataLoaderIter(Iterator[Any], ClosedOnExit):
    """Iterates over a `DataLoader`; other processes read the samples and collate them.

    If the job has a role that runs `unified.loader.service.serve`, these are its workers, on any node. Else they are
    helper processes of this worker on its own node, one for each stream. Batches come in the sampler's order, with the
    samples and random numbers of the same number of torch's own workers. A process that dies is replaced: its missing
    batches are made again elsewhere.

    It can be iterated over many times. Each pass is an epoch, with new keys of the sampler and a new base seed. The
    processes, and their copies of the dataset, stay until `close`, or until this object is collected. One thread at a
    time may use it.

    Args:
        loader: its `num_workers` is the number of streams unless `num_workers` is given. Its other options are kept:
            `batch_sampler`, `collate_fn`, `worker_init_fn`, `generator`, `prefetch_factor`, `pin_memory` (with CUDA),
            `timeout`, `drop_last`, `in_order`, and `multiprocessing_context` for helper processes.
        num_workers: number of streams, from 1. If neither is given: as many as the role has workers, or 1.
        role: the role to use; its workers must run the loader service. None: the job's first role that does.
        local: use helper processes, even if the job has a loader role.
        max_retries: how often one batch may be lost with the process that makes it.
        close_at_end: end the processes at the end of the first epoch, as a loader without `persistent_workers`.

    Raises:
        UsageError: there is no such role, or the number of workers is invalid.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        num_workers: int | None = None,
        *,
        role: str | None = None,
        local: bool = False,
        max_retries: int = 3,
        close_at_end: bool = False,
    ) -> None:
        self._is_closed = True  # until all attributes that `close` needs are set
        if num_workers is not None and (type(num_workers) is not int or num_workers < 1):
            raise UsageError(f"a data loader needs a number of workers from 1 up, not {num_workers!r}.")
        self._loader = loader
        self._key = uuid.uuid4().hex
        self._close_at_end = close_at_end
        self._workers, num_streams = choose_workers(
            LoaderParts.of(loader),
            self._key,
            num_workers or loader.num_workers,
            role=role,
            local=local,
            context=loader.multiprocessing_context,
        )
        self._settings = EpochSettings(
            num_streams=num_streams,
            depth=loader.prefetch_factor or DEFAULT_DEPTH,
            in_order=getattr(loader, "in_order", True),
            max_retries=max_retries,
            timeout_s=loader.timeout or None,
        )
        self._thread: ThreadPoolExecutor | None = None
        self._unwrap = unwrap
        if loader.pin_memory and torch.cuda.is_available():
            self._thread = ThreadPoolExecutor(
                1, "loader-pin", initializer=partial(torch.cuda.set_device, torch.cuda.current_device())
            )
            self._unwrap = _unwrap_and_pin
        self._is_closed = False
        self._num_epochs = 0
        self._epoch: Epoch | None = None
        self._begin()

    def __iter__(self) -> Self:
        if self._epoch is None and not self._is_closed:
            self._begin()
        return self

    def __next__(self) -> Any:
        if self._epoch is None:
            raise StopIteration
        try:
            return self._epoch.take()
        except StopIteration:
            self._epoch = None
            if self._close_at_end:
                self.close()
            raise
        except BaseException:
            if self._epoch.is_broken:
                self._workers.close()
            raise

    def __len__(self) -> int:
        return len(self._loader)

    def restart(self) -> None:
        """Begin a new epoch now, even if the present one is not over."""
        if self._epoch is not None:
            self._epoch.close()
        self._begin()

    def close(self) -> None:
        """End the iteration and the processes, or drop their data for this loader. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._epoch is not None:
            self._epoch.close()
            self._epoch = None
        self._workers.close()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def __del__(self) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"DataLoaderIter({self._loader!r}, num_workers={self._settings.num_streams})"

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        """Begin the next epoch: a `DataLoader` with `persistent_workers` calls this for each one after the first."""
        self.restart()

    def _begin(self) -> None:
        if self._is_closed:
            raise UsageError("this data loader's iterator was closed.")
        tasks = tasks_of(self._loader)  # before the seed is drawn, as in torch, for the same numbers
        seed = torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator).item()
        number, self._num_epochs = self._num_epochs, self._num_epochs + 1
        self._epoch = Epoch(
            self._workers,
            self._key,
            tasks,
            self._settings,
            base_seed=int(seed),
            number=number,
            unwrap=self._unwrap,
            thread=self._thread,
        )


class RayDataLoaderIter(DataLoaderIter):
    """`DataLoaderIter` under the name that scripts for Ray use.

    Args:
        dataloader: the `loader` of `DataLoaderIter`.
        num_actors: its `num_workers`.
        options: its other arguments.
    """

    def __init__(self, dataloader: DataLoader[Any], num_actors: int | None = None, **options: Any) -> None:
        super().__init__(dataloader, num_actors, **options)


def choose_workers(
    parts: LoaderParts,
    key: str,
    num_workers: int,
    *,
    role: str | None,
    local: bool,
    context: BaseContext | None = None,
) -> tuple[LoaderWorkers, int]:
    """Choose the workers that fetch, and the number of streams, as `DataLoaderIter` does. `num_workers` may be 0."""
    worker = worker_here()
    found = None if local else _role(worker, role)
    if worker is None or found is None:
        owner = f"process {os.getpid()}" if worker is None else worker.actor_info.name
        num_streams = num_workers or 1
        return LocalWorkers(parts, num_streams, context=context, owner=owner), num_streams
    actors = worker.workers_of(found)
    num_streams = num_workers or len(actors)
    workers = RoleWorkers(worker, actors, key=key, packed=parts.pack())
    workers.prepare(workers.initial_workers(num_streams))
    return workers, num_streams


def _role(worker: Worker | None, role: str | None) -> str | None:
    if role is None:
        return role_that_loads(worker) if worker is not None else None
    if worker is None:
        raise UsageError(f"role {role!r} cannot load data here: this process is not a worker of a job.")
    if not worker.workers_of(role):
        raise UsageError(f"the job has no role {role!r} to load data.{nearest(role, worker.roles)}")
    return role


def unwrap(value: Any) -> Any:
    """Return the batch in a worker's answer."""
    if isinstance(value, SerializedValue):
        return decode(value.body, value.buffers)  # it is decoded once and not shared: tensors need no copy
    return value


def _unwrap_and_pin(value: Any) -> Any:
    return _utils.pin_memory.pin_memory(unwrap(value))  # type: ignore[no-untyped-call]


class DataLoaderPatch:
    """The change that `patch_dataloader_ray` makes; `undo` it, or use it as a context manager."""

    def __init__(self) -> None:
        self._original: Any = None
        self._leave_single_process = False

    def apply(self, *, leave_single_process: bool = False) -> None:
        """Apply the patch; a second call only changes `leave_single_process`."""
        self._leave_single_process = leave_single_process
        if self._original is not None:
            return
        original = self._original = DataLoader._get_iterator

        @wraps(original)
        def get_iterator(loader: DataLoader[Any]) -> Any:
            if loader.num_workers == 0 and (self._leave_single_process or get_worker_info() is not None):
                return original(loader)  # a process that loads data starts no more for a loader in its dataset
            return DataLoaderIter(loader, close_at_end=not loader.persistent_workers)

        DataLoader._get_iterator = get_iterator  # type: ignore

    def undo(self) -> None:
        """Restore torch's own iterators; iterators that were made meanwhile go on."""
        if self._original is not None:
            DataLoader._get_iterator = self._original  # type: ignore[method-assign]
            self._original = None

    def __enter__(self) -> DataLoaderPatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


_PATCH = DataLoaderPatch()


def patch_dataloader_ray(*, leave_single_process: bool = False) -> DataLoaderPatch:
    """Make ``iter(loader)`` of every `DataLoader` return a `DataLoaderIter` from now on.

    A call early in ``run()`` moves the loading of data out of this worker without a change elsewhere. With
    `persistent_workers` the iterator is kept from one epoch to the next, as in torch; without it, a loader's own
    processes are started for each epoch. A loader with ``num_workers=0`` uses all workers of the loader role, or one
    process; its dataset then draws the random numbers of a worker.

    Args:
        leave_single_process: let loaders with ``num_workers=0`` load in this process, as torch does.

    Returns:
        the patch, to be undone with ``undo()``, or at the end of a ``with`` block.
    """
    _PATCH.apply(leave_single_process=leave_single_process)
    return _PATCH
