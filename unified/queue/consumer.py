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

FINISH_WITHIN_S = 5.0


@dataclass(eq=False, slots=True)
class _ConsumerThread:
    """A consumer: one thread, and only that thread uses it. While it has items the thread keeps it, even if the handle
    is dropped; it is collected when the thread ends."""

    lookup: OwnerLookup
    consumer: int = field(default_factory=partial(secrets.randbits, 62))
    number: int = 0
    """The number of its newest get."""
    received: int = 0
    """The newest get whose items it has seen."""
    unread: int = 0
    """The newest get that brought items."""
    num_items: int = 0
    """The number of items that came with that get."""
    num_done: int = 0
    """The number of those that are done."""

    @property
    def has_unread(self) -> bool:
        """True if its newest get brought items that could not be read."""
        return self.unread == self.number > self.received

    def has(self, num_items: int) -> None:
        """Note that it has these items of its newest get, and is done with those before."""
        self.received, self.num_items, self.num_done = self.number, num_items, 0
        if num_items:
            _thread.holding.add(self)
        else:
            _thread.holding.discard(self)

    def end(self) -> None:
        """Tell the owner that its thread will take no more, and is done with what it took."""
        _thread.holding.discard(self)
        lookup, self.number = self.lookup, 0
        if lookup.endpoint is not None:
            with suppress(UnifiedError):  # its owner is gone, and with it whatever there is to tell
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
    """End the consumers of the worker's entry point, which has returned, and of threads that have ended before."""
    for consumer in list(_thread.holding):
        consumer.end()
    CLEANUP.flush(FINISH_WITHIN_S)


class QueueConsumer:
    """Takes items for each thread, and says which are done."""

    def __init__(self, lookup: OwnerLookup) -> None:
        self._lookup = lookup
        self._local = threading.local()
        self._missed_since = 0.0
        """The time when an owner was first looked for, or asked, in vain; 0 once one answers."""

    def take(self, max_items: int, timeout_s: float | None) -> list[Any]:
        """Take up to `max_items`, as soon as there is one; none if there is none in time. What this thread took before
        is done. Errors are those of `DataQueue.get`."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        consumer = self._consumer()
        before = consumer.number, consumer.num_items, consumer.num_done
        consumer.number += 1
        consumer.num_items = consumer.num_done = 0
        try:
            items, is_only = self._take(consumer, max_items, until)
        except (QueueError, RpcError):
            raise
        except BaseException:  # an interrupt: the answer may be on its way, and nobody waits for it
            if (endpoint := self._lookup.endpoint) is not None:
                endpoint.tell("give_back", self._lookup.handle, consumer.consumer, consumer.number, consumer.received)
            raise
        if items is None:  # it may have handed out items that never came: this take is asked again under its number
            consumer.number, consumer.num_items, consumer.num_done = before
            return []
        consumer.unread = consumer.number
        values = [unpack(item, is_only=is_only) for item in items]
        consumer.has(len(items))
        return values

    def done(self, count: int | None) -> None:
        """Say that this thread is done with the next `count` items of its last take; None: with all, read or not."""
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
        """Give back what is left of this thread's last take: it goes to the front."""
        consumer = self._consumer()
        if consumer.num_done < consumer.num_items or consumer.has_unread:
            self.ask("give_back", self._lookup.handle, consumer.consumer, consumer.number, consumer.number - 1)
            consumer.has(0)

    def ask(self, verb: str, *args: Any) -> Any:
        """Ask the owner, again until it answers; QueueNotFoundError after as long as one waits for an owner."""
        lookup = self._lookup
        lookup.check_process()
        num_failed = 0
        asked, until = None, 0.0
        while True:
            endpoint = lookup.endpoint or lookup.attach()
            if endpoint is not asked:  # each incarnation has the whole time
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
        """Return items, and whether nobody else here has them; no list if time is over and the owner was not heard."""
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
                answer = Outcome.WAITING  # not the future, which has the error, whose traceback has this frame
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
            if answer == Outcome.UNKNOWN:
                lookup.detach(endpoint)
            elif until is not None and time.monotonic() >= until:
                if is_heard:
                    return [], True
                if self._is_missed(asked_at) and lookup.endpoint is endpoint:
                    raise lookup.silent(endpoint.holder)
                return None, True

    def _found(self, until: float | None) -> OwnerEndpoint | None:
        """Return the owner; None if this take's own time is over, and there may yet be one."""
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
        """Return whether the owner, asked in vain from `since` on, had been missed for `owner_timeout_s`."""
        self._missed_since = self._missed_since or since
        return since - self._missed_since >= self._lookup.owner_timeout_s

    def _consumer(self) -> _ConsumerThread:
        self._lookup.check_process()
        try:
            consumer: _ConsumerThread = self._local.consumer
        except AttributeError:
            consumer = self._local.consumer = _ConsumerThread(self._lookup)
        return consumer
