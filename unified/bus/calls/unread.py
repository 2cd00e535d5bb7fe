"""Errors of calls that nobody reads.

A caller may drop the future of a failed call, and then nobody learns of the failure. So an unread error is logged when
its future is collected, as asyncio does for tasks, or when its worker ends.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

from unified.bus.calls.registry import is_runtimes
from unified.bus.calls.remote_errors import REPEAT_S, error_text
from unified.config.logging import LogOnce
from unified.errors import QueueClosedError, RemoteError, RpcCancelledError, RpcNotFoundError
from unified.threads import SerialWorker

logger = logging.getLogger(__name__)
_TELL_WITHIN_S = 2.0
_FROM_HANDLERS = (RemoteError, RpcNotFoundError)


class UnreadError:
    """Error of one future until somebody reads it. Only that future refers to this object."""

    __slots__ = ("__weakref__", "_ledger", "error", "what")

    def __init__(self, ledger: UnreadErrors, what: str | tuple[str, str], error: BaseException) -> None:
        self._ledger: UnreadErrors | None = ledger
        self.what = what
        self.error = error

    def was_read(self) -> bool:
        """Note that the error was read; return False if that was known."""
        is_news, self._ledger = self._ledger is not None, None
        return is_news

    def __del__(self) -> None:
        ledger = self._ledger
        if ledger is not None:
            ledger.lost(self)


class UnreadErrors:
    """Counts and logs the errors of an endpoint's calls that nobody read.

    An error is logged with its traceback if its call and kind are new; repeated ones are only counted.

    Attributes:
        total: errors that nobody read so far.
        on_total: called with `total` whenever it has grown, on a thread of the bus.
        is_stopping: this worker and others are being stopped, so that broken calls are not worth a log line.
    """

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._pid = os.getpid()
        self._waiting: set[weakref.ref[UnreadError]] = set()
        """Errors neither read nor collected. Adding and copying are single steps of the interpreter, without a lock."""
        self._said = LogOnce(forget_s=REPEAT_S)
        self._background: SerialWorker[Callable[[], object]] = SerialWorker("bus-unread", lambda work: work())
        self.total = 0
        self.on_total: Callable[[int], object] = lambda total: None
        self.is_stopping = False

    def watch(self, what: str | tuple[str, str], error: BaseException) -> UnreadError | None:
        """Return the object that a failed future holds until its error is read; None: the error needs no reader."""
        is_expected = isinstance(error, RpcCancelledError) or type(error) is QueueClosedError
        if is_expected or (type(what) is tuple and is_runtimes(what[0])):
            return None
        unread = UnreadError(self, what, error)
        self._waiting.add(weakref.ref(unread, self._waiting.discard))
        return unread

    def lost(self, unread: UnreadError) -> None:
        """Log an error whose future was collected. Safe in a finalizer."""
        if self._pid != os.getpid() or (self.is_stopping and not isinstance(unread.error, _FROM_HANDLERS)):
            return
        self._background.put(partial(self._tell, unread.what, unread.error))

    def start(self) -> None:
        """Begin to log."""
        self._pid = os.getpid()
        self._background.start()

    def tell_all(self) -> int:
        """Log also the errors that could still be read, because the worker ends; return `total`."""
        for reference in list(self._waiting):
            unread = reference()
            if unread is not None and unread.was_read():
                self.lost(unread)
        flushed = threading.Event()
        self._background.put(flushed.set)  # behind all of them
        flushed.wait(_TELL_WITHIN_S)
        return self.total

    def close(self) -> None:
        """Log what is left, and end the thread."""
        self._background.close()

    def _tell(self, what: str | tuple[str, str], error: BaseException) -> None:
        """Count and log an error; only the background thread does this."""
        self.total += 1
        words = what if isinstance(what, str) else f"the call of {what[0]!r} to worker {what[1]}"
        if self._said.is_new(time.monotonic(), f"{words}: {type(error).__name__}"):
            logger.error(
                "event=rpc-error-unread worker=%s: %s failed, and nobody read its error (repeated ones are only "
                "counted)\n%s",
                self._worker,
                words,
                error_text(error),
            )
        self.on_total(self.total)
