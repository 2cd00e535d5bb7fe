"""The producing end of a handle. Each put goes in once: it is sent again when an answer is lost, or when the next
incarnation of a durable queue's owner comes.

Normally a put goes straight to the owner. A put that fails on the way is *parked*, and later puts are parked behind it.
A helper thread, which runs only while puts are parked, sends them again in their order. When the owner's incarnation
ends, all puts on their way to it are parked before anything goes to the next incarnation.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec

from unified.bus.calls.future import RpcFuture
from unified.errors import (
    QueueClosedError,
    QueueError,
    QueueFullError,
    QueueNotFoundError,
    RpcError,
    RpcTimeoutError,
)
from unified.queue.core.messages import Outcome
from unified.queue.items import Packed, nbytes
from unified.queue.owner_lookup import (
    LARGE_BYTES,
    LARGE_SLICE_S,
    SLICE_S,
    OwnerEndpoint,
    OwnerLookup,
    listens_s,
    result_of,
)
from unified.threads import OwnedLock, call_guarded, start_thread
from unified.worker.progress import QUEUE_USES, QueueWaits

_WAITING = int(Outcome.WAITING)


class _Put(msgspec.Struct, eq=False):
    number: int
    items: list[Packed]
    nbytes: int
    until: float | None
    is_there: bool = False
    """True if the owner has the items: requests are sent without them."""
    num_failed: int = 0
    endpoint: OwnerEndpoint | None = None
    """The endpoint that was asked last; None: none was asked yet, or the put is parked."""
    future: RpcFuture[None] | None = None
    """The future of a `put_async`, or of a `put` that was parked."""
    waits: QueueWaits | None = None  # of the thread of a `put`


class QueueProducer:
    """Puts of one handle, in the order of their numbers."""

    def __init__(self, lookup: OwnerLookup) -> None:
        self._lookup = lookup
        self._next = 0
        self._open: OrderedDict[int, _Put] = OrderedDict()
        self._parked: dict[int, _Put] = {}
        self._lock = OwnedLock()
        self._changed = threading.Condition(self._lock)
        self._helper: threading.Thread | None = None
        self._settled: OwnerEndpoint | None = None
        """No request is open at any other endpoint."""

    def put(self, items: list[Packed], timeout_s: float | None) -> None:
        """Put all of the items in; return when the last one is in. Errors are those of `DataQueue.put`."""
        put = self._begin(items, timeout_s)
        waits = put.waits = QUEUE_USES[threading.current_thread()]
        waits["puts", self._lookup.queue] = -(put.nbytes > LARGE_BYTES)  # whose first slice is short
        try:
            if not self._put_straight(put):
                self._await_parked(put, time.monotonic())
        except BaseException:
            self._forget(put)
            raise
        finally:
            waits["puts", self._lookup.queue] = 0

    def put_async(self, items: list[Packed]) -> RpcFuture[None]:
        """Put items in without waiting. The items must not be changed before the future has ended."""
        put = self._begin(items, None)
        QUEUE_USES[threading.current_thread()]["puts", self._lookup.queue] = 0
        future = self._promised(put)
        endpoint = self._straight_to(put)
        if endpoint is None:
            self._park(put)
            return future
        try:
            answer = self._ask(put, endpoint)
        except RpcError as error:
            self._failed(put, endpoint, error)
            return future
        except BaseException:
            self._forget(put)
            raise
        if isinstance(answer, Future):
            future.parts = [answer]  # a thread that waits for the future receives the answer itself
        self._expect(put, endpoint, answer)
        return future

    def _begin(self, items: list[Packed], timeout_s: float | None) -> _Put:
        self._lookup.check_process()
        self._lock.check()
        until = None if timeout_s is None else time.monotonic() + timeout_s
        size = 0
        for item in items:
            size += len(item) if type(item) is bytes else nbytes(item)
        with self._lock:
            put = self._open[self._next] = _Put(self._next, items, size, until)
            self._next += 1
        return put

    def _forget(self, put: _Put) -> None:
        with self._lock:
            self._open.pop(put.number, None)
            self._parked.pop(put.number, None)
            if self._helper is not None:
                self._changed.notify()

    def _straight_to(self, put: _Put) -> OwnerEndpoint | None:
        """Return the endpoint to which a put may go at once; None: there is no owner, or other puts go first."""
        endpoint = self._lookup.endpoint
        if endpoint is None or self._parked:
            return None
        if endpoint is not self._settled:
            with self._lock:
                if not self._is_first(put, endpoint):
                    return None
        return endpoint

    def _is_first(self, put: _Put, endpoint: OwnerEndpoint) -> bool:
        """Return whether no earlier put is open at another endpoint: it might still have to be parked. The lock is
        held."""
        if endpoint is self._settled:
            return True
        elsewhere = (each.number for each in self._open.values() if each.endpoint not in (None, endpoint))
        first = next(elsewhere, None)
        if first is None:
            self._settled = endpoint
        return first is None or first > put.number

    def _put_straight(self, put: _Put) -> bool:
        """Send a put and wait for its answers; return False if it has to be parked."""
        endpoint = self._straight_to(put)
        if endpoint is None:
            return False
        try:
            while True:
                answer = self._ask(put, endpoint)
                if isinstance(answer, Future):
                    answer = result_of(answer, put.until, put.nbytes)
                if answer is None:
                    self._forget(put)
                    return True
                if answer[0] != _WAITING:
                    break
                put.is_there = True
        except RpcError as error:
            answer = None  # breaks a cycle: future, error, traceback, this frame
            self._not_heard(put, endpoint, error)
            return False
        if (refusal := self._refusal(put, answer)) is not None:
            raise refusal
        self._lookup.detach(endpoint)
        put.is_there = False
        return False

    def _ask(self, put: _Put, endpoint: OwnerEndpoint) -> Any:
        """Return the owner's answer, or a future of it. A put that was given up is not sent."""
        with self._lock:
            if put.number not in self._open:
                return [_WAITING, 0]
            below = next(iter(self._open))
            put.endpoint = endpoint
        if put.is_there and put.waits is not None:
            put.waits["puts", self._lookup.queue] += 1
        items, size = (None, 0) if put.is_there else (put.items, put.nbytes)
        wait_s = LARGE_SLICE_S if size > LARGE_BYTES else SLICE_S
        is_last = False
        if put.until is not None:
            left_s = max(put.until - time.monotonic(), 0.0)
            is_last = left_s <= wait_s
            wait_s = min(wait_s, left_s)
        return endpoint.put((self._lookup.handle, put.number, below, items, wait_s, is_last), size, put.until)

    def _not_heard(self, put: _Put, endpoint: OwnerEndpoint, error: RpcError) -> None:
        """Return if a request without an answer is to be sent again; otherwise raise the put's error."""
        lookup = self._lookup
        lookup.failed(endpoint, error)
        if lookup.endpoint is endpoint and put.until is not None and time.monotonic() >= put.until:
            raise self._silent(endpoint) from error
        put.is_there = False
        put.num_failed += 1

    def _silent(self, endpoint: OwnerEndpoint) -> QueueNotFoundError:
        return self._lookup.silent(endpoint.holder, "The items may be in the queue, or may still go in. ")

    def _refusal(self, put: _Put, answer: list[int]) -> QueueError | None:
        """Return the error for an answer other than DONE; None: the put has to be sent again."""
        outcome, num_in = answer
        if outcome == Outcome.FULL:
            return QueueFullError(
                f"queue {self._lookup.queue!r} had no room in time: {num_in} of {len(put.items)} items went in. Its "
                "consumers are slower than its producers; see its stats().",
                num_in,
            )
        if outcome == Outcome.CLOSED:
            return QueueClosedError(
                f"queue {self._lookup.queue!r} is closed: {num_in} of {len(put.items)} items went in before.", num_in
            )
        return None

    # Puts that have a future

    def _promised(self, put: _Put) -> RpcFuture[None]:
        put.future = RpcFuture(
            f"a put of {len(put.items)} items to queue {self._lookup.queue!r}",
            host=self._lookup.worker.bus,
            on_cancel=partial(self._forget, put),
        )
        return put.future

    def _await_parked(self, put: _Put, begun: float) -> None:
        """Park a put, and wait until it has ended; at most for its own time, even if puts before it have more."""
        future = self._promised(put)
        self._park(put)
        try:
            future.result(None if put.until is None else listens_s(put.until, put.nbytes))
        except RpcTimeoutError as error:  # not of a call: after that a put is sent again
            endpoint = self._lookup.endpoint
            raise self._lookup.not_found(begun) if endpoint is None else self._silent(endpoint) from error

    def _expect(self, put: _Put, endpoint: OwnerEndpoint, answer: Any) -> None:
        if isinstance(answer, Future):
            callback = partial(self._on_answer, put, endpoint)
            if isinstance(answer, RpcFuture):
                answer.on_end(callback)
                answer.be_received(at_once=False)  # the call may share a write with others
            else:
                answer.add_done_callback(callback)
        else:
            self._on_content(put, endpoint, answer)

    def _on_answer(self, put: _Put, endpoint: OwnerEndpoint, answer: Future[Any]) -> None:
        """Take an answer, on any thread: nothing here waits."""
        error = answer.exception()
        if error is not None:
            self._failed(put, endpoint, error)
        else:
            self._on_content(put, endpoint, answer.result())

    def _on_content(self, put: _Put, endpoint: OwnerEndpoint, answer: list[int] | None) -> None:
        if answer is None:
            self._end(put, None)
        elif answer[0] == _WAITING:
            if put.number not in self._open:  # given up: `_ask` would answer WAITING at once, again and again
                return
            put.is_there = True
            try:
                self._expect(put, endpoint, self._ask(put, endpoint))
            except Exception as error:
                self._failed(put, endpoint, error)
        elif (refusal := self._refusal(put, answer)) is not None:
            self._end(put, refusal)
        else:
            self._lookup.detach(endpoint)
            self._park(put)

    def _failed(self, put: _Put, endpoint: OwnerEndpoint, error: BaseException) -> None:
        if not isinstance(error, RpcError):  # from an owner in this process
            self._end(put, error)
            return
        try:
            self._not_heard(put, endpoint, error)
        except (RpcError, QueueError) as final:
            self._end(put, final)
        else:
            self._park(put)

    def _end(self, put: _Put, error: BaseException | None) -> None:
        self._forget(put)
        if put.future is None:
            return
        if error is None:
            put.future.succeed(None)
        else:
            put.future.fail(error)

    def _park(self, put: _Put) -> None:
        put.is_there = False
        try:
            with self._lock:
                if put.number not in self._open:  # given up by its caller
                    return
                put.endpoint = None
                self._parked[put.number] = put
                if self._helper is None:
                    helper = start_thread("queue-puts", self._help)
                    self._helper = helper
                self._changed.notify()
        except RuntimeError as error:  # no thread can be started
            self._end(put, error)

    def _help(self) -> None:
        while True:
            with self._lock:
                if not self._parked:
                    self._helper = None
                    return
                put = self._parked[min(self._parked)]
            call_guarded(f"queue-put-failed queue={self._lookup.queue}", self._send_again, put)

    def _send_again(self, put: _Put) -> None:
        lookup = self._lookup
        if put.num_failed:
            lookup.pause(put.num_failed, put.until)
        try:
            endpoint = lookup.endpoint or lookup.attach(put.until)
        except QueueNotFoundError as error:
            with self._lock:
                parked = list(self._parked.values())
            now = time.monotonic()
            for each in parked:  # no owner came for them either
                if put.until is None or (each.until is not None and each.until <= now):
                    self._end(each, error)
            self._end(put, error)
            return
        except Exception as error:
            self._end(put, error)
            return
        with self._lock:
            if put.number not in self._parked:  # given up meanwhile by its caller
                return
            if endpoint is not self._settled:
                if not self._is_first(put, endpoint):
                    self._changed.wait(LARGE_SLICE_S)
                    return
                if put.number != min(self._parked):  # an earlier put was parked meanwhile
                    return
        try:
            answer = self._ask(put, endpoint)
        except Exception as error:
            self._failed(put, endpoint, error)
            return
        with self._lock:
            self._parked.pop(put.number, None)  # only now: later puts must stay behind it until it was sent
        self._expect(put, endpoint, answer)
