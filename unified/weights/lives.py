"""Calls to particular lives of workers: those to one that is over fail at once, and do not wait for the next."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from unified.bus.calls.future import RpcFuture
from unified.bus.endpoint import BusEndpoint
from unified.core.directory import Change, IncarnationDied
from unified.errors import (
    BusOverloadedError,
    RouteLostError,
    RpcCancelledError,
    RpcNotFoundError,
    RpcTimeoutError,
    WorkerDiedError,
)
from unified.protocol.records import WorkerIncarnation

GONE, LATE, FAILED, SUPERSEDED = "gone", "late", "failed", "superseded"


class Failure(NamedTuple):
    """Why one receiver did not get a version."""

    kind: str
    """`GONE`: the next life of it, or the next attempt, may. `LATE`: time was up. `FAILED`: trying again is no use.
    `SUPERSEDED`: it has a newer one, which is as good."""
    text: str


def method(name: str, verb: str) -> str:
    """Under which a receiver's handler is registered."""
    return f"unified.weights.{name}.{verb}"


def failure_of(error: BaseException) -> Failure:
    """What an error of a call means for the worker that was called."""
    match error:
        case WorkerDiedError(is_final=is_final):
            return Failure(FAILED if is_final else GONE, str(error))
        case RpcTimeoutError():
            return Failure(LATE, str(error))
        case RpcCancelledError() | RouteLostError() | RpcNotFoundError() | BusOverloadedError():
            return Failure(GONE, str(error))
        case _:
            return Failure(FAILED, f"{type(error).__name__}: {error}")


def ended_lives(changes: Iterable[Change]) -> list[tuple[WorkerIncarnation, str]]:
    """The lives that are over, as changes of the directory tell, and why."""
    return [
        (WorkerIncarnation(change.worker, change.incarnation), change.reason)
        for change in changes
        if isinstance(change, IncarnationDied)
    ]


class LifeCalls:
    """Calls through one endpoint. It knows of the deaths that were told since it was made.

    Args:
        also: called with the directory's news too, as long as this object lives.
    """

    def __init__(self, bus: BusEndpoint, also: Callable[[Sequence[Change]], object] = lambda changes: None) -> None:
        self.bus = bus
        self._also = also
        self._over: dict[str, int] = {}
        self._calls: list[tuple[WorkerIncarnation, RpcFuture[Any]]] = []
        self._lock = threading.Lock()
        listener = weakref.WeakMethod(self._learn)

        def learn(changes: Sequence[Change]) -> None:
            method = listener()
            if method is not None:
                method(changes)

        bus.on_directory(learn)

    def call_many(
        self, lives: Sequence[WorkerIncarnation], method: str, args: Sequence[Any], *, timeout: float
    ) -> list[Future[Any]]:
        """Call each; the arguments are encoded once.

        Raises:
            RpcTimeoutError: too many bytes were in flight until the deadline.
        """
        with self._lock:
            alive = [life for life in lives if not self._is_over(life)]
        calls = self.bus.call_many([life.worker for life in alive], method, args, {}, timeout=timeout)
        made = dict(zip(alive, calls, strict=True))
        with self._lock:
            self._calls = [(life, future) for life, future in self._calls if not future.done()]
            self._calls += made.items()
            late = [life for life in made if self._is_over(life)]
        for life in late:
            made[life].cancel()
        return [made.get(life) or _failed(life, method) for life in lives]

    def _learn(self, changes: Sequence[Change]) -> None:
        over = [life for life, _ in ended_lives(changes)]
        with self._lock:
            for life in over:
                self._over[life.worker] = max(life.incarnation, self._over.get(life.worker, -1))
            hopeless = [future for life, future in self._calls if self._is_over(life)]
        for future in hopeless:  # those sent to it have failed; the others would wait for its next life
            future.cancel()
        self._also(changes)

    def _is_over(self, life: WorkerIncarnation) -> bool:
        return life.incarnation <= self._over.get(life.worker, -1)


def _failed(life: WorkerIncarnation, method: str) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(
        WorkerDiedError(f"worker {life.worker} (life {life.incarnation}) died before {method!r} was called.")
    )
    return future
