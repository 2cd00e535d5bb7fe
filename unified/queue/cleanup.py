"""Tells owners of threads that have ended and of `DataQueue` objects that nobody holds any more.

Both are noticed when something is collected, which can happen anywhere, even while a lock of the bus is held; so there
it is only written down, and a thread of its own tells the owner.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

from unified.errors import QueueNotFoundError, UnifiedError
from unified.threads import start_thread

logger = logging.getLogger(__name__)
LATER_S = 1.0


class Endpoint(Protocol):
    """The owner of a queue, in the incarnation that knows a handle."""

    def tell(self, verb: str, *args: Any) -> Any: ...


class Lookup(Protocol):
    """The way of one handle to its queue's owner."""

    handle: int
    owner_timeout_s: float

    @property
    def endpoint(self) -> Endpoint | None: ...

    @property
    def may_return(self) -> bool: ...

    def attach(self, until: float | None = None) -> Endpoint: ...


class _ConsumerGone(NamedTuple):
    lookup: Lookup
    consumer: int
    received: int
    noticed_at: float


class _HandleGone(NamedTuple):
    endpoint: Endpoint
    handle: int


_News = _ConsumerGone | _HandleGone | threading.Event


class CleanupNotifications:
    """One for the process."""

    def __init__(self) -> None:
        self._news: SimpleQueue[_News] = SimpleQueue()
        self._later: list[_ConsumerGone] = []
        """Of durable queues whose owner is between two lives."""
        self._told: list[Future[Any]] = []
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def start(self) -> None:
        """Have a thread for what comes, from now on."""
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    thread = start_thread("queue-farewells", self._run)
                    self._thread = thread

    def consumer_gone(self, lookup: Lookup, consumer: int, received: int) -> None:
        """Its thread has ended. Safe wherever a collection may run, as is `handle_gone`."""
        self._news.put(_ConsumerGone(lookup, consumer, received, time.monotonic()))

    def handle_gone(self, endpoint: Endpoint, handle: int) -> None:
        """The object is not used any more."""
        self._news.put(_HandleGone(endpoint, handle))

    def flush(self, timeout_s: float) -> None:
        """Wait until owners have heard of all that was noticed before."""
        if self._thread is not None:
            until = time.monotonic() + timeout_s
            heard = threading.Event()
            self._news.put(heard)
            heard.wait(timeout_s)
            wait(self._told, max(until - time.monotonic(), 0.0))

    def _run(self) -> None:
        while True:
            news = self._gather()
            # An object and its threads may be collected together, in any order: the owner gives back what a handle
            # still has when it goes, so that goes last.
            for each in sorted(news, key=lambda each: isinstance(each, _HandleGone)):
                try:
                    self._tell(each)
                except UnifiedError as error:
                    logger.debug("event=queue-farewell-lost reason=%r", str(error))
                except BaseException:  # SystemExit too: of a callback of somebody whom the owner here told of it
                    logger.exception("event=queue-farewell-failed: the others go on")
            for each in news:
                if isinstance(each, threading.Event):
                    each.set()
            del news, each

    def _gather(self) -> list[_News]:
        news: list[_News] = []
        with suppress(Empty):
            news.append(self._news.get(timeout=LATER_S if self._later else None))
            while True:
                news.append(self._news.get_nowait())
        news += self._later
        self._later = []
        return news

    def _tell(self, news: _News) -> None:
        told: object = None
        match news:
            case _ConsumerGone(lookup, consumer, received, noticed_at):
                endpoint = lookup.endpoint
                if endpoint is None and lookup.may_return and time.monotonic() - noticed_at < lookup.owner_timeout_s:
                    with suppress(QueueNotFoundError):
                        endpoint = lookup.attach(until=0.0)
                    if endpoint is None:
                        self._later.append(news)
                if endpoint is not None:
                    told = endpoint.tell("end", lookup.handle, consumer, received)
            case _HandleGone(endpoint, handle):
                told = endpoint.tell("leave", handle)
        self._told = [each for each in self._told if not each.done()]
        if isinstance(told, Future):
            told.add_done_callback(_ignore)  # it has to leave, though nobody waits for its answer
            self._told.append(told)


def _ignore(told: Future[Any]) -> None:
    told.exception()


CLEANUP = CleanupNotifications()
