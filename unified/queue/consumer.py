"""The consuming end of a handle: one consumer for each thread that takes through it."""

from __future__ import annotations

import secrets
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from unified.errors import QueueClosedError, QueueError, QueueNotFoundError, RpcError, UnifiedError, UsageError
from unified.queue.cleanup import CLEANUP, Gone
from unified.queue.core.messages import Outcome
from unified.queue.items import Packed, unpack
from unified.queue.owner_lookup import SLICE_S, OwnerEndpoint, OwnerLookup, result_of
from unified.threads import OwnedLock
from unified.worker.progress import QUEUE_USES, QueueWaits

FINISH_WITHIN_S = 5.0


@dataclass(eq=False, slots=True)
class _ConsumerThread:
    """A consumer, used by its own thread only. While it has items the thread keeps it, even if the handle is dropped.
    It is collected when the thread ends."""

    lookup: OwnerLookup
    waits: QueueWaits = field(default_factory=lambda: QUEUE_USES[threading.current_thread()])
    consumer: int = field(default_factory=partial(secrets.randbits, 62))
    lock: OwnedLock = field(default_factory=OwnedLock)  # a signal handler must not take meanwhile
    number: int = 0
    """The number of its newest get."""
    received: int = 0
    """The newest get whose items it has seen."""
    unread: int = 0
    """The newest get that brought items."""
    num_items: int = 0
    """The number of items that came with that get."""
    num_done: int = 0
    """The number of these items that are done."""

    @property
    def has_unread(self) -> bool:
        """True if its newest get brought items that could not be read."""
        return self.unread == self.number > self.received

    def has(self, num_items: int) -> None:
        """Note that its newest get brought `num_items`, and that earlier items are done."""
        self.received, self.num_items, self.num_done = self.number, num_items, 0
        if num_items:
            _thread.holding.add(self)
        else:
            _thread.holding.discard(self)

    def end(self) -> None:
        """Tell the owner that the thread takes no more, and is done with its items."""
        _thread.holding.discard(self)
        lookup, self.number = self.lookup, 0
        if lookup.endpoint is not None:
            with suppress(UnifiedError):  # the owner is gone: there is nobody to tell
                ended = lookup.endpoint.tell("end", lookup.handle, self.consumer, self.received)
                if isinstance(ended, Future):
                    ended.result(FINISH_WITHIN_S)

    def __del__(self) -> None:
        if self.number:
            end = partial(self.lookup.end_consumer, self.consumer, self.received, time.monotonic())
            CLEANUP.notify(Gone.CONSUMER, end)


class _ThreadState(threading.local):
    """The consumers of each thread that have items on lease."""

    def __init__(self) -> None:
        self.holding: set[_ConsumerThread] = set()


_thread = _ThreadState()


def end_main_thread() -> None:
    """End the consumers of this thread, whose entry point has returned, and of threads that ended before."""
    for consumer in list(_thread.holding):
        consumer.end()
    QUEUE_USES[threading.current_thread()].clear()
    CLEANUP.flush(FINISH_WITHIN_S)


