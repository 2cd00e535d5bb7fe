"""The shell of the queue of saves: a thread that lives while there is something to write.

What becomes known of saves that were not written: lines in the log, and the error of the next call.

Saves that are under way when the program ends are written before it does.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from unified.checkpoint.coordinator_notify import Announcer
from unified.checkpoint.save_queue import Failure, Save, SaveQueue
from unified.errors import (
    CheckpointExistsError,
    CheckpointRankError,
    CheckpointSaveError,
    CheckpointTimeoutError,
    NotFoundError,
    NotInWorkerError,
    UsageError,
)
from unified.worker.context import current_worker

logger = logging.getLogger(__name__)

T = TypeVar("T")


class BackgroundSaver(Generic[T]):
    """Writes saves in order. Safe for threads.

    Args:
        queue: decides.
        write: carries one save out; what it raises is a failed try.
        release: gives back what a save holds, once it was written, failed or gave way.
        on_given_way: a save was not written because newer ones came.
        on_failed: a save is not tried again.
    """

    def __init__(
        self,
        queue: SaveQueue[T],
        write: Callable[[Save[T]], object],
        release: Callable[[T], object],
        *,
        on_given_way: Callable[[Save[T]], object],
        on_failed: Callable[[Failure], object],
    ) -> None:
        self._queue = queue
        self._write = write
        self._release = release
        self._on_given_way = on_given_way
        self._on_failed = on_failed
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    @property
    def steps(self) -> list[int]:
        """Of saves that are being written or wait."""
        with self._changed:
            return self._queue.steps

    def make_room(self, step: int, nbytes: int) -> None:
        """Until a save of so many bytes would be accepted, let others give way, or wait."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue.has_room(nbytes))
            given_way = self._queue.make_room(step, nbytes)
        self._let_go(given_way)

    def submit(self, save: Save[T]) -> None:
        """Accept a save, to be written soon.

        Raises:
            UsageError: this process was forked from the one whose saver it is.
        """
        self._check_process()
        with self._changed:
            self._changed.wait_for(lambda: self._queue.has_room(save.nbytes))
            given_way = self._queue.offer(save)
            if self._thread is None:
                # A daemon, so that a program's end does not hang on it; its manager waits at exit.
                self._thread = threading.Thread(target=self._run, name="checkpoint-saver", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        self._let_go(given_way)

    def wait(self, timeout: float | None = None) -> None:
        """Until everything that was accepted is written or failed.

        Args:
            timeout: seconds; None: as long as it takes, which retries bound.

        Raises:
            CheckpointTimeoutError: it was not, in time.
        """
        if os.getpid() != self._pid:
            return  # the thread stayed in the other process, and so did its saves
        with self._changed:
            thread = self._thread
            if not self._changed.wait_for(lambda: self._thread is None, timeout):
                steps = ", ".join(map(str, self._queue.steps))
                raise CheckpointTimeoutError(
                    f"The checkpoints of steps {steps} were not written within {timeout:.3g} s. They go on."
                )
        if thread is not None:
            thread.join()

    def take_failures(self) -> list[Failure]:
        """Those that nobody was told of yet."""
        with self._changed:
            return self._queue.take_failures()

    def _run(self) -> None:
        while (save := self._next()) is not None:
            try:
                self._write(save)
            except Exception as error:
                is_over = not self._failed(save, error)
            else:
                is_over = True
                with self._changed:
                    self._queue.succeeded()
                    self._changed.notify_all()
            if is_over:
                self._release(save.item)
            del save  # its bytes must not stay until the next one comes

    def _next(self) -> Save[T] | None:
        """The save to try now; None: there is none, and the thread is no more."""
        with self._changed:
            while (save := self._queue.next()) is not None:
                delay_s = self._queue.try_at - time.monotonic()
                if delay_s <= 0:
                    self._changed.notify_all()  # there is one place more
                    return save
                self._changed.wait(delay_s)
            self._thread = None
            self._changed.notify_all()
            return None

    def _failed(self, save: Save[T], error: Exception) -> bool:
        with self._changed:
            is_tried_again = self._queue.failed(time.monotonic(), error, is_final=is_final(error))
            delay_s = self._queue.try_at - time.monotonic()
            failures = [] if is_tried_again else self._queue.failures[-1:]
            self._changed.notify_all()
        if is_tried_again:
            logger.warning(
                "event=checkpoint-retry step=%d in_s=%.1f error=%s: %s", save.step, delay_s, type(error).__name__, error
            )
        for failure in failures:
            self._on_failed(failure)
        return is_tried_again

    def _let_go(self, given_way: list[Save[T]]) -> None:
        for save in given_way:
            self._on_given_way(save)
            self._release(save.item)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError("This checkpoint manager was made before a fork; make one in the process that saves.")


def is_final(error: Exception) -> bool:
    """Whether trying again would end the same way: what was asked is wrong, not allowed, or in no bucket there is."""
    return isinstance(
        error,
        UsageError | CheckpointExistsError | CheckpointRankError | PermissionError | NotFoundError | ImportError,
    )


def tell_of_given_way(save: Save[Any]) -> None:
    """Log that a save gave way to newer ones."""
    logger.warning("event=checkpoint-skipped step=%d: a newer one came before it could be written", save.step)


def tell_of_failed(failure: Failure, place: str, announcer: Announcer) -> None:
    """Log that a save is not tried again, and tell the coordinator."""
    announcer.event(
        "checkpoint-failed",
        f"step {failure.step} was not saved in {place} (tries: {failure.num_tries}): "
        f"{type(failure.error).__name__}: {failure.error}",
    )
    logger.error(
        "event=checkpoint-failed step=%d tries=%d error=%s: %s",
        failure.step,
        failure.num_tries,
        type(failure.error).__name__,
        failure.error,
    )


def report(failures: list[Failure], place: str) -> None:
    """Raise for saves that failed since the last report, if any did.

    Raises:
        CheckpointSaveError: some did; it knows their steps, and its cause is the last one's error.
    """
    if not failures:
        return
    what = "; ".join(
        f"step {each.step} (tries: {each.num_tries}): {type(each.error).__name__}: {each.error}" for each in failures
    )
    raise CheckpointSaveError(
        f"Checkpoints were not saved in {place}: {what}. Those before them are as they were.",
        [each.step for each in failures],
    ) from failures[-1].error


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
