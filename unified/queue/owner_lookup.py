"""Owner lookup: finds a queue's owner by name, waits for one, and notices when its incarnation ends.

An owner endpoint is the owner as others call it: another worker over the bus, or this process itself.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from random import SystemRandom
from typing import Any, Protocol
from weakref import ref

from unified.bus.endpoint import BusEndpoint
from unified.core.backoff import Backoff
from unified.errors import (
    QueueClosedError,
    QueueError,
    QueueLostError,
    QueueNotFoundError,
    RemoteError,
    RpcError,
    RpcNotFoundError,
    RpcTimeoutError,
    UsageError,
    WorkerDiedError,
)
from unified.protocol.records import WorkerIncarnation
from unified.queue import items as packed
from unified.queue.cleanup import CLEANUP, Gone
from unified.queue.server import QueueService, claimed_name, host_of, method
from unified.worker.context import Worker

SLICE_S = 20.0
"""The longest time that the owner holds a request; then it answers, if only that there is nothing yet. So a request
whose answer was lost is sent again, and nobody waits on a call that the owner has forgotten."""
MARGIN_S = 40.0
"""Seconds beyond the slice until the call is given up and made again."""
GRACE_S = 5.0
"""Seconds beyond the caller's time in which an answer may still come: the owner says only at the very end of that time
that there was nothing."""
SLOWEST_BYTES_PER_S = 5_000_000
LARGE_BYTES = 64 * 1024
LARGE_SLICE_S = 0.2
"""The slice of a put of more than `LARGE_BYTES`; its later requests carry no items. While a call is open, its items
count against what may be in flight to the owner."""
PutQuestion = tuple[int, int, int, list[packed.Packed] | None, float, bool]
"""Handle, number, below, items, wait_s, is_last: see `PutAsked`."""
GetQuestion = tuple[int, int, int, int, int, float]
"""Handle, consumer, number, received, max_items, wait_s: see `GetAsked`."""
_NO_KWARGS: dict[str, Any] = {}
logger = logging.getLogger(__name__)
AGAIN = Backoff(first_s=0.01, limit_s=1.0, num_free=1)
ATTACH_WITHIN_S = 10.0


def listens_s(until: float, nbytes: int = 0) -> float:
    """Return for how many seconds to wait for an answer, if `nbytes` are sent and the caller's time ends at `until`."""
    return max(until - time.monotonic(), 0.0) + GRACE_S + nbytes / SLOWEST_BYTES_PER_S


def result_of(answer: Future[Any], until: float | None = None, nbytes: int = 0) -> Any:
    """Wait for the answer to a request, for as long as `listens_s` says."""
    try:
        return answer.result(None if until is None else listens_s(until, nbytes))
    finally:
        del answer  # breaks a cycle: future, error, traceback, this frame


def _open_s(wait_s: float, until: float | None, nbytes: int = 0) -> float:
    """Return the seconds until a request that the owner may hold for `wait_s` is given up, perhaps to be sent again."""
    longest_s = wait_s + MARGIN_S + nbytes / SLOWEST_BYTES_PER_S
    return longest_s if until is None else min(longest_s, listens_s(until, nbytes))


class OwnerEndpoint(Protocol):
    """One incarnation of the owner, in which a handle is known. `until` is the end of the caller's own time: soon after
    that a request without an answer ends in RpcTimeoutError. None: the time has no end."""

    holder: WorkerIncarnation
    identity: str
    """The identity of the queue's contents; see `QueueService`."""
    is_durable: bool
    is_here: bool
    """True if the owner is this process itself."""

    def put(self, question: PutQuestion, nbytes: int, until: float | None) -> Any: ...

    def get(self, question: GetQuestion, until: float | None) -> Any: ...

    def tell(self, verb: str, *args: Any, until: float | None = None) -> Any: ...


