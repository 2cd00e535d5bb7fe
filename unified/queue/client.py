"""`DataQueue`: a queue that workers of a job share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar

import msgspec

from unified.bus.calls.future import RpcFuture
from unified.errors import QueueClosedError, UnifiedError, UsageError
from unified.job.driver import is_text
from unified.queue.consumer import QueueConsumer, end_main_thread
from unified.queue.core.state import QueueStats
from unified.queue.items import pack
from unified.queue.owner_lookup import OwnerLookup
from unified.queue.producer import QueueProducer
from unified.queue.server import KeptJournal, QueueService, host_of, journal_path
from unified.worker.context import current_worker

T = TypeVar("T")
MAX_NAME_LENGTH = 190


class DataQueue(Generic[T]):
    """A bounded queue of the job: one worker owns it, any worker puts and takes.

    Items can be anything that an rpc argument can be. A consumer is one thread that uses one such object. It has the
    items that it took *on lease*: the lease ends with its next take, or with `task_done`. If the worker dies before
    that, the items go back to the front, so that each is done by one consumer. Threads may share an object; processes
    that user code forks may not.

    ::

        queue = DataQueue[Episode]("episodes", is_master=True, size=256)  # in one worker
        queue = DataQueue[Episode]("episodes")                            # in the others
        queue.put(episode)
        for episode in queue:                                             # until somebody closes it
            train(episode)

    Args:
        name: the queue's name in its job.
        is_master: this worker owns the queue, which is in its memory for the time of its incarnation.
        size: items that may wait in the queue; leased items do not count.
        durable: the owner keeps a journal, from which its next incarnation resumes: nothing that was acknowledged is
            lost, and meanwhile all others wait. Otherwise the queue is gone with the owner's incarnation. If an
            earlier incarnation's journal is not found, because its node was lost, `QueueJournalError` names node and
            path; with ``"anew"`` the queue then starts empty.
        path: the journal's file; default: a file beside the job's logs on the owner's node. If the owner may restart
            on another node, give a path that both nodes see.
        fsync: a durable queue acknowledges only what is on disk, so it survives a power failure, too.
        max_bytes: encoded bytes of items that may wait in the queue; None: no limit. One item always fits.
        owner_timeout: seconds to wait for an owner if there is none; also for an owner's answer, where no other time
            is given.

    Workers that do not own the queue give only `name`, `is_master` and `owner_timeout`.

    Raises:
        QueueTakenError: `is_master`, but the queue has an owner already.
        QueueJournalError: the journal cannot be used.
        NotInWorkerError: this process is not a worker.
    """

    def __init__(
        self,
        name: str,
        is_master: bool = False,
        size: int = 1000,
        *,
        durable: bool | Literal["anew"] = False,
        path: str | Path | None = None,
        fsync: bool = False,
        max_bytes: int | None = None,
        owner_timeout: float = 300.0,
    ) -> None:
        worker = current_worker()
        _check(name, size, max_bytes, is_master, durable=bool(durable), path=path, fsync=fsync)
        self.name = name
        self.is_master = is_master
        if is_master:
            journal = (Path(path) if path is not None else journal_path(worker, name)) if durable else None
            make = partial(QueueService, name, size=size, max_bytes=max_bytes, journal=journal, fsync=fsync)
            keep = KeptJournal(journal, begins_anew=durable == "anew") if journal is not None else None
            host_of(worker.bus).open(worker, name, partial(make, host=worker.bus), keep)
        self._lookup = OwnerLookup(worker, name, owner_timeout)
        self._producer = QueueProducer(self._lookup)
        self._consumer = QueueConsumer(self._lookup)
        worker.on_finish(end_main_thread)

    def put(self, *objs: T, timeout: float | None = None) -> None:
        """Put items in, and return when the last one is in. Wait while the queue is full, first come, first served.

        The items of one put stay together, in their order. Without room for all of them, they go in as room comes, and
        can be taken before the last one is in. Afterwards they may be changed: the queue has its own copies.

        Args:
            timeout: seconds to wait for room; None: for ever. A silent owner has 5 s more.

        Raises:
            QueueFullError: no room in time; its `num_put` says how many are in.
            QueueClosedError: the queue was closed; its `num_put` says how many are in.
            QueueLostError: the owner's incarnation ended.
            QueueNotFoundError: there is no owner; or it did not answer in time, and the items may be in.
            UsageError: an item cannot be sent, or is too large for a durable queue's journal; none of them is in.
        """
        if objs:
            self._producer.put([pack(obj) for obj in objs], timeout)

    def put_async(self, *objs: T) -> RpcFuture[None]:
        """Put items in without waiting: the future ends when the last item is in. Do not change large items before.

        Puts of one thread go in in the order of the calls, with one exception. If a connection breaks while the owner
        is alive, a put that has to be sent again may go in after later ones.

        The future can be waited for, awaited, and given callbacks. If it is cancelled, a put that is not yet on its way
        to the owner is not made; a put on its way may still go in.
        """
        if not objs:
            future: RpcFuture[None] = RpcFuture("a put of nothing")
            future.succeed(None)
            return future
        return self._producer.put_async([pack(obj) for obj in objs])

    def get(self, batch_size: int = 1, timeout: float | None = None) -> list[T]:
        """Take up to `batch_size` items, as soon as there is one. Items that this thread took before are done.

        When several consumers wait, they share the items that are there. Arrays are read-only: ``.copy()`` to write.

        Args:
            batch_size: 1 or more.
            timeout: seconds; None: for ever. When it is over, the list is empty. A silent owner has 5 s more; items
                that it may have handed out come with the next `get` of this thread.

        Raises:
            QueueClosedError: the queue is closed and empty, and no items are on lease.
            QueueLostError: the owner's incarnation ended.
            QueueNotFoundError: there is no owner; or for `owner_timeout` it has not answered any get.
            ProtocolError: an item cannot be read here, because its class cannot be imported. The next `get` brings the
                same items, unless `task_done` is called first.
        """
        if type(batch_size) is not int or batch_size < 1:
            raise UsageError(f"get({batch_size!r}): give a number of items, 1 or more.")
        return self._consumer.take(batch_size, timeout)

    def get_nowait(self, max_size: int = 1) -> list[T]:
        """Take the items that are there now, without waiting: an empty list if there are none, or no owner yet."""
        return self.get(max_size, timeout=0.0)

    def task_done(self, count: int | None = None) -> None:
        """Mark items that this thread took as done: if its worker dies now, nobody will do them again.

        Args:
            count: the number of further items, in the order in which they came; None: all.

        Raises:
            QueueNotFoundError: the owner has not answered for `owner_timeout`; also raised by `give_back`, `qsize`,
                `stats` and `close`.
        """
        self._consumer.done(count)

    def give_back(self) -> None:
        """Give back the items of this thread that are not done: they go to the front, for others."""
        self._consumer.give_back()

    def qsize(self) -> int:
        """Return the number of items that wait to be taken."""
        return self.stats().depth

    def stats(self) -> QueueStats:
        """Return depth, rates, leases, and the numbers of waiting puts and gets."""
        return msgspec.convert(self._consumer.ask("stats"), QueueStats)

    def close(self) -> None:
        """Close the queue for everybody: no more puts go in; consumers take the remaining items, and then end.

        Any worker may close it, and more than once.
        """
        self._consumer.ask("close")

    def __iter__(self) -> Iterator[T]:
        """Yield items until the queue is closed and all are taken. An item is done when the next one is requested."""
        for items in self.batches(1):
            yield from items

    def batches(self, batch_size: int) -> Iterator[list[T]]:
        """Yield lists of up to `batch_size` items until the queue is closed; iteration yields single items."""
        while True:
            try:
                items = self.get(batch_size)
            except QueueClosedError:
                return
            yield items

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Mark what this thread took as done, or, after an error, give it back. The owner closes the queue."""
        with nullcontext() if error is None else suppress(UnifiedError):  # the error of the user's code says more
            try:
                if error is None:
                    self.task_done()
                else:
                    self.give_back()
            finally:
                if self.is_master:
                    self.close()

    def __repr__(self) -> str:
        return f"DataQueue({self.name!r}{', is_master=True' if self.is_master else ''})"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} cannot be sent to another process: make a DataQueue({self.name!r}) in the worker that wants it."
        )


def _check(
    name: str, size: int, max_bytes: int | None, is_master: bool, *, durable: bool, path: object, fsync: bool
) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH or not is_text(name):
        raise UsageError(f"a queue's name is a text of 1 to {MAX_NAME_LENGTH} characters, not {name!r}.")
    if type(size) is not int or size < 1:
        raise UsageError(f"queue {name!r} was given size={size!r}: give a number of items, 1 or more.")
    if max_bytes is not None and max_bytes < 1:
        raise UsageError(f"queue {name!r} was given max_bytes={max_bytes!r}: give a number of bytes, 1 or more.")
    if (path is not None or fsync) and not durable:
        raise UsageError(f"queue {name!r} was given path= or fsync=, which only a durable queue has: add durable=True.")
    if durable and not is_master:
        raise UsageError(f"queue {name!r}: only its owner (is_master=True) gives durable=; leave it out here.")
