"""The server of a queue, in the worker that owns it: calls in, decisions by the core, answers out.

The handlers run on the receiving thread and take microseconds. A request that has to wait for an item, for room, or for
the journal is answered by a future, and holds no thread. Items are never decoded here.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote
from weakref import WeakValueDictionary

import msgspec

from unified.bus.calls.future import RpcFuture
from unified.bus.calls.registry import rpc
from unified.bus.endpoint import BusEndpoint
from unified.bus.streams.stream import Host
from unified.core.directory import Change, IncarnationDied
from unified.errors import QueueJournalError, QueueTakenError, UsageError
from unified.queue import items as packed
from unified.queue.core import messages
from unified.queue.core.queue import QueueCore
from unified.queue.journal import Journal, JournalFile
from unified.threads import TimerThread
from unified.worker.context import Worker
from unified.worker.progress import QUEUE_STATS

METHODS = ("attach", "put", "get", "done", "give_back", "end", "leave", "close", "stats")
_NO_ANSWER = object()
_Answer = tuple[RpcFuture[Any], Any]
logger = logging.getLogger(__name__)
CLAIM_WITHIN_S = 60.0


def method(queue: str, verb: str) -> str:
    """Return the name by which the owner's method is called over the bus."""
    return f"__queue__.{queue}.{verb}"


