"""What finalizers ask for, done where it is safe."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

logger = logging.getLogger(__name__)


class Reaper:
    """Does what finalizers ask for on a thread of its own, since they may run anywhere and must not take a lock.

    Args:
        work: given each key that was put, in order; it should not raise.
    """

    def __init__(self, work: Callable[[int], object]) -> None:
        self._work = work
        self._keys: SimpleQueue[int | None] = SimpleQueue()  # its `put` is made for finalizers
        self._thread: threading.Thread | None = None

    def put(self, key: int) -> None:
        """Have `work(key)` called soon. Safe in a finalizer."""
        self._keys.put(key)

    def start(self) -> None:
        """Start the thread, unless it runs; by one thread at a time."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="bus-reaper", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread; what is asked for later is ignored."""
        self._keys.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while (key := self._keys.get()) is not None:
            try:
                self._work(key)
            except Exception:
                logger.exception("event=reaper-failed: it goes on")