class QueueConsumer:
    """Takes items for each thread, and says which are done."""

    def __init__(self, lookup: OwnerLookup) -> None:
        self._lookup = lookup
        self._local = threading.local()
        self._missed_since = 0.0
        """The time of the first failed search for an owner, or failed request to one; 0 once an owner answers."""

    def take(self, max_items: int, timeout_s: float | None) -> list[Any]:
        """Take up to `max_items`, as soon as there is one; an empty list if there is none in time. Items that this
        thread took before are done. Errors are those of `DataQueue.get`."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        consumer = self._consumer()
        consumer.lock.check()
        before = consumer.number, consumer.num_items, consumer.num_done
        consumer.number += 1
        consumer.num_items = consumer.num_done = 0
        try:
            with consumer.lock:
                items, is_only = self._take(consumer, max_items, until)
        except (QueueError, RpcError):
            raise
        except BaseException:  # an interrupt: the answer may be on its way, and nobody waits for it
            if (endpoint := self._lookup.endpoint) is not None:
                endpoint.tell("give_back", self._lookup.handle, consumer.consumer, consumer.number, consumer.received)
            raise
        finally:
            consumer.waits["gets", self._lookup.queue] = 0
        if items is None:  # the owner may have handed out items that never came: the next take uses the number again
            consumer.number, consumer.num_items, consumer.num_done = before
            return []
        consumer.unread = consumer.number
        values = [unpack(item, is_only=is_only) for item in items]
        consumer.has(len(items))
        return values

    def done(self, count: int | None) -> None:
        """Mark the next `count` items of this thread's last take as done; None: all, read or not."""
        consumer = self._consumer()
        left = consumer.num_items - consumer.num_done
        if count is not None and not 0 <= count <= left:
            raise UsageError(
                f"task_done({count}): this thread has {left} items of queue {self._lookup.queue!r} that are not done."
            )
        if not left and not consumer.has_unread:
            return
        num_done = consumer.num_items if count is None else consumer.num_done + count
        is_all = num_done == consumer.num_items
        count = None if is_all else num_done
        self.ask("done", self._lookup.handle, consumer.consumer, consumer.number, count)
        if is_all:
            consumer.has(0)
        consumer.num_done = num_done

    def give_back(self) -> None:
        """Give back the items of this thread's last take that are not done: they go to the front."""
        consumer = self._consumer()
        if consumer.num_done < consumer.num_items or consumer.has_unread:
            self.ask("give_back", self._lookup.handle, consumer.consumer, consumer.number, consumer.number - 1)
            consumer.has(0)

    def ask(self, verb: str, *args: Any) -> Any:
        """Ask the owner, again until it answers; QueueNotFoundError after `owner_timeout_s`."""
        lookup = self._lookup
        lookup.check_process()
        num_failed = 0
        asked, until = None, 0.0
        while True:
            endpoint = lookup.endpoint or lookup.attach()
            if endpoint is not asked:  # each incarnation gets the whole time
                asked, until = endpoint, time.monotonic() + lookup.owner_timeout_s
            try:
                answer = endpoint.tell(verb, *args, until=until)
                return result_of(answer, until) if isinstance(answer, Future) else answer
            except RpcError as error:
                answer = None
                lookup.failed(endpoint, error)
                if lookup.endpoint is endpoint and time.monotonic() >= until:
                    raise lookup.silent(endpoint.holder, f"It may have heard {verb!r} all the same. ") from error
            num_failed += 1
            lookup.pause(num_failed, until)

    def _take(self, consumer: _ConsumerThread, max_items: int, until: float | None) -> tuple[list[Packed] | None, bool]:
        """Return items, and whether nobody else in this process has them. None: time is over without an answer."""
        lookup = self._lookup
        num_failed = 0
        while True:
            endpoint = lookup.endpoint
            if endpoint is None:
                endpoint = self._found(until)
                if endpoint is None:
                    return None, True
            is_heard = True
            asked_at = time.monotonic()
            wait_s = SLICE_S if until is None else max(min(until - asked_at, SLICE_S), 0.0)
            try:
                question = lookup.handle, consumer.consumer, consumer.number, consumer.received, max_items, wait_s
                answer = endpoint.get(question, until)
                if isinstance(answer, Future):
                    answer = result_of(answer, until)
            except RpcError as error:
                answer = Outcome.WAITING  # breaks a cycle: future, error, traceback, this frame
                is_heard = False
                lookup.failed(endpoint, error)
                num_failed += 1
                lookup.pause(num_failed, until)
            if is_heard:
                self._missed_since = 0.0
            if type(answer) is list:
                return answer, not endpoint.is_here
            if answer == Outcome.CLOSED:
                raise QueueClosedError(
                    f"queue {lookup.queue!r} is closed, and all that was in it has been taken: nothing more will come."
                )
            consumer.waits["gets", lookup.queue] += is_heard and answer == Outcome.WAITING
            if answer == Outcome.UNKNOWN:
                lookup.detach(endpoint)
            elif until is not None and time.monotonic() >= until:
                if is_heard:
                    return [], True
                if self._is_missed(asked_at) and lookup.endpoint is endpoint:
                    raise lookup.silent(endpoint.holder)
                return None, True

    def _found(self, until: float | None) -> OwnerEndpoint | None:
        """Return the owner; None if this take's own time is over, but an owner may still come."""
        begun = time.monotonic()
        is_missed = self._is_missed(begun)
        try:
            return self._lookup.attach(until)
        except QueueNotFoundError:
            is_own_time_over = until is not None and time.monotonic() >= until
            if not is_own_time_over or is_missed:
                raise
            return None

    def _is_missed(self, since: float) -> bool:
        """Return whether no owner had answered for `owner_timeout_s` before a failed request at `since`."""
        self._missed_since = self._missed_since or since
        return since - self._missed_since >= self._lookup.owner_timeout_s

    def _consumer(self) -> _ConsumerThread:
        self._lookup.check_process()
        try:
            consumer: _ConsumerThread = self._local.consumer
        except AttributeError:
            consumer = self._local.consumer = _ConsumerThread(self._lookup)
        return consumer
