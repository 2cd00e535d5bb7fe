"""Work that is asked for in one place and done in another, where it may take its time and a lock."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)
K = TypeVar("K")
_CLOSE_WITHIN_S = 2.0


class Errands(Generic[K]):
    """Does what is asked for, in order, on a thread of its own. Finalizers may ask too, which must not take a lock.

    Args:
        work: given each key that was put, in order; it should not raise.
        name: of the thread.
    """

    def __init__(self, work: Callable[[K], object], *, name: str) -> None:
        self._work = work
        self._name = name
        self._keys: SimpleQueue[K | None] = SimpleQueue()  # its `put` is made for finalizers
        self._thread: threading.Thread | None = None

    def put(self, key: K) -> None:
        """Have `work(key)` called soon. Safe in a finalizer."""
        self._keys.put(key)

    def start(self) -> None:
        """Start the thread, unless it runs; by one thread at a time."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread; what is asked for later is ignored. One that is held up in somebody's code ends after it."""
        self._keys.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_WITHIN_S)

    def _run(self) -> None:
        while (key := self._keys.get()) is not None:
            try:
                self._work(key)
            except BaseException:  # SystemExit too: a done callback may raise it, and calls wait for this thread
                logger.exception("event=errand-failed: it goes on")
