"""Heartbeats of a worker, from a separate thread: a training step may block the event loop for long."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

from unified.coordinator.client import Coordinator
from unified.errors import MasterUnreachableError, UnifiedError, UsageError, WorkerUnknownError
from unified.protocol.coordinator import Heartbeat, HeartbeatResponse
from unified.threads import start_thread

_log = logging.getLogger("unified.data")


class Heartbeats:
    """The thread of a worker's heartbeats; it ends by itself when the coordinator does not know the worker any more.

    Args:
        timeout_s: seconds without an answer after which `when_lost` is called; the thread goes on trying.
        when_lost: called in the thread, once each time that the worker must be taken for lost.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        message: Heartbeat,
        *,
        interval_s: float,
        timeout_s: float,
        when_lost: Callable[[UnifiedError], None],
    ) -> None:
        self._coordinator = coordinator
        self._message = message
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._when_lost = when_lost
        self._stopping = threading.Event()
        self._answer: Future[HeartbeatResponse] | None = None
        self._thread = start_thread("unified-heartbeats", self._beat)

    def stop(self) -> None:
        """Stop sending, and return at once, without waiting for an open answer."""
        self._stopping.set()
        answer = self._answer
        if answer is not None:
            answer.cancel()

    def join(self) -> None:
        """Wait until the thread has ended, after `stop`."""
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _beat(self) -> None:
        heard_at = time.monotonic()
        is_notified = False
        while not self._stopping.wait(self._interval_s):
            error = self._say()
            now = time.monotonic()
            if error is None:
                heard_at, is_notified = now, False
            elif isinstance(error, WorkerUnknownError):
                self._tell(error)
                return
            elif not is_notified and now - heard_at >= self._timeout_s:
                is_notified = True
                self._tell(
                    MasterUnreachableError(
                        f"worker {self._message.worker_id} has heard nothing of its coordinator for "
                        f"{now - heard_at:.1f} s; by now it has taken the worker for lost: {error}"
                    )
                )

    def _say(self) -> UnifiedError | None:
        try:
            future = self._answer = self._coordinator.submit(
                self._message, HeartbeatResponse, timeout_s=self._timeout_s
            )
            if self._stopping.is_set():
                return None
            return heartbeat_error(self._message, future.result())
        except UnifiedError as error:
            return error
        except CancelledError:
            return None

    def _tell(self, error: UnifiedError) -> None:
        if not self._stopping.is_set():
            self._when_lost(error)


def check_heartbeats(interval_s: float | None, timeout_s: float | None) -> None:
    """Raise UsageError for times that are not valid or do not fit together; None: not known."""
    for name, seconds in (("heartbeat_interval_s", interval_s), ("heartbeat_timeout_s", timeout_s)):
        if seconds is not None and not 0 < seconds < math.inf:
            raise UsageError(f"{name} is {seconds}: give seconds above 0.")
    if interval_s is not None and timeout_s is not None and interval_s >= timeout_s:
        raise UsageError(
            f"heartbeat_interval_s is {interval_s:g} and heartbeat_timeout_s {timeout_s:g}: this worker would be taken "
            "for lost between two heartbeats. Give an interval of at most a third of the time-out."
        )


def interval_within(worker_id: str, interval_s: float, timeout_s: float) -> float:
    """Return the interval. If it is not below the time-out, log a warning and return a third of the time-out."""
    if interval_s < timeout_s:
        return interval_s
    reason = (
        f"its heartbeat_interval_s is {interval_s:g}, and its coordinator takes it for lost after {timeout_s:g} s of "
        f"silence: it sends a heartbeat every {timeout_s / 3:g} s"
    )
    _log.warning("event=heartbeat-interval-shortened worker=%s reason=%r", worker_id, reason)
    return timeout_s / 3


def heartbeat_error(message: Heartbeat, answer: HeartbeatResponse) -> WorkerUnknownError | None:
    """Return the error for a heartbeat's answer; None: the worker is known."""
    if answer.is_known:
        return None
    return WorkerUnknownError(
        f"worker {message.worker_id} is not known to its coordinator any more: it was silent for too long, or a new "
        "incarnation of it has registered. Register it again, or end this process.",
        code="unknown-worker",
    )
