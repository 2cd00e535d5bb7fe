"""Tells the coordinator of checkpoints that were written, and of those that were not, while training goes on.

What a coordinator has still to be told of checkpoints. Pure.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from msgspec.structs import replace

from unified.checkpoint.location import Writer
from unified.checkpoint.manifest import Manifest, manifest_name
from unified.config.addresses import parse_coordinator
from unified.data.coordinator_client import Coordinator
from unified.data.worker_identity import discover, named_coordinator, open_coordinator, worker_of_rank
from unified.errors import CoordinatorError
from unified.protocol.client_master import Done, MasterAnswer
from unified.protocol.coordinator import CheckpointResponse, NotifyCheckpoint, TellEvent, WorkerEvent

MAX_EVENTS = 16

Word = NotifyCheckpoint | TellEvent


class Unsaid:
    """At most one checkpoint, the latest, as no other matters to who asks for that; and some events, in order."""

    def __init__(self) -> None:
        self._notice: NotifyCheckpoint | None = None
        self._events: deque[TellEvent] = deque(maxlen=MAX_EVENTS)

    def __bool__(self) -> bool:
        return self._notice is not None or bool(self._events)

    def add(self, word: Word) -> None:
        """To be said. Of two checkpoints of one step the later counts; of too many events the newest."""
        if isinstance(word, TellEvent):
            self._events.append(word)
        elif self._notice is None or word.goes_back:
            self._notice = word
        elif word.step >= self._notice.step:
            self._notice = replace(word, goes_back=self._notice.goes_back)

    def take(self) -> Word | None:
        """What to say next."""
        if self._events:
            return self._events.popleft()
        notice, self._notice = self._notice, None
        return notice

    def put_back(self, word: Word) -> None:
        """It could not be said: it comes before what was added meanwhile."""
        if isinstance(word, TellEvent):
            if len(self._events) < MAX_EVENTS:
                self._events.appendleft(word)
        elif self._notice is None:
            self._notice = word
        elif word.goes_back:
            self._notice = replace(self._notice, goes_back=True)
        elif word.step > self._notice.step and not self._notice.goes_back:
            self._notice = word


logger = logging.getLogger(__name__)

CLOSING_S = 2.0
"""How long the end of a manager waits until all is told."""


class Announcer:
    """Takes what is to be told, and returns at once; a thread that lives while there is something says it. Whatever
    goes wrong, no save or load notices.

    What could not be said, as when the master is being started again, is logged once and said with the next.

    Args:
        coordinator_url: as `CheckpointManager` takes it.
        series: of the checkpoints.
        writer: whose they are.
        place: where they are, as a path or address.

    Raises:
        UsageError: it is no address of a coordinator.
    """

    def __init__(self, coordinator_url: str | Coordinator | None, series: str, writer: Writer, place: str) -> None:
        self._coordinator = named_coordinator(coordinator_url)
        if isinstance(self._coordinator, str):
            parse_coordinator(self._coordinator)
        self._series = series
        self._writer = writer
        self._place = place
        self._unsaid = Unsaid()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_speaking = False
        self._is_failing = False
        self._pid = os.getpid()

    def written(self, manifest: Manifest) -> None:
        """There is a checkpoint. Of one that another rank wrote that rank tells."""
        if manifest.writer == self._writer.name:
            self._say_where(manifest)

    def went_back_to(self, manifest: Manifest) -> None:
        """The checkpoints after this one, whoever wrote it, were discarded."""
        self._say_where(manifest, goes_back=True)

    def event(self, event: WorkerEvent, reason: str) -> None:
        """Something went wrong, for the event log of the job."""
        self._say(lambda space, worker_id: TellEvent(space=space, worker_id=worker_id, event=event, reason=reason))

    def close(self, timeout_s: float = CLOSING_S) -> None:
        """Wait, but not for long, until all is told; what could not be told before is tried once more."""
        if os.getpid() != self._pid:
            return
        with self._lock, suppress(RuntimeError):  # no thread begins at the interpreter's end
            if self._unsaid:
                self._begin()
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _say_where(self, manifest: Manifest, *, goes_back: bool = False) -> None:
        self._say(
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

    def _say(self, make: Callable[[str, str], Word]) -> None:
        if self._coordinator is None or os.getpid() != self._pid:
            return
        try:
            identity = discover()
            word = make(identity.space, worker_of_rank(identity, self._writer.rank, self._writer.world_size))
            with self._lock:
                self._unsaid.add(word)
                self._begin()
        except Exception as error:  # a rank that changed, no thread at the interpreter's end: the save is safe
            self._failed(error)

    def _begin(self) -> None:
        """The lock is held."""
        if not self._is_speaking:
            self._thread = threading.Thread(target=self._run, name="checkpoint-announcer", daemon=True)
            self._thread.start()
            self._is_speaking = True

    def _run(self) -> None:
        coordinator: Coordinator | None = None
        is_own = is_reached = True
        while (word := self._next(is_reached)) is not None:
            try:
                if coordinator is None:
                    coordinator, is_own = open_coordinator(self._coordinator)
                expected: type[MasterAnswer] = Done if isinstance(word, TellEvent) else CheckpointResponse
                coordinator.ask(word, expected)
                self._is_failing = False
            except Exception as error:
                self._failed(error)
                if isinstance(error, CoordinatorError) and error.code == "bad-request":
                    continue  # it would be refused again
                is_reached = False
                with self._lock:
                    self._unsaid.put_back(word)
        if coordinator is not None and is_own:
            coordinator.close()

    def _next(self, is_reached: bool) -> Word | None:
        with self._lock:
            word = self._unsaid.take() if is_reached else None
            self._is_speaking = word is not None
            return word

    def _failed(self, error: Exception) -> None:
        if not self._is_failing:
            logger.warning("event=checkpoint-not-told error=%s: %s", type(error).__name__, error)
        self._is_failing = True
