"""Cleanup notifications: owners hear of threads that have ended and of `DataQueue` objects that nobody holds.

The garbage collector notices both. It can run anywhere, even while a lock of the bus is held. So a finalizer only
queues a notification, and a separate thread tells the owner.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from enum import IntEnum
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from unified.errors import QueueNotFoundError, UnifiedError
from unified.threads import call_guarded, start_thread

logger = logging.getLogger(__name__)
LATER_S = 1.0


class Gone(IntEnum):
    """Kinds of news, in the order of sending. An object and its threads may be collected together, in any order. A
    handle goes after its consumers: when it goes, the owner gives back the items that it still has."""

    CONSUMER = 0
    HANDLE = 1
    NOTHING = 2


class _News(NamedTuple):
    kind: Gone
    tell: Callable[[], object]


class CleanupNotifications:
    """The queue of notifications of this process, and the thread that sends them."""

    def __init__(self) -> None:
        self._news: SimpleQueue[_News] = SimpleQueue()
        self._later: list[_News] = []
        """News of durable queues whose owner is between two incarnations."""
        self._answers: list[Future[Any]] = []
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = start_thread("queue-cleanup", self._run)

    def notify(self, kind: Gone, tell: Callable[[], object]) -> None:
        """Have the thread call `tell` soon, and again later while it raises QueueNotFoundError. Safe in a finalizer."""
        self._news.put(_News(kind, tell))

    def flush(self, timeout_s: float) -> None:
        """Wait until owners have heard of all earlier news."""
        if self._thread is not None:
            until = time.monotonic() + timeout_s
            heard = threading.Event()
            self.notify(Gone.NOTHING, heard.set)
            heard.wait(timeout_s)
            wait(self._answers, max(until - time.monotonic(), 0.0))

    def _run(self) -> None:
        while True:
            news = self._gather()
            for each in sorted(news, key=lambda each: each.kind):
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
            answer = news.tell()
        except QueueNotFoundError:
            self._later.append(news)
        except UnifiedError as error:
            logger.debug("event=queue-cleanup-lost reason=%r", str(error))
        self._answers = [each for each in self._answers if not each.done()]
        if isinstance(answer, Future):
            answer.add_done_callback(Future.exception)  # sends the call, though nobody waits for its answer
            self._answers.append(answer)


CLEANUP = CleanupNotifications()