class RemoteOwner:
    is_here = False

    def __init__(
        self, bus: BusEndpoint, queue: str, holder: WorkerIncarnation, identity: str, is_durable: bool
    ) -> None:
        self.holder = holder
        self.identity = identity
        self.is_durable = is_durable
        self._bus = bus
        self._queue = queue
        self._put = method(queue, "put")
        self._get = method(queue, "get")

    def put(self, question: PutQuestion, nbytes: int, until: float | None) -> Future[Any]:
        return self._call(self._put, question, _open_s(question[4], until, nbytes))

    def get(self, question: GetQuestion, until: float | None) -> Future[Any]:
        return self._call(self._get, question, _open_s(question[5], until))

    def tell(self, verb: str, *args: Any, until: float | None = None) -> Future[Any]:
        return self._call(method(self._queue, verb), args, _open_s(0.0, until))

    def _call(self, name: str, args: Sequence[Any], timeout: float) -> Future[Any]:
        """Ask this incarnation, and no later one."""
        worker, incarnation = self.holder
        return self._bus.call(worker, name, args, _NO_KWARGS, timeout=timeout, incarnation=incarnation)


class LocalOwner:
    """An owner in this worker itself: calls go straight to the service."""

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


class OwnerLookup:
    """The connection of one `DataQueue` object to its queue's owner, across the owner's incarnations.

    Attributes:
        handle: the number by which the owner knows the object.
        endpoint: the owner's incarnation in which the handle is known; None: `attach` has to find it.
    """

    def __init__(self, worker: Worker, queue: str, owner_timeout_s: float) -> None:
        self.handle = secrets.randbits(62)
        self.endpoint: OwnerEndpoint | None = None
        self.worker = worker
        self.queue = queue
        self.owner_timeout_s = owner_timeout_s
        self._name = claimed_name(queue)
        self._pid = os.getpid()
        self._last: OwnerEndpoint | None = None
        """The newest endpoint that was attached to."""
        self._loss = ""
        """The reason why the queue's items are gone, or were all taken."""
        self._was_finished = False
        self._attaching = threading.Lock()
        self._watch()

    def check_process(self) -> None:
        """Raise UsageError in a process that was forked from the worker: its puts would go nowhere."""
        if self._pid != os.getpid():
            raise UsageError(
                f"queue {self.queue!r} was opened in process {self._pid}: this one ({os.getpid()}) was forked from it "
                "and cannot use it. Put and get in the worker itself, and hand items to its children."
            )

    def attach(self, until: float | None = None) -> OwnerEndpoint:
        """Return the endpoint; wait for one, until the time `until` or for `owner_timeout_s`.

        Raises:
            QueueNotFoundError: there is none in time, or it did not answer.
            QueueLostError, QueueClosedError: the queue that this object used is gone; or was drained and replaced.
        """
        begun = time.monotonic()
        if not self._attaching.acquire(timeout=self._left_s(begun, until)):
            raise self.not_found(begun)
        try:
            return self._attach(begun, until)
        finally:
            self._attaching.release()

    def end_consumer(self, consumer: int, received: int, noticed_at: float) -> Any:
        """Tell the owner that a consumer will take no more; return its answer, or a future of it.

        Raises:
            QueueNotFoundError: the owner of a durable queue may come back, for `owner_timeout_s` from `noticed_at` on.
        """
        endpoint, last = self.endpoint, self._last
        may_return = last is not None and last.is_durable and not self._loss
        if endpoint is None and may_return and time.monotonic() - noticed_at < self.owner_timeout_s:
            endpoint = self.attach(until=0.0)
        return None if endpoint is None else endpoint.tell("end", self.handle, consumer, received)

    def detach(self, endpoint: OwnerEndpoint) -> None:
        """Forget the endpoint: it does not know the handle, or no longer."""
        if self.endpoint is endpoint:
            self.endpoint = None

    def failed(self, endpoint: OwnerEndpoint, error: RpcError) -> None:
        """Return if a request that ended in this error is to be sent again; otherwise raise the error."""
        if isinstance(error, RemoteError):
            raise error
        if isinstance(error, WorkerDiedError | RpcNotFoundError):
            self._end(endpoint)
            return
        if isinstance(error, RpcTimeoutError):
            logger.warning("event=queue-owner-silent queue=%s reason=%r: asked again", self.queue, str(error))
        elif not error.retryable:
            raise error

    def silent(self, holder: WorkerIncarnation, consequence: str = "") -> QueueNotFoundError:
        """Return the error for an owner that is alive but did not answer in the caller's time."""
        owner, we = holder.worker, self.worker.bus.worker
        return QueueNotFoundError(
            f"worker {owner}, which owns queue {self.queue!r}, is alive but did not answer worker {we} in time: it is "
            "stopped, something in it holds the interpreter (the GIL), its journal's disk hangs, or the "
            f"network drops its messages. {consequence}`unified explain {owner}` says more."
        )

    def pause(self, num_failed: int, until: float | None = None) -> None:
        """Sleep before the next request, after `num_failed` failures."""
        delay_s = AGAIN.delay_s(num_failed - 1, SystemRandom())
        time.sleep(delay_s if until is None else max(min(delay_s, until - time.monotonic()), 0.0))

    def _attach(self, begun: float, until: float | None) -> OwnerEndpoint:
        num_failed = 0
        while (endpoint := self.endpoint) is None:
            if self._loss:
                raise self._lost()
            holder = self._holder(begun, until)
            try:
                self._attach_to(holder, self._left_s(begun, until))
            except RemoteError:
                raise
            except RpcError as error:  # the owner has the name but not yet the queue, or has just died
                if not (error.retryable or isinstance(error, RpcNotFoundError | RpcTimeoutError)):
                    raise
                num_failed += 1
                if self._left_s(begun, until) <= 0:
                    raise self.not_found(begun) from error
                self.pause(num_failed, until)
        return endpoint

    def _holder(self, begun: float, until: float | None) -> WorkerIncarnation:
        """Return the worker that owns the queue's name; if there is none, wait for one while time is left."""
        while (holder := self.worker.names.holder(self._name)) is None:
            left_s = self._left_s(begun, until)
            if left_s <= 0:
                raise self.not_found(begun)
            with suppress(RpcTimeoutError):
                self.worker.names.find(self._name, left_s)
        return holder

    def _attach_to(self, holder: WorkerIncarnation, left_s: float) -> None:
        worker = self.worker
        name, incarnation = worker.bus.worker, worker.bus.incarnation
        endpoint: OwnerEndpoint
        timeout = max(min(left_s, ATTACH_WITHIN_S), 1.0)
        if holder == (name, incarnation):
            service = host_of(worker.bus).find(self.queue)
            if service is None:
                raise RpcNotFoundError(f"queue {self.queue!r} is about to be made.")
            answer = service.attach(self.handle, name, incarnation)
            identity, is_durable, is_known = answer.result(timeout) if service.is_durable else answer
            endpoint = LocalOwner(service, holder)
        else:
            question = (self.handle, name, incarnation)
            # Not kept in a variable: see `result_of`.
            identity, is_durable, is_known = worker.bus.call(
                holder.worker,
                method(self.queue, "attach"),
                question,
                {},
                timeout=timeout,
                incarnation=holder.number,
            ).result()
            endpoint = RemoteOwner(worker.bus, self.queue, holder, identity, is_durable)
        if not is_known:
            self._loss = (
                f"this worker's incarnation {incarnation} was declared dead, and what it had taken was given to others"
            )
        elif self._last is not None and self._last.identity != identity:
            self._was_finished = endpoint.holder == self._last.holder
            self._loss = self._why_another(self._last, endpoint)
        else:
            CLEANUP.start()
            self._last = self.endpoint = endpoint
            if worker.names.holder(self._name) != holder:  # it ended before `_watch` could see it
                self._end(endpoint)

    def _watch(self) -> None:
        """Listen for changes of the owner, until this object is collected."""
        lookup, watched = ref(self), self._name

        def on_change(name: str, holder: WorkerIncarnation | None) -> None:
            if name != watched:
                return
            found = lookup()
            if found is None:
                stop()
            elif found.endpoint is not None and found.endpoint.holder != holder:
                found._end(found.endpoint)

        stop = self.worker.names.on_change(on_change)

    def _end(self, endpoint: OwnerEndpoint) -> None:
        self.detach(endpoint)
        if not endpoint.is_durable and not self._loss:
            holder, entry = endpoint.holder, self.worker.bus.directory.get(endpoint.holder.worker)
            is_it = entry is not None and entry.incarnation == holder.number and bool(entry.reason)
            reason = f" ({entry.reason})" if is_it and entry is not None else ""
            owner = f"incarnation {holder.number} of its owner, worker {holder.worker}"
            self._loss = f"{owner}, ended{reason}, and what was in it is gone"

    def _lost(self) -> QueueError:
        if self._was_finished:
            return QueueClosedError(
                f"queue {self.queue!r}, as worker {self.worker.bus.worker} knew it, was closed and drained, and its "
                "owner has made another one of that name: a new DataQueue object uses that one."
            )
        holder = self.worker.names.holder(self._name)
        if holder is not None and (self._last is None or holder != self._last.holder):
            advice = f"Worker {holder.worker} has made the queue anew: a new DataQueue object uses that one."
        else:
            advice = (
                "Once the queue is created again, a new DataQueue object can use it. With durable=True its items "
                "outlive the owner."
            )
        return QueueLostError(
            f"queue {self.queue!r} is lost to worker {self.worker.bus.worker}: {self._loss}. {advice}"
        )

    def _why_another(self, last: OwnerEndpoint, endpoint: OwnerEndpoint) -> str:
        if self._was_finished:
            return "it was closed, and another one was made"
        if last.is_durable:
            holder = endpoint.holder
            node = self.worker.bus.directory.node(holder.worker)
            where = f"worker {holder.worker}{f' on node {node}' if node else ''}"
            return (
                f"it went on in incarnation {holder.number} of {where} without its journal; a journal on one node's "
                "disk cannot be found from another: give the queue a path= on a disk that both see"
            )
        return f"incarnation {last.holder.number} of its owner, worker {last.holder.worker}, ended, and it is made anew"

    def _left_s(self, begun: float, until: float | None) -> float:
        """Return how long to go on waiting; `owner_timeout_s` does not run while a durable queue's owner may return."""
        now = time.monotonic()
        left_s = begun + self.owner_timeout_s - now
        last = self._last
        if last is not None and last.is_durable and not self.worker.bus.directory.is_ended(last.holder.worker):
            left_s = self.owner_timeout_s
        return max(left_s if until is None else min(left_s, until - now), 0.0)

    def not_found(self, begun: float) -> QueueNotFoundError:
        """Return the error for a caller that has waited for an owner since `begun`."""
        holder = self.worker.names.holder(self._name)
        if holder is not None:
            return self.silent(holder)
        waited = f"worker {self.worker.bus.worker} waited {time.monotonic() - begun:.3g} s for queue {self.queue!r}"
        last = self._last
        if last is None:
            return QueueNotFoundError(
                f"{waited}, and no worker of the job has made it: one has to call DataQueue({self.queue!r}, "
                "is_master=True). See whether that worker is running (`unified status`), and whether both spell the "
                "name alike."
            )
        owner = last.holder.worker
        return QueueNotFoundError(
            f"{waited} to come back: incarnation {last.holder.number} of its owner, worker {owner}, ended, and no next "
            f"one has made it again. `unified explain {owner}` says more."
        )

    def __del__(self) -> None:
        endpoint = getattr(self, "endpoint", None)
        if endpoint is not None:
            CLEANUP.notify(Gone.HANDLE, partial(endpoint.tell, "leave", self.handle))