class QueueService:
    """The service of one queue. Any thread may call; nothing blocks.

    A method returns the answer, or a future of it. The answer to a put is None when all its items are in, else an
    `Outcome` and how many items went in. The answer to a get is a list of items, else an `Outcome`. Outcomes are sent
    as numbers.

    Args:
        size, max_bytes: see `QueueCore`.
        journal, fsync: for a durable queue, see `unified.queue.journal`; the file is opened here.
        host: notified of threads of this process that wait for an answer.

    Attributes:
        identity: identifies the queue's contents; a durable queue keeps it across its owner's incarnations.
    """

    def __init__(
        self,
        name: str,
        *,
        size: int,
        max_bytes: int | None = None,
        journal: Path | None = None,
        fsync: bool = False,
        host: Host | None = None,
    ) -> None:
        self.name = name
        file = None if journal is None else JournalFile(journal, name, fsync=fsync)
        self.identity = secrets.token_hex(8) if file is None else file.journal_id
        self._core = QueueCore(
            time.monotonic(),
            name=name,
            size=size,
            max_bytes=max_bytes,
            is_durable=file is not None,
            memory=None if file is None else file.memory(),
        )
        self._journal = None if file is None else Journal(file, name, self._fail)
        self._failure: QueueJournalError | None = None
        self._timer = TimerThread("queue-timer", self._pass_time, stays=True)
        self._lock = threading.Lock()
        self._request_ids = itertools.count()
        self._waiting: dict[int, RpcFuture[Any]] = {}
        self._host = host
        self._what = f"an answer of queue {name!r}"

    @property
    def is_durable(self) -> bool:
        return self._journal is not None

    @property
    def is_finished(self) -> bool:
        """True if the queue is closed, and all of it taken and done."""
        return self._core.is_finished

    @rpc(inline=True)
    def attach(self, handle: int, worker: str, incarnation: int) -> Any:
        """Make a handle known. Answer with the queue's identity, whether the queue is durable, and whether the handle's
        incarnation still counts as alive."""
        handles = self._core.state.handles
        return self._take(
            messages.HandleAttached(handle=handle, worker=worker, incarnation=incarnation),
            answer=lambda: [self.identity, self.is_durable, handle in handles],
        )

    @rpc(inline=True)
    def put(
        self, handle: int, number: int, below: int, items: list[packed.Packed] | None, wait_s: float, is_last: bool
    ) -> Any:
        weighed = None if items is None else packed.weighed(items)
        if self._journal is not None and weighed is not None:
            self._journal.check(weighed)
        event = messages.PutAsked(
            request_id=next(self._request_ids),
            handle=handle,
            number=number,
            below=below,
            items=weighed,
            wait_s=wait_s,
            is_last=is_last,
        )
        return self._take(event, event.request_id)

    @rpc(inline=True)
    def get(self, handle: int, consumer: int, number: int, received: int, max_items: int, wait_s: float) -> Any:
        event = messages.GetAsked(
            request_id=next(self._request_ids),
            handle=handle,
            consumer=consumer,
            number=number,
            received=received,
            max_items=max_items,
            wait_s=wait_s,
        )
        return self._take(event, event.request_id)

    @rpc(inline=True)
    def done(self, handle: int, consumer: int, number: int, count: int | None) -> Any:
        return self._take(messages.TakeDone(handle=handle, consumer=consumer, number=number, count=count))

    @rpc(inline=True)
    def give_back(self, handle: int, consumer: int, number: int, received: int) -> Any:
        return self._take(messages.TakeReturned(handle=handle, consumer=consumer, number=number, received=received))

    @rpc(inline=True)
    def end(self, handle: int, consumer: int, received: int) -> Any:
        """End a consumer that takes no more."""
        return self._take(messages.ConsumerEnded(handle=handle, consumer=consumer, received=received))

    @rpc(inline=True)
    def leave(self, handle: int) -> Any:
        """Drop a handle that sends no more requests."""
        return self._take(messages.HandleClosed(handle=handle))

    @rpc(inline=True)
    def close(self) -> Any:
        return self._take(messages.CloseAsked())

    @rpc(inline=True)
    def stats(self) -> dict[str, Any]:
        with self._lock:
            found: dict[str, Any] = msgspec.to_builtins(self._core.stats(time.monotonic()))
        return found

    def incarnation_ended(self, worker: str, incarnation: int) -> None:
        """End the handles of this incarnation and of all earlier ones."""
        with suppress(QueueJournalError):  # requests raise it, too
            self._take(messages.IncarnationEnded(worker=worker, incarnation=incarnation))

    def shut_down(self) -> None:
        """Commit what waits and end the threads. Callers that still wait get no answer until the process ends."""
        self._timer.close()
        if self._journal is not None:
            self._journal.close()

    def _take(
        self, event: messages.Event, request_id: int | None = None, *, answer: Callable[[], Any] = lambda: None
    ) -> Any:
        """Take an event in. Return the core's answer to this request or, without a request, `answer()`; or a future of
        it. The future of a durable queue ends with the commit."""
        with self._lock:
            if self._failure is not None:
                raise QueueJournalError(str(self._failure))
            actions = self._core.step(time.monotonic(), event)
            if self._journal is not None:
                answered, answers = self._hold_back(self._journal, actions, request_id, answer)
            else:
                answered, answers = self._sort(actions, request_id, answer)
        if (deadline := self._core.next_deadline) is not None:
            self._timer.set(deadline)
        self._answer(answers)
        return answered

    def _sort(
        self, actions: list[messages.Action], request_id: int | None, answer: Callable[[], Any]
    ) -> tuple[Any, list[_Answer]]:
        """Return the answer to this request, or a future of it, and the answers to waiting requests."""
        answered: Any = _NO_ANSWER if request_id is not None else answer()
        answers = []
        for action in actions:
            if action.request_id == request_id:  # type: ignore[union-attr]  # a core without a journal only answers
                answered = _content(action)
            else:
                answers.append(self._addressed(action))
        if answered is _NO_ANSWER and request_id is not None:
            answered = self._waiting[request_id] = RpcFuture(self._what, host=self._host)
        return answered, answers

    def _hold_back(
        self, journal: Journal, actions: list[messages.Action], request_id: int | None, answer: Callable[[], Any]
    ) -> tuple[RpcFuture[Any], list[_Answer]]:
        """Return a future of the answer, and the answers that may leave now: none that depend on an open commit."""
        future: RpcFuture[Any] = RpcFuture(self._what, host=self._host)
        if request_id is not None:
            self._waiting[request_id] = future
        records: list[messages.Record] = []
        answers: list[_Answer] = [] if request_id is not None else [(future, answer())]
        for action in actions:
            if isinstance(action, messages.AnswerPut | messages.AnswerGet):
                answers.append(self._addressed(action))
            else:
                records.append(action)
        if not records and (journal.is_idle or not answers):
            return future, answers
        journal.write(records, partial(self._answer, answers))
        return future, []

    def _addressed(self, action: messages.Action) -> _Answer:
        assert isinstance(action, messages.AnswerPut | messages.AnswerGet)
        return self._waiting.pop(action.request_id), _content(action)

    def _answer(self, answers: list[_Answer]) -> None:
        for place, (future, content) in enumerate(answers):
            try:
                if self._failure is None:
                    future.succeed(content)
                else:
                    future.fail(self._failure)
            except BaseException:  # a callback's SystemExit, for example: the others still need their answers
                self._answer(answers[place + 1 :])
                raise

    def _fail(self, error: QueueJournalError) -> None:
        """Fail from now on: the core's state is no longer the state that the next incarnation would resume."""
        with self._lock:
            self._failure = error
            waiting, self._waiting = list(self._waiting.values()), {}
        logger.error("event=queue-failed queue=%s reason=%r", self.name, str(error))
        self._answer([(future, None) for future in waiting])

    def _pass_time(self) -> None:
        with suppress(QueueJournalError):
            self._take(messages.QueueTick())


