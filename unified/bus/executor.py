"""Executors of handlers: the thread pool for plain functions, the main thread, and the event loop for coroutines.

A handler that never returns does not keep the process alive, unlike one in `concurrent.futures`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextvars import ContextVar
from queue import Empty, SimpleQueue
from typing import Any

from unified.threads import start_thread


class LoopThread:
    """An event loop on a daemon thread, made when the first async handler is called."""

    def __init__(self) -> None:
        self.is_closing = False
        self.waits: tuple[object, ...] = ()  # the call or stream that a handler waits for without `await`
        self._asked: list[float] = []
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def run(self, work: Callable[[], object]) -> None:
        """Call `work` on the loop, soon; after `close` it is dropped."""
        with self._lock:
            if self.is_closing:
                return
            if self.loop is None:
                loop = asyncio.new_event_loop()
                thread = start_thread("bus-loop", self._main, loop)
                self.loop, self.thread = loop, thread
            self.loop.call_soon_threadsafe(work)

    def blocked_s(self) -> float:
        """Return for how many seconds the loop has begun nothing new, although it was asked to."""
        now = time.monotonic()
        if not self._asked and self.thread is not None:
            self.thread.name = "bus-loop"
            self._asked.append(now)
            self.run(self._asked.clear)
        return now - min(self._asked, default=now)

    def close(self, timeout_s: float = 1.0) -> None:
        """Cancel the tasks of the loop, and end its thread."""
        with self._lock:
            self.is_closing = True
            loop, thread = self.loop, self.thread
            if loop is None or thread is None:
                return
            loop.call_soon_threadsafe(loop.stop)
        if thread is not threading.current_thread():
            thread.join(timeout_s)

    @staticmethod
    def _main(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks, timeout=0.5) if tasks else asyncio.sleep(0))
        finally:
            loop.close()


logger = logging.getLogger(__name__)
MOST_THREADS = 1024


class CallInterrupted(KeyboardInterrupt):
    """A signal stops the worker, and so the call on its main thread, which gets no answer."""


class MainThread:
    """Queue of handlers for the main thread of a service. `will_serve` is False while a program takes the thread.

    A user's signal handler, such as one of SIGALRM, may raise in any line there: work stays in the queue until it is
    done, and may be called once more then.
    """

    def __init__(self) -> None:
        self.will_serve = False
        self._work: deque[Callable[[], object] | None] = deque()
        self._rings: SimpleQueue[None] = SimpleQueue()

    def submit(self, work: Callable[[], object] | None) -> None:
        self._work.append(work)
        self._rings.put(None)

    def call(
        self, variable: ContextVar[Any], current: object, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a function on the main thread, from another one, with a context variable set; return what it returns."""
        answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        begun: list[bool] = []

        def work() -> None:
            if begun:
                return
            try:
                begun.append(True)
                token = variable.set(current)
                try:
                    value = function(*args, **kwargs)
                finally:
                    variable.reset(token)
                answers.put((value, None))
            except CallInterrupted:
                raise
            except BaseException as error:
                answers.put((None, error))

        self.submit(work)
        value, error = answers.get()
        try:
            if error is not None:
                raise error
            return value
        finally:
            del error, value  # its traceback refers to this frame

    def serve(self, run: Callable[[Callable[[], object]], object]) -> None:
        """Call `run(work)` on this thread with all that is submitted, until a None or an interrupt."""
        while True:
            try:
                while self._work:
                    if (work := self._work[0]) is None:
                        return
                    run(work)
                    work = None  # it refers to arguments, and the next work may come much later
                    self._work.popleft()
                self._rings.get()
            except CallInterrupted:
                return
            except Exception:
                logger.exception("an exception came between two calls on the main thread")


