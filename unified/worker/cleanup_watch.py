"""Watch on the main thread: report an exception that it handles while it is in a collective.

A failing rank runs its ``finally`` blocks and ``__exit__`` methods before its failure is known. If it enters a
collective there, it waits for peers that are in another one. Without this watch nothing is reported until the process
group's own timeout, ten minutes and more.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from unified.protocol.records import MAX_METRIC_TEXT
from unified.threads import TimerThread
from unified.worker.failure import first_words, render, where

EVERY_S = 2.0
"""Time between two looks; the second look in the same collective reports."""


class CleanupWatch:
    """Looks at the main thread until it is closed.

    Args:
        open_collective: returns name and number of the collective that this rank is in; empty: none.
        tell: takes the exception in words, and an empty text once the main thread has gone on.
    """

    def __init__(self, open_collective: Callable[[], str], tell: Callable[[str], None]) -> None:
        self._open_collective = open_collective
        self._tell = tell
        self._seen: tuple[int, str] | None = None
        self._reported: int | None = None
        """Id of the exception that was reported."""
        self._is_reported = False
        self._timer = TimerThread("unified-cleanup-watch", self._look, stays=True)

    def start(self) -> None:
        self._timer.set(time.monotonic() + EVERY_S)

    def close(self) -> None:
        """Stop the looks."""
        self._timer.close(0.0)

    def _look(self) -> None:
        self._timer.set(time.monotonic() + EVERY_S)
        error = handled()
        if error is None or id(error) != self._reported:
            self._reported = None
        inside = "" if error is None else self._open_collective()
        seen = (id(error), inside) if inside else None
        is_new, self._seen = seen != self._seen, seen
        if self._is_reported and is_new:
            self._is_reported = False
            self._tell("")
        # Only once: a program that goes on inside an ``except`` block handles its exception all the time.
        if error is not None and seen is not None and not is_new and self._reported is None:
            self._reported, self._is_reported = id(error), True
            print(
                f"unified: this rank has been in {inside} for {EVERY_S:g} s or more while it handles an exception. "
                f"Peers may never enter it.\n{render(error)}",
                end="",
                file=sys.stderr,
                flush=True,
            )
            self._tell(in_words(error))


def handled() -> BaseException | None:
    """Return the exception that the main thread handles now."""
    found = sys._current_exceptions().get(threading.main_thread().ident or 0)
    return found[1] if isinstance(found, tuple) else found  # a tuple before Python 3.12


def in_words(error: BaseException) -> str:
    """Return the exception, and the place where it was raised."""
    return f"{first_words(error)}{where(error)}"[:MAX_METRIC_TEXT]
