"""Saves that are under way when the program ends are written before it does."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import weakref
from typing import Protocol

from unified.errors import NotInWorkerError
from unified.worker.context import current_worker

logger = logging.getLogger(__name__)


class Closing(Protocol):
    def close(self) -> None: ...
    def wait(self) -> None: ...


_open: weakref.WeakSet[Closing] = weakref.WeakSet()
_is_registered = False


def close_at_exit(manager: Closing) -> None:
    """Have `manager` closed at the program's end, unless it is garbage by then."""
    global _is_registered
    if not _is_registered:
        # Ordinary handlers run after thread pools were shut down, which a store may need for its uploads.
        register = getattr(threading, "_register_atexit", atexit.register)
        register(_close_all)
        _is_registered = True
    with contextlib.suppress(NotInWorkerError):
        current_worker().on_finish(_wait_for_all)  # a worker that goes on answering calls closes nothing yet
    _open.add(manager)


def forget(manager: Closing) -> None:
    """It was closed."""
    _open.discard(manager)


def _wait_for_all() -> None:
    for manager in list(_open):
        try:
            manager.wait()
        except Exception as error:
            logger.error("event=checkpoint-failed at-finish=true: %s", error)


def _close_all() -> None:
    for manager in list(_open):
        try:
            manager.close()
        except Exception as error:
            logger.error("event=checkpoint-failed at-exit=true: %s", error)
