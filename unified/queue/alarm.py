"""Tells a queue's owner that time has passed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


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
            if self._is_closed or not self._has_thread():
                return
            if self._at is None or at < self._at:
                self._at = at
                self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _has_thread(self) -> bool:
        """Under the lock; starts it, if the system has one to give."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="queue-alarm", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # whoever sets it is owed an answer, and it is set with each question
                logger.warning("event=queue-alarm-not-set reason=%r: tried again with the next question", str(error))
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        while self._await():
            try:
                self._ring()
            except BaseException:  # of a callback of somebody who was told, say
                logger.exception("event=queue-alarm-failed: it goes on")

    def _await(self) -> bool:
        with self._changed:
            while not self._is_closed:
                left_s = None if self._at is None else self._at - time.monotonic()
                if left_s is not None and left_s <= 0:
                    self._at = None
                    return True
                self._changed.wait(left_s)
            return False
