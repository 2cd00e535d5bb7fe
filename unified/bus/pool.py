"""Threads for handlers. Unlike with `concurrent.futures`, a handler that never returns keeps no process alive."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

logger = logging.getLogger(__name__)
MOST_THREADS = 1024
"""With those that wait for other calls."""


class HandlerPool:
    """At most `max_threads` daemon threads that work, started as work comes; those that wait for other calls (`waits`)
    do not count, so that handlers that call one another never use it up."""

    def __init__(self, name: str, max_threads: int) -> None:
        self._name = name
        self._max_threads = max_threads
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._threads: dict[int, threading.Thread] = {}
        self._num_started = 0
        self._num_busy = 0
        """Pieces of work that are queued or running."""
        self._num_waiting = 0
        self._lock = threading.Lock()
        self._is_closed = False

    def submit(self, work: Callable[[], object]) -> None:
        """Run `work` on a thread, in the order submitted. After `close` it is dropped."""
        with self._lock:
            if self._is_closed:
                return
            self._num_busy += 1
            self._grow()
            # Last: nothing that lets other threads run stands between this and what the submitting thread does next,
            # which may be to begin the call before this one.
            self._work.put(work)

    def waits(self) -> bool:
        """This thread is about to wait for another call; if True, call `waited` afterwards."""
        with self._lock:  # also for the question: a thread may be at work before it is entered
            if threading.get_ident() not in self._threads:
                return False
            self._num_waiting += 1
            self._grow()
        return True

    def waited(self) -> None:
        """This thread works again."""
        with self._lock:
            self._num_waiting -= 1

    def close(self, timeout_s: float = 0.2) -> None:
        """Drop what has not begun, and wait `timeout_s` at most; a thread inside a handler ends with the process."""
        with self._lock:
            self._is_closed = True
            threads = list(self._threads.values())
        with contextlib.suppress(Empty):
            while True:
                self._work.get_nowait()
        for _ in threads:
            self._work.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)
                timeout_s = 0.01 if thread.is_alive() else timeout_s

    def _grow(self) -> None:
        """Under the lock: one more thread, if there is work for it."""
        num_threads = len(self._threads)
        most = min(self._max_threads + self._num_waiting, MOST_THREADS)
        if self._num_busy > num_threads and num_threads < most and not self._is_closed:
            name = f"{self._name}-{self._num_started + 1}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system has none to give
                if num_threads == 0:
                    raise
                logger.warning("event=no-further-thread num_threads=%d reason=%r", num_threads, str(error))
                return
            self._num_started += 1
            self._threads[thread.ident or 0] = thread

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except BaseException:
                logger.exception("a handler thread of the bus caught what nobody expected")
            del work  # it holds arguments, and the next may be long in coming
            with self._lock:
                self._num_busy -= 1
                if len(self._threads) > self._max_threads + self._num_waiting:  # it stood in for one that waited
                    self._threads.pop(threading.get_ident(), None)
                    return
