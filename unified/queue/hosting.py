"""The queues that one worker owns: their names claimed, their methods registered, the deaths of their users heard."""

from __future__ import annotations

import atexit
import secrets
import threading
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote
from weakref import WeakValueDictionary

from unified.bus.endpoint import BusEndpoint
from unified.errors import QueueTakenError, UsageError
from unified.protocol.records import DirectoryEntry, Reachability
from unified.queue.server import METHODS, QueueService, method
from unified.worker.context import Worker

CLAIM_WITHIN_S = 60.0


def claimed_name(queue: str) -> str:
    """Under which name of the job its owner is found."""
    return f"queue/{queue}"


def journal_path(worker: Worker, queue: str) -> Path:
    """Where a durable queue's journal is unless the user says so: beside the job's logs on this node, which outlive the
    worker.

    Raises:
        UsageError: this worker has no log there.
    """
    if not worker.log_file:
        raise UsageError(
            f"queue {queue!r} is durable, and this worker has no log folder to keep it in: give it a path=."
        )
    return Path(worker.log_file).absolute().parent.parent / "queues" / f"{quote(queue, safe='')}.sqlite"


class QueueHost:
    """Of one endpoint; `host_of` makes it."""

    def __init__(self, bus: BusEndpoint) -> None:
        self._bus = bus
        self._services: dict[str, QueueService] = {}
        self._lock = threading.Lock()
        bus.on_directory(self._on_directory)

    def find(self, queue: str) -> QueueService | None:
        """The service of a queue that this worker owns."""
        return self._services.get(queue)

    def open(
        self,
        worker: Worker,
        queue: str,
        *,
        size: int,
        max_bytes: int | None,
        journal: Path | None,
        fsync: bool,
    ) -> QueueService:
        """Own a queue from now on, to the end of this life.

        A queue of this worker that is closed and finished makes way for a new one of its name.

        Raises:
            QueueTakenError: it has an owner.
            QueueJournalError: the journal cannot be used.
            RpcTimeoutError: the master did not answer.
        """
        with self._lock:
            old = self._services.get(queue)
            if old is not None and not old.is_finished:
                raise QueueTakenError(
                    f"queue {queue!r} is owned by this very worker ({self._bus.worker}) already: use that DataQueue, "
                    "or make a second one without is_master."
                )
            try:
                worker.names.claim(claimed_name(queue), CLAIM_WITHIN_S)
            except UsageError as error:
                raise QueueTakenError(
                    f"queue {queue!r} cannot be made with is_master=True in worker {self._bus.worker}: {error} One "
                    "worker owns a queue; all others use it without is_master."
                ) from error
            if old is not None:
                self._end(old)
            try:
                service = QueueService(
                    queue,
                    size=size,
                    max_bytes=max_bytes,
                    journal=journal,
                    fsync=fsync,
                    identity=secrets.token_hex(8),
                    host=self._bus,
                )
            except BaseException:
                worker.names.release(claimed_name(queue))
                raise
            self._services[queue] = service  # first: it hears of deaths from here on
            self._bury(service)
            for verb in METHODS:
                self._bus.registry[method(queue, verb)] = getattr(service, verb)
        atexit.register(service.shut_down)
        return service

    def _end(self, service: QueueService) -> None:
        """Another one takes its place, and its names on the bus."""
        service.shut_down()
        atexit.unregister(service.shut_down)

    def _bury(self, service: QueueService) -> None:
        """Of the lives that a journal knows, those that ended while nobody listened: this worker's own among them."""
        service.life_ended(self._bus.worker, self._bus.incarnation - 1)
        for worker, _ in service.lives:
            entry = self._bus.life_of(worker)
            if entry is not None:
                self._hear(service, entry)

    def _on_directory(self, entries: Sequence[DirectoryEntry]) -> None:
        for service in list(self._services.values()):
            for entry in entries:
                self._hear(service, entry)

    @staticmethod
    def _hear(service: QueueService, entry: DirectoryEntry) -> None:
        is_alive = entry.state is Reachability.ALIVE
        service.life_ended(entry.worker, entry.incarnation - 1 if is_alive else entry.incarnation)


_hosts: WeakValueDictionary[str, QueueHost] = WeakValueDictionary()
"""By inbox. The endpoint keeps its own alive, as one that listens to its directory."""
_making = threading.Lock()


def host_of(bus: BusEndpoint) -> QueueHost:
    """The queues that an endpoint's worker owns."""
    with _making:
        host = _hosts.get(bus.inbox_id)
        if host is None:
            host = _hosts[bus.inbox_id] = QueueHost(bus)
        return host
