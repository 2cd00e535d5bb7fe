"""The background saver: a thread that writes saves in order, ends when none is left, and reports failed saves."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Generic, Protocol, TypeVar

from unified.checkpoint.coordinator_notify import CoordinatorNotifier
from unified.checkpoint.save_queue import FailedSave, QueuedSave, SaveQueue
from unified.errors import (
    CheckpointExistsError,
    CheckpointRankError,
    CheckpointSaveError,
    CheckpointTimeoutError,
    NotFoundError,
    NotInWorkerError,
    UsageError,
)
from unified.threads import own_pid, start_thread
from unified.worker.context import current_worker, saving_here

logger = logging.getLogger(__name__)

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class SaveWriter(Protocol[T_contra]):
    """The part that knows how a save is written."""

    def write(self, item: T_contra) -> object:
        """Write one save. An error is a failed try."""
        ...

    def release(self, item: T_contra) -> None:
        """Give back the memory of a save that was written, failed or was superseded."""
        ...


class Closing(Protocol):
    """A manager's saver. It finishes its saves at the program's end; its thread keeps it alive while any are left."""

    def close(self) -> None: ...
    def wait(self) -> None: ...


class BackgroundSaver(Generic[T]):
    """Writes saves in order. Safe for threads.

    Args:
        queue: decides which save is next.
        writer: writes them.
        notifier: is notified of saves that are not tried again.
        place: the place of the checkpoints, for messages.
    """

    def __init__(self, queue: SaveQueue[T], writer: SaveWriter[T], notifier: CoordinatorNotifier, place: str) -> None:
        self._queue = queue
        self._writer = writer
        self._notifier = notifier
        self._place = place
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._pid = own_pid()

    @property
    def steps(self) -> list[int]:
        """The steps of saves that are being written or wait."""
        with self._changed:
            return self._queue.steps

    def make_room(self, step: int, nbytes: int) -> None:
        """Supersede older saves, or wait, until a save of `nbytes` would be accepted."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue.has_room(nbytes))
            superseded = self._queue.make_room(step, nbytes)
        self._let_go(superseded)

    def submit(self, save: QueuedSave[T]) -> None:
        """Accept a save, to be written soon."""
        if own_pid() != self._pid:
            raise UsageError("This checkpoint manager was made before a fork; make one in the process that saves.")
        with self._changed:
            self._changed.wait_for(lambda: self._queue.has_room(save.nbytes))
            superseded = self._queue.offer(save)
            if self._thread is None:
                self._thread = start_thread("checkpoint-saver", self._run)
            self._changed.notify_all()
        self._let_go(superseded)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until everything that was accepted is written or failed, or for `timeout` seconds."""
        if own_pid() != self._pid:
            return  # after a fork: the thread and its saves are in the other process
        with self._changed:
            thread = self._thread
            if not self._changed.wait_for(lambda: self._thread is None, timeout):
                steps = ", ".join(map(str, self._queue.steps))
                raise CheckpointTimeoutError(
                    f"The checkpoints of steps {steps} were not written within {timeout:.3g} s. They go on."
                )
        if thread is not None:
            thread.join()

    def take_failures(self) -> list[FailedSave]:
        """Return the failed saves that were not reported yet."""
        with self._changed:
            return self._queue.take_failures()

    def _run(self) -> None:
        with saving_here():
            self._write_all()

    def _write_all(self) -> None:
        while (save := self._next()) is not None:
            try:
                self._writer.write(save.item)
            except Exception as error:
                is_over = not self._failed(save, error)
            else:
                is_over = True
                with self._changed:
                    self._queue.succeeded()
                    self._changed.notify_all()
            if is_over:
                self._writer.release(save.item)
            del save  # frees its bytes before the next save comes

    def _next(self) -> QueuedSave[T] | None:
        """Return the save to try now; None: there is none, and the thread ends."""
        with self._changed:
            while (save := self._queue.next()) is not None:
                delay_s = self._queue.try_at - time.monotonic()
                if delay_s <= 0:
                    self._changed.notify_all()  # the queue has room for one more
                    return save
                self._changed.wait(delay_s)
            self._thread = None
            self._changed.notify_all()
            return None

    def _failed(self, save: QueuedSave[T], error: Exception) -> bool:
        with self._changed:
            is_tried_again = self._queue.failed(time.monotonic(), error, is_final=is_final(error))
            delay_s = self._queue.try_at - time.monotonic()
            failures = [] if is_tried_again else self._queue.failures[-1:]
            self._changed.notify_all()
        if is_tried_again:
            logger.warning(
                "event=checkpoint-retry step=%d in_s=%.1f error=%s: %s", save.step, delay_s, type(error).__name__, error
            )
        for each in failures:
            text = f"{type(each.error).__name__}: {each.error}"
            reason = f"step {each.step} was not saved in {self._place} (tries: {each.num_tries}): {text}"
            self._notifier.event("checkpoint-failed", reason)
            logger.error("event=checkpoint-failed step=%d tries=%d error=%s", each.step, each.num_tries, text)
        return is_tried_again

    def _let_go(self, superseded: list[QueuedSave[T]]) -> None:
        for save in superseded:
            logger.warning("event=checkpoint-skipped step=%d: a newer one came before it could be written", save.step)
            self._writer.release(save.item)


def is_final(error: Exception) -> bool:
    """Return whether another try would fail, too: the save is wrong, not allowed, or its bucket does not exist."""
    return isinstance(
        error,
        UsageError | CheckpointExistsError | CheckpointRankError | PermissionError | NotFoundError | ImportError,
    )


def raise_failures(failures: list[FailedSave], place: str) -> None:
    """Raise CheckpointSaveError for saves that failed since the last report, if any did."""
    if not failures:
        return
    what = "; ".join(
        f"step {each.step} (tries: {each.num_tries}): {type(each.error).__name__}: {each.error}" for each in failures
    )
    raise CheckpointSaveError(
        f"Checkpoints were not saved in {place}: {what}. Earlier checkpoints are unchanged.",
        [each.step for each in failures],
    ) from failures[-1].error


_open: weakref.WeakSet[Closing] = weakref.WeakSet()
_is_registered = False


def close_at_exit(saver: Closing) -> None:
    """Close `saver` at the program's end, so that its saves are written, unless it is garbage by then."""
    global _is_registered
    if not _is_registered:
        # Ordinary handlers run after the shutdown of thread pools, which a store may need for its uploads.
        register = getattr(threading, "_register_atexit", atexit.register)
        register(_close_all)
        _is_registered = True
    with contextlib.suppress(NotInWorkerError):
        current_worker().on_finish(_wait_for_all)  # no close: the worker may go on to answer calls
    _open.add(saver)


def forget(saver: Closing) -> None:
    _open.discard(saver)


def _end_all(act: Callable[[Closing], None], when: str) -> None:
    for saver in list(_open):
        try:
            act(saver)
        except Exception as error:
            logger.error("event=checkpoint-failed %s=true: %s", when, error)


_wait_for_all = partial(_end_all, lambda saver: saver.wait(), "at-finish")
_close_all = partial(_end_all, lambda saver: saver.close(), "at-exit")
