"""Workers of a role of the job that load data for the others, on any nodes."""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import Future
from typing import Any

from unified.errors import LoaderError, RouteLostError, RpcNotFoundError, UnifiedError, WorkerDiedError
from unified.job.spec import EntryPoint
from unified.loader.messages import (
    BringParts,
    DropLoader,
    FetchBatch,
    FetchReply,
    LoaderMessage,
    OpenStream,
    StreamLostError,
)
from unified.worker.context import ActorInfo, Worker

METHOD = "unified.loader"
SERVICE = EntryPoint(kind="attribute", target="unified.loader.service", attribute="serve")
NO_DEADLINE_S = 7 * 24 * 3600.0
"""Seconds, above the job's default for calls: the loader's `timeout` limits a batch, and a death ends the wait."""


def role_that_loads(worker: Worker) -> str | None:
    """Return the first role of the job whose entry point is the loader service."""
    for role in worker.roles:
        actors = worker.workers_of(role)
        entry = actors[0].role_spec.entry_point if actors else None
        if entry is not None and (entry.target, entry.attribute) == (SERVICE.target, SERVICE.attribute):
            return role
    return None


class RoleWorkers:
    """The workers of a role that runs `unified.loader.service.serve`."""

    is_restarted = False

    def __init__(self, worker: Worker, actors: list[ActorInfo], *, key: str, packed: bytes) -> None:
        self._bus = worker.bus
        self._rank = worker.actor_info.rank
        self._names = [actor.name for actor in actors]
        self._key = key
        self._packed = packed
        self._brought: dict[int, Future[Any]] = {}
        """The futures of parts that were sent, by worker."""
        self._pid = os.getpid()

    def __len__(self) -> int:
        return len(self._names)

    def initial_workers(self, num_streams: int) -> list[int]:
        """Spread streams over workers in turn; each rank of the consumer's role starts at another worker."""
        first = self._rank * num_streams
        return [(first + stream) % len(self._names) for stream in range(num_streams)]

    def prepare(self, workers: list[int]) -> None:
        """Send the parts to these workers, encoded once."""
        targets = sorted(set(workers) - self._brought.keys())
        if targets:
            names = [self._names[worker] for worker in targets]
            message = BringParts(self._key, self._packed)
            futures = self._bus.call_many(names, METHOD, (message,), {}, timeout=NO_DEADLINE_S)
            self._brought.update(zip(targets, futures, strict=True))

    def open(self, worker: int, message: OpenStream) -> None:
        self.prepare([worker])
        self._call(worker, message)

    def fetch(self, worker: int, message: FetchBatch) -> Future[FetchReply]:
        return self._call(worker, message)

    def lost(self, worker: int, error: BaseException) -> str:
        if isinstance(error, RpcNotFoundError):
            raise LoaderError(
                f"worker {self._names[worker]} serves no data loader: the entry point of its role must be "
                f"{SERVICE.target}.{SERVICE.attribute}."
            ) from error
        if not isinstance(error, WorkerDiedError | RouteLostError | StreamLostError):
            return ""
        brought = self._brought.pop(worker, None)
        failure = brought.exception() if brought is not None and brought.done() else None
        return f"loader worker {self._names[worker]} was lost: {failure or error}"

    def close(self) -> None:
        if os.getpid() != self._pid:  # a fork of the worker cannot call
            return
        with contextlib.suppress(UnifiedError):  # if the bus has ended, the workers drop it by themselves
            for worker in self._brought:
                self._call(worker, DropLoader(self._key))
        self._brought.clear()

    def _call(self, worker: int, message: LoaderMessage) -> Future[Any]:
        return self._bus.call(self._names[worker], METHOD, (message,), {}, timeout=NO_DEADLINE_S)
