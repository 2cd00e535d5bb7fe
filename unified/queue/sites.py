"""Where a queue is, as its users see it: in another worker, or here. Both return the answer, or a future of it."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any, Protocol

from unified.bus.endpoint import BusEndpoint
from unified.protocol.records import WorkerIncarnation
from unified.queue import items as packed
from unified.queue.server import QueueService, method

SLICE_S = 20.0
"""The owner answers after so long at the latest, if only to say that there is nothing yet: so an answer that got lost
is asked for again, and nobody waits on a call that the owner has forgotten."""
MARGIN_S = 40.0
"""Beyond the slice, until the call is given up and made again."""
GRACE_S = 5.0
"""Beyond the time that the asker has, for the answer to come: at its very end the owner says that there was nothing."""
SLOWEST_BYTES_PER_S = 5_000_000
LARGE_BYTES = 64 * 1024
LARGE_SLICE_S = 0.2
"""A put of `LARGE_BYTES` that finds no room is answered so soon, and then asks without its items: while they are on
their way they count against what may be in flight to the owner."""
PutQuestion = tuple[int, int, int, list[packed.Packed] | None, float, bool]
"""Handle, number, below, items, wait_s, is_last: see `PutAsked`."""
GetQuestion = tuple[int, int, int, int, int, float]
"""Handle, consumer, number, received, max_items, wait_s: see `GetAsked`."""
_NO_KWARGS: dict[str, Any] = {}


def listens_s(until: float, nbytes: int = 0) -> float:
    """How long somebody who has until then, and sends so much, still listens for an answer."""
    return max(until - time.monotonic(), 0.0) + GRACE_S + nbytes / SLOWEST_BYTES_PER_S


def _open_s(wait_s: float, until: float | None, nbytes: int = 0) -> float:
    """When a question that the owner may keep for `wait_s` is given up, perhaps to be asked again."""
    longest_s = wait_s + MARGIN_S + nbytes / SLOWEST_BYTES_PER_S
    return longest_s if until is None else min(longest_s, listens_s(until, nbytes))


class Site(Protocol):
    """One life of the owner, in which a handle is known. `until` is when the asker's own time is over: soon after that
    the owner is not heard any more, and the question ends in RpcTimeoutError; None: it has time for ever."""

    holder: WorkerIncarnation
    identity: str
    """Of the queue's contents; see `QueueService`."""
    is_durable: bool
    is_here: bool
    """In this very process."""

    def put(self, question: PutQuestion, nbytes: int, until: float | None) -> Any: ...

    def get(self, question: GetQuestion, until: float | None) -> Any: ...

    def tell(self, verb: str, *args: Any, until: float | None = None) -> Any: ...


class RemoteSite:
    """In another worker."""

    is_here = False

    def __init__(
        self, bus: BusEndpoint, queue: str, holder: WorkerIncarnation, identity: str, is_durable: bool
    ) -> None:
        self.holder = holder
        self.identity = identity
        self.is_durable = is_durable
        self._bus = bus
        self._queue = queue
        self._worker = holder.worker
        self._put = method(queue, "put")
        self._get = method(queue, "get")

    def put(self, question: PutQuestion, nbytes: int, until: float | None) -> Future[Any]:
        timeout = _open_s(question[4], until, nbytes)
        return self._bus.call(self._worker, self._put, question, _NO_KWARGS, timeout=timeout)

    def get(self, question: GetQuestion, until: float | None) -> Future[Any]:
        timeout = _open_s(question[5], until)
        return self._bus.call(self._worker, self._get, question, _NO_KWARGS, timeout=timeout)

    def tell(self, verb: str, *args: Any, until: float | None = None) -> Future[Any]:
        timeout = _open_s(0.0, until)
        return self._bus.call(self._worker, method(self._queue, verb), args, _NO_KWARGS, timeout=timeout)


class LocalSite:
    """In this very worker: calls go straight to the service."""

    is_here = True

    def __init__(self, service: QueueService, holder: WorkerIncarnation) -> None:
        self.holder = holder
        self.identity = service.identity
        self.is_durable = service.is_durable
        self._service = service

    def put(self, question: PutQuestion, nbytes: int, until: float | None) -> Any:
        handle, number, below, items, wait_s, is_last = question
        kept = None if items is None else list(map(packed.kept, items))
        return self._service.put(handle, number, below, kept, wait_s, is_last)

    def get(self, question: GetQuestion, until: float | None) -> Any:
        return self._service.get(*question)

    def tell(self, verb: str, *args: Any, until: float | None = None) -> Any:
        return getattr(self._service, verb)(*args)
