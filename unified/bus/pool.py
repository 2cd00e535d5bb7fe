"""Threads for handlers. Unlike with `concurrent.futures`, a handler that never returns keeps no process alive."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

logger = logging.getLogger(__name__)


class HandlerPool:
    """At most `max_threads` daemon threads, started as work comes."""

    def __init__(self, name: str, max_threads: int) -> None:
        self._name = name
        self._max_threads = max_threads
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._num_busy = 0
        """Pieces of work that are queued or running."""
        self._lock = threading.Lock()
        self._is_closed = False

    def submit(self, work: Callable[[], object]) -> None:
        """Run `work` on a thread, in the order submitted. After `close` it is dropped."""
        with self._lock:
            if self._is_closed:
                return
            self._num_busy += 1
            if self._num_busy > len(self._threads) < self._max_threads:
                self._start_thread()
            self._work.put(work)

    def close(self, timeout_s: float = 0.2) -> None:
        """Drop what has not begun, and wait `timeout_s` at most; a thread inside a handler ends with the process."""
        with self._lock:
            self._is_closed = True
            threads, self._threads = self._threads, []
        with contextlib.suppress(Empty):
            while True:
                self._work.get_nowait()
        for _ in threads:
            self._work.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)
                timeout_s = 0.01 if thread.is_alive() else timeout_s

    def _start_thread(self) -> None:
        name = f"{self._name}-{len(self._threads)}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except BaseException:
                logger.exception("a handler thread of the bus caught what nobody expected")
            del work  # it holds arguments, and the next may be long in coming
            with self._lock:
                self._num_busy -= 1
