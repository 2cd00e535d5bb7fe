"""Tells a queue's owner that time has passed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Alarm:
    """Calls `ring` at the time that was set, once, in a thread that is there from the first `set` on."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._changed = threading.Condition()
        self._at: float | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def set(self, at: float) -> None:
        """Ring at this time of `time.monotonic`, or earlier if that was asked for before."""
        earliest = self._at
        if earliest is not None and earliest <= at:
            return
        with self._changed:
            if self._is_closed:
                return
            if self._at is None or at < self._at:
                self._at = at
                self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="queue-alarm", daemon=True)
                self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while self._await():
            self._ring()

    def _await(self) -> bool:
        with self._changed:
            while not self._is_closed:
                left_s = None if self._at is None else self._at - time.monotonic()
                if left_s is not None and left_s <= 0:
                    self._at = None
                    return True
                self._changed.wait(left_s)
            return False
