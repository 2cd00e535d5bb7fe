"""Cleanup notifications: owners hear of threads that have ended and of `DataQueue` objects that nobody holds.

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
from unified.threads import call_guarded, start_thread

logger = logging.getLogger(__name__)
LATER_S = 1.0


class HandleEndpoint(Protocol):
    """The owner of a queue, in the incarnation that knows a handle."""

    def tell(self, verb: str, *args: Any) -> object: ...


class HandleLookup(Protocol):
    """The way of one handle to its queue's owner."""

    def end_consumer(self, consumer: int, received: int, noticed_at: float) -> object: ...


class _ConsumerGone(NamedTuple):
    lookup: HandleLookup
    consumer: int
    received: int
    noticed_at: float


class _HandleGone(NamedTuple):
    endpoint: HandleEndpoint
    handle: int


_News = _ConsumerGone | _HandleGone | threading.Event
_ORDER = (_ConsumerGone, _HandleGone, threading.Event)
"""An object and its threads may be collected together, in any order: the owner gives back what a handle still has when
it goes, so that goes after the consumers."""


class CleanupNotifications:
    """The queue of notifications of this process, and the thread that sends them."""

    def __init__(self) -> None:
        self._news: SimpleQueue[_News] = SimpleQueue()
        self._later: list[_ConsumerGone] = []
        """Consumers of durable queues whose owner is between two incarnations."""
        self._answers: list[Future[Any]] = []
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = start_thread("queue-cleanup", self._run)

    def consumer_gone(self, lookup: HandleLookup, consumer: int, received: int) -> None:
        """Notify the owner that a consumer's thread has ended. Safe in a finalizer, as `handle_gone` is."""
        self._news.put(_ConsumerGone(lookup, consumer, received, time.monotonic()))

    def handle_gone(self, endpoint: HandleEndpoint, handle: int) -> None:
        """Notify the owner that a handle is not used any more."""
        self._news.put(_HandleGone(endpoint, handle))

    def flush(self, timeout_s: float) -> None:
        """Wait until owners have heard of everything that was noticed before."""
        if self._thread is not None:
            until = time.monotonic() + timeout_s
            heard = threading.Event()
            self._news.put(heard)
            heard.wait(timeout_s)
            wait(self._answers, max(until - time.monotonic(), 0.0))

    def _run(self) -> None:
        while True:
            news = self._gather()
            for each in sorted(news, key=lambda each: _ORDER.index(type(each))):
                call_guarded("queue-cleanup-failed", self._notify, each)
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

    def _notify(self, news: _News) -> None:
        answer: object = None
        try:
            match news:
                case _ConsumerGone(lookup, consumer, received, noticed_at):
                    answer = lookup.end_consumer(consumer, received, noticed_at)
                case _HandleGone(endpoint, handle):
                    answer = endpoint.tell("leave", handle)
                case threading.Event():
                    news.set()
        except QueueNotFoundError:
            if isinstance(news, _ConsumerGone):
                self._later.append(news)
        except UnifiedError as error:
            logger.debug("event=queue-cleanup-lost reason=%r", str(error))
        self._answers = [each for each in self._answers if not each.done()]
        if isinstance(answer, Future):
            answer.add_done_callback(Future.exception)  # it has to leave, though nobody waits for its answer
            self._answers.append(answer)


CLEANUP = CleanupNotifications()