def _content(action: messages.Action) -> Any:
    """Return the answer in the form in which it is sent."""
    if isinstance(action, messages.AnswerGet):
        return (
            [item.payload for item in action.items] if action.outcome is messages.Outcome.DONE else int(action.outcome)
        )
    assert isinstance(action, messages.AnswerPut)
    return None if action.outcome is messages.Outcome.DONE else [int(action.outcome), action.num_in]


def claimed_name(queue: str) -> str:
    """Return the name of the job by which the queue's owner is found."""
    return f"queue/{queue}"


def journal_path(worker: Worker, queue: str) -> Path:
    """Return the default path of a durable queue's journal: beside the job's logs on this node, which outlive the
    worker."""
    if not worker.log_file:
        raise UsageError(
            f"queue {queue!r} is durable, and this worker has no log folder to keep it in: give it a path=."
        )
    return Path(worker.log_file).absolute().parent.parent / "queues" / f"{quote(queue, safe='')}.sqlite"


class KeptJournal(NamedTuple):
    """A journal that the owner's next incarnation has to find again, on any node."""

    path: Path
    begins_anew: bool
    """True: if it is not found, the queue starts empty."""

    def check(self, worker: Worker, queue: str) -> None:
        """Raise QueueJournalError if an earlier incarnation had a journal and there is none here."""
        last = worker.names.journal(claimed_name(queue))
        if last is None or self.begins_anew or self.path.exists():
            return
        raise QueueJournalError(
            f"the journal of the durable queue {queue!r} was {last.path} on node {last.node}, and this worker "
            f"({worker.bus.worker}, incarnation {worker.bus.incarnation}) finds no {self.path} on its node: what is in "
            "the journal would be lost. Bring the file here; or let the queue begin with nothing, by durable='anew'. "
            "With path= on a disk that all nodes see, a queue outlives the loss of a node."
        )


class QueueHost:
    """The queues that the worker of one endpoint owns; made by `host_of`."""

    def __init__(self, bus: BusEndpoint) -> None:
        self._bus = bus
        self._services: dict[str, QueueService] = {}
        self._lock = threading.Lock()
        bus.on_directory(self._on_directory)

    def find(self, queue: str) -> QueueService | None:
        """Return the service of a queue that this worker owns."""
        return self._services.get(queue)

    def open(
        self, worker: Worker, queue: str, make: Callable[[], QueueService], journal: KeptJournal | None = None
    ) -> None:
        """Own the queue that `make` makes, until the end of this incarnation.

        It replaces a queue of its name that this worker owns, if that queue is closed and finished.
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
            if old is not None:  # the new queue takes its place, and its names on the bus
                old.shut_down()
                atexit.unregister(old.shut_down)
            service: QueueService | None = None
            try:
                if journal is not None:
                    journal.check(worker, queue)
                service = make()
                if journal is not None:  # before anything is acknowledged
                    worker.names.keep_journal(claimed_name(queue), str(journal.path.absolute()), CLAIM_WITHIN_S)
            except BaseException:
                worker.names.release(claimed_name(queue))
                if service is not None:
                    service.shut_down()
                raise
            self._services[queue] = service  # before `_reap`, so that it misses no death
            self._reap(service)
            QUEUE_STATS[queue] = service.stats
            for verb in METHODS:
                self._bus.registry[method(queue, verb)] = getattr(service, verb)
        atexit.register(service.shut_down)

    def _reap(self, service: QueueService) -> None:
        """End incarnations that are in a journal and ended while nobody listened, earlier ones of this worker, too."""
        service.incarnation_ended(self._bus.worker, self._bus.incarnation - 1)
        for entry in self._bus.directory.entries:
            if (over := self._bus.directory.newest_over(entry.worker)) >= 0:
                service.incarnation_ended(entry.worker, over)

    def _on_directory(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if isinstance(change, IncarnationDied):
                for service in list(self._services.values()):
                    service.incarnation_ended(change.worker, change.incarnation)


_hosts: WeakValueDictionary[str, QueueHost] = WeakValueDictionary()
"""Hosts by inbox. An endpoint keeps its host alive, because the host listens to its directory."""
_making = threading.Lock()


def host_of(bus: BusEndpoint) -> QueueHost:
    """Return the queues that an endpoint's worker owns."""
    with _making:
        host = _hosts.get(bus.inbox_id)
        if host is None:
            host = _hosts[bus.inbox_id] = QueueHost(bus)
        return host