class HandlerPool:
    """Pool of at most `max_threads` daemon threads, started as work comes. Threads that wait for other calls (`waits`)
    do not count, so that handlers that call one another use the pool up only when `most_threads` wait.

    Attributes:
        most_threads: limit on all threads, with those that wait for other calls.
        on_used_up: called, on any thread, when there is work and `most_threads` wait.
        on_full: called, on any thread, when there is work that no thread is free for.
    """

    def __init__(self, name: str, max_threads: int) -> None:
        self.most_threads = MOST_THREADS
        self.on_used_up: Callable[[], object] = lambda: None
        self.on_full: Callable[[], object] = lambda: None
        self._name = name
        self._max_threads = max_threads
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._threads: dict[int, threading.Thread] = {}
        self._num_started = 0
        self._num_busy = 0
        """Number of pieces of work that are queued or running."""
        self._num_waiting = 0
        self._num_presumed = 0
        """Number of threads that seem to wait without `waits` (`presume`)."""
        self._lock = threading.RLock()
        self._is_closed = False

    def submit(self, work: Callable[[], object]) -> None:
        """Run `work` on a thread, in the order submitted. After `close` it is dropped."""
        with self._lock:
            if self._is_closed:
                return
            self._num_busy += 1
            is_used_up = self._grow()
            # Last, so that nothing holds this thread up after it: next, the thread may begin the preceding call.
            self._work.put(work)
        if is_used_up:
            self.on_used_up()
        if self.is_full:
            self.on_full()

    def take_back(self, is_wanted: Callable[[Callable[[], object]], bool]) -> list[Callable[[], object]]:
        """Take back the work that has not begun, and for which `is_wanted` is True."""
        taken: list[Callable[[], object]] = []
        with self._lock:
            kept: list[Callable[[], object] | None] = []
            with contextlib.suppress(Empty):
                while True:
                    work = self._work.get_nowait()
                    if work is not None and is_wanted(work):
                        taken.append(work)
                    else:
                        kept.append(work)
            for each in kept:
                self._work.put(each)
            self._num_busy -= len(taken)
        return taken

    def waits(self) -> bool:
        """Note that this thread is about to wait for another call. If this returns True, call `waited` afterwards."""
        with self._lock:  # before the look-up: a new thread may work before `_grow` has added it
            if threading.get_ident() not in self._threads:
                return False
            self._num_waiting += 1
            is_used_up = self._grow()
        if is_used_up:
            self.on_used_up()
        return True

    def waited(self) -> None:
        with self._lock:
            self._num_waiting -= 1

    @property
    def is_full(self) -> bool:
        """True if there is work that no thread is free for."""
        return self._num_busy > len(self._threads) and not self._is_closed

    def presume(self, waiting: Collection[int]) -> None:
        """Let other threads stand in, until the next `presume`, for the pool's threads among these idents: they seem to
        wait for other calls, without `waits`."""
        with self._lock:
            self._num_presumed = len(self._threads.keys() & waiting)
            num_threads = -1
            while num_threads < len(self._threads):
                num_threads = len(self._threads)
                is_used_up = self._grow()
        if is_used_up:
            self.on_used_up()

    def close(self, timeout_s: float = 0.2) -> None:
        """Drop work that has not begun, and wait `timeout_s` at most; a handler's thread ends with the process."""
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

    def _grow(self) -> bool:
        """Add a thread, under the lock, if there is work for it. Return True if the work has to wait for a waiting
        thread."""
        num_threads = len(self._threads)
        if self._num_busy <= num_threads or self._is_closed:
            return False
        if num_threads < min(self._limit, self.most_threads):
            name = f"{self._name}-{self._num_started + 1}"
            try:
                thread = start_thread(name, self._run)
            except RuntimeError as error:  # the system has none to give
                if num_threads == 0:
                    raise
                logger.warning("event=no-further-thread num_threads=%d reason=%r", num_threads, str(error))
                return False
            self._num_started += 1
            self._threads[thread.ident or 0] = thread
            return False
        return self._num_waiting + self._num_presumed >= self.most_threads

    @property
    def _limit(self) -> int:
        return self._max_threads + self._num_waiting + self._num_presumed

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except BaseException:
                logger.exception("a handler thread of the bus caught an unexpected exception")
            del work  # it refers to arguments, and the next work may come much later
            with self._lock:
                self._num_busy -= 1
                if len(self._threads) > self._limit:  # this thread stood in for a waiting one
                    self._threads.pop(threading.get_ident(), None)
                    return
