"""Notifications to the coordinator of checkpoints written, failed or damaged, delivered while training goes on."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from msgspec.structs import replace

from unified.checkpoint.location import WriterIdentity
from unified.checkpoint.manifest import Manifest, manifest_name
from unified.config.addresses import parse_coordinator
from unified.coordinator.client import Coordinator
from unified.coordinator.worker_identity import discover, named_coordinator, open_coordinator, worker_of_rank
from unified.errors import CoordinatorError
from unified.protocol.client_master import Done, MasterAnswer
from unified.protocol.coordinator import CheckpointResponse, NotifyCheckpoint, TellEvent, WorkerEvent
from unified.threads import own_pid, start_thread

logger = logging.getLogger(__name__)

CLOSE_WITHIN_S = 2.0
"""Seconds for which the end of a manager waits for the delivery of notifications."""
MAX_EVENTS = 16

Notification = NotifyCheckpoint | TellEvent


class PendingNotifications:
    """The notifications that are still to be delivered: the latest checkpoint, and some events in order. Pure."""

    def __init__(self) -> None:
        self._notice: NotifyCheckpoint | None = None
        self._events: deque[TellEvent] = deque(maxlen=MAX_EVENTS)

    def __bool__(self) -> bool:
        return self._notice is not None or bool(self._events)

    def add(self, notification: Notification) -> None:
        """Add one; keep only the highest step since the last rollback, and the newest `MAX_EVENTS` events."""
        if isinstance(notification, TellEvent):
            self._events.append(notification)
        elif self._notice is None or notification.goes_back:
            self._notice = notification
        elif notification.step >= self._notice.step:
            self._notice = replace(notification, goes_back=self._notice.goes_back)

    def take(self) -> Notification | None:
        """Return the next one to deliver."""
        if self._events:
            return self._events.popleft()
        notice, self._notice = self._notice, None
        return notice

    def put_back(self, notification: Notification) -> None:
        """Put back one that was not delivered, before those that were added meanwhile."""
        if isinstance(notification, TellEvent):
            if len(self._events) < MAX_EVENTS:
                self._events.appendleft(notification)
        elif self._notice is None:
            self._notice = notification
        elif notification.goes_back:
            self._notice = replace(self._notice, goes_back=True)
        elif notification.step > self._notice.step and not self._notice.goes_back:
            self._notice = notification


class CoordinatorNotifier:
    """Takes notifications and returns at once; a thread delivers them, and ends when none is left. An error reaches no
    save or load: it is logged once, and the notification is delivered with the next one.

    The thread is no `SerialWorker`, because saves that go on after `close` are still notified.
    """

    def __init__(
        self, coordinator_url: str | Coordinator | None, series: str, writer: WriterIdentity, place: str
    ) -> None:
        self._coordinator = named_coordinator(coordinator_url)
        if isinstance(self._coordinator, str):
            parse_coordinator(self._coordinator)
        self._series = series
        self._writer = writer
        self._place = place
        self._pending = PendingNotifications()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_delivering = False
        self._is_failing = False
        self._pid = own_pid()

    def written(self, manifest: Manifest) -> None:
        """Notify of a checkpoint, unless another rank wrote it: that rank notifies of it."""
        if manifest.writer == self._writer.name:
            self._checkpoint(manifest)

    def rolled_back(self, manifest: Manifest) -> None:
        """Notify that the checkpoints after this one were discarded; any rank may have written it."""
        self._checkpoint(manifest, goes_back=True)

    def event(self, event: WorkerEvent, reason: str) -> None:
        """Notify of something that went wrong, for the event log of the job."""
        self._add(lambda space, worker_id: TellEvent(space=space, worker_id=worker_id, event=event, reason=reason))

    def close(self, timeout_s: float = CLOSE_WITHIN_S) -> None:
        """Wait for delivery, at most `timeout_s`; a notification that failed before is tried once more."""
        if own_pid() != self._pid:
            return
        with self._lock, suppress(RuntimeError):  # no thread starts at the interpreter's end
            if self._pending:
                self._begin()
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _checkpoint(self, manifest: Manifest, *, goes_back: bool = False) -> None:
        self._add(
            lambda space, worker_id: NotifyCheckpoint(
                space=space,
                worker_id=worker_id,
                step=manifest.step,
                path=f"{self._place}/{manifest_name(manifest.step)}",
                name=self._series,
                size_bytes=manifest.size_bytes,
                checksum=manifest.checksum,
                world_size=manifest.world_size,
                goes_back=goes_back,
            )
        )

    def _add(self, make: Callable[[str, str], Notification]) -> None:
        if self._coordinator is None or own_pid() != self._pid:
            return
        try:
            identity = discover()
            worker_id = worker_of_rank(identity, self._writer.rank, self._writer.world_size)
            notification = make(identity.space, worker_id)
            with self._lock:
                self._pending.add(notification)
                self._begin()
        except Exception as error:  # the rank changed, or no thread starts at the interpreter's end: the save is safe
            self._failed(error)

    def _begin(self) -> None:
        """Called under the lock."""
        if not self._is_delivering:
            self._thread = start_thread("checkpoint-notifier", self._run)
            self._is_delivering = True

    def _run(self) -> None:
        coordinator: Coordinator | None = None
        is_own = is_reached = True
        while (notification := self._next(is_reached)) is not None:
            try:
                if coordinator is None:
                    coordinator, is_own = open_coordinator(self._coordinator)
                expected: type[MasterAnswer] = Done if isinstance(notification, TellEvent) else CheckpointResponse
                coordinator.ask(notification, expected)
                self._is_failing = False
            except Exception as error:
                self._failed(error)
                if isinstance(error, CoordinatorError) and error.code == "bad-request":
                    continue  # it would be refused again
                is_reached = False
                with self._lock:
                    self._pending.put_back(notification)
        if coordinator is not None and is_own:
            coordinator.close()

    def _next(self, is_reached: bool) -> Notification | None:
        with self._lock:
            notification = self._pending.take() if is_reached else None
            self._is_delivering = notification is not None
            return notification

    def _failed(self, error: Exception) -> None:
        if not self._is_failing:
            logger.warning("event=checkpoint-notification-failed error=%s: %s", type(error).__name__, error)
        self._is_failing = True
