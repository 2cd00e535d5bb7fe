"""Stream of results: the caller's side of a call whose handler is a generator.

The callee's side is `unified.bus.streams.generator`; neither touches a socket. Messages, all with the call's id, and
the envelope's `count`::

    caller                                 callee
    CALL                    ───────►       calls the function and gets a generator
                            ◄───────       STREAM
                            ◄───────       ITEM  count=0, 1, 2 …: its place in the stream
    MORE  count=n           ───────►       n items have been consumed in all, so WINDOW_ITEMS beyond that may be sent
    CANCEL                  ───────►       early close, deadline, or the caller's handle was dropped
                            ◄───────       RESULT (of None) count=n: all n items were sent; or ERROR

After STREAM the call stays open in the table, so that its deadline and the death of its target still end it. Only the
user refers to the stream, so a dropped stream is collected, and that ends it. Items come in the order of one
connection, on one thread at a time; the **caller's** endpoint holds no lock of its own then. It gives the feed these
functions:

- `send_more(n)`: send MORE with count=n; it may be called on any thread, an event loop's too, and must neither block
  nor raise. If the relay gives the MORE back, the endpoint calls ``feed.fail(error)``, and sends CANCEL.
- `cancel()`: does the same as cancelling the call's future.
- `abandon()`: the same, but called by the garbage collector, perhaps inside the endpoint's own lock: it may only do
  what is safe there, such as `unified.threads.SerialWorker.put`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from unified.bus.buffers import Buffer, size_of
from unified.bus.codec.codec import decode
from unified.bus.transport.unix_connection import UnixConnection
from unified.errors import ProtocolError, RpcError, UsageError
from unified.values import ClosedOnExit

WINDOW_ITEMS = 16
"""Most items that a callee may be ahead of its caller."""
WINDOW_BYTES = 64 * 1024 * 1024
"""Unconsumed bytes from which no further item is sent; a single item may have any size."""


class Unread(Protocol):
    """An error that nobody has read yet, logged when this object is collected."""

    def was_read(self) -> bool:
        """Note that the error was read; return False if that was known."""


class Awaited(Protocol):
    """Something that a thread can wait for: a call, or the next item of a stream."""

    @property
    def link(self) -> UnixConnection | None:
        """Connection that the answer or item comes on, where a waiting thread can receive it itself; else None."""

    @property
    def what(self) -> str:
        """The call in words."""


def waited_in_vain(awaited: Awaited) -> UsageError:
    """Make the error of a thread that waits for a message that it alone could receive."""
    return UsageError(
        f"{awaited.what} was waited for on a thread that its answer needs (in a done callback, in a signal handler, or "
        "while a value is unpickled): it would wait for ever. Wait in another thread, or chain callbacks."
    )


class Host(Protocol):
    """The endpoint, as futures and streams that wait see it."""

    def before_wait(self, awaited: Awaited, task: int = 0) -> object:
        """Note that this thread, or its task with this id, begins to wait; `after_wait` needs the result. UsageError:
        it would wait for ever."""

    def after_wait(self, token: Any) -> None:
        """Note that the wait is over."""

    def failed(self, what: str | tuple[str, str], error: BaseException) -> Unread | None:
        """Return the object that a future holds until somebody reads its `error`; None: the error needs no reader."""


class _StreamItem(NamedTuple):
    body: Buffer
    buffers: list[Buffer]
    nbytes: int


class StreamFeed:
    """Buffer of a stream: the endpoint puts its messages in, and one `RpcStream` reads them.

    For `send_more`, `cancel` and `abandon` see the module's docstring. `link` is the connection that the items come on,
    where a waiting thread can receive them itself. The host is told of threads and tasks that wait for an item.
    """

    def __init__(
        self,
        what: str,
        *,
        send_more: Callable[[int], object],
        cancel: Callable[[], object],
        abandon: Callable[[], object],
        link: UnixConnection | None = None,
        host: Host | None = None,
    ) -> None:
        self.what = what
        self.reader_thread = self.reader_task = 0
        """Ident of the thread that read last, or opened the stream, and id of its task."""
        self.is_over = False
        """True once the stream has ended, failed or been closed: earlier items may still be here."""
        self._send_more = send_more
        self._cancel = cancel
        self.abandon = abandon
        self.link = link
        self._host = host
        self._items: deque[_StreamItem] = deque()
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._num_waiting = 0
        self._sleepers: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._num_pushed = 0
        self._num_taken = 0
        self._num_acknowledged = 0
        """Number of consumed items that the callee knows of."""
        self._bytes_untold = 0

    @property
    def is_drained(self) -> bool:
        """True once the stream is over, and all that came has been taken."""
        with self._changed:
            return self.is_over and not self._items and self._error is None

    def push(self, index: int, body: Buffer, buffers: list[Buffer]) -> None:
        """Add an ITEM. A repeated item is ignored; a gap ends the stream, because the relay dropped an item."""
        with self._changed:
            if self.is_over or index < self._num_pushed:
                return
            is_next = index == self._num_pushed
            if is_next:
                self._num_pushed += 1
                self._items.append(_StreamItem(body, buffers, size_of(body, buffers)))
                self._wake()
        if not is_next:
            self.fail(self._lost(f"item {index} came instead"))
            self._cancel()

    def end(self, num_items: int) -> None:
        """Note that the generator has ended, after `num_items` items."""
        is_all = num_items == self._num_pushed
        self._finish(None if is_all else self._lost(f"there were {num_items}"))

    def fail(self, error: BaseException) -> None:
        """End the stream in `error`, which is raised after the items that came before; unless the stream is over."""
        self._finish(error)

    def close(self) -> None:
        """Close the stream for its consumer, who wants no more."""
        with self._changed:
            was_over, self.is_over = self.is_over, True
            self._items.clear()
            self._error = None
            self._wake()
        if not was_over:
            self._cancel()

    def take(self) -> _StreamItem | None:
        """Return the next item, or None if there is none now. RpcError: the stream ended in it; raised once."""
        with self._changed:
            if not self._items:
                error, self._error = self._error, None
                if error is None:
                    return None
                try:
                    raise error
                finally:
                    error = None  # else a reference cycle: traceback, frame, error
            item = self._items.popleft()
            self._num_taken += 1
            self._bytes_untold += item.nbytes
            num_acknowledged = self._tell()
        if num_acknowledged:
            self._send_more(num_acknowledged)
        return item

    def open(self, item: _StreamItem) -> Any:
        """Decode an item. One that cannot be read here (modules are missing, or it is corrupt) ends the stream in an
        RpcError."""
        try:
            return decode(item.body, item.buffers)
        except ProtocolError as error:
            self.close()
            raise RpcError(f"an item of {self.what} cannot be read here: {error}") from error

    def wait(self) -> bool:
        """Wait for something to take; return False if there never will be. UsageError: this thread must not wait."""
        if self._has_news():
            return not self.is_drained
        token = None if self._host is None else self._host.before_wait(self)
        link = self.link
        try:
            if link is not None:
                if link.reader == threading.get_ident():
                    raise waited_in_vain(self)
                link.receive_until(self._has_news, None)
            self._sleep()
        finally:
            if self._host is not None:
                self._host.after_wait(token)
        return not self.is_drained

    async def wait_async(self) -> bool:
        """Wait as `wait` does, in a task."""
        if self._has_news():
            return not self.is_drained
        token = None if self._host is None else self._host.before_wait(self, id(asyncio.current_task()))
        if self.link is not None:
            self.link.attach()  # no thread is going to wait for it
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        try:
            with self._changed:
                if not self._has_news():
                    self._sleepers.append((loop, woken))
                else:
                    woken.set_result(None)
            await woken
        finally:
            with self._changed, contextlib.suppress(ValueError):
                self._sleepers.remove((loop, woken))
            if self._host is not None:
                self._host.after_wait(token)
        return not self.is_drained

    def _has_news(self) -> bool:
        return bool(self._items) or self.is_over

    def _sleep(self) -> None:
        link = self.link
        if link is not None:
            link.want()
        try:
            with self._changed:
                self._num_waiting += 1
                try:
                    self._changed.wait_for(self._has_news)
                finally:
                    self._num_waiting -= 1
        finally:
            if link is not None:
                link.unwant()

    def _finish(self, error: BaseException | None) -> None:
        with self._changed:
            if not self.is_over:
                self.is_over, self._error = True, error
                self._wake()

    def _wake(self) -> None:
        if self._num_waiting:
            self._changed.notify_all()
        sleepers, self._sleepers = self._sleepers, []
        for loop, woken in sleepers:
            with contextlib.suppress(RuntimeError):  # its loop has been closed
                loop.call_soon_threadsafe(_set, woken)
        if self.link is not None and self.link.reader not in (0, threading.get_ident()):
            self.link.wake()

    def _tell(self) -> int:
        """Return the number of consumed items once every half window, which keeps both sides busy; otherwise 0."""
        half = 2 * (self._num_taken - self._num_acknowledged) >= WINDOW_ITEMS or 2 * self._bytes_untold >= WINDOW_BYTES
        if self.is_over or not half:
            return 0
        self._num_acknowledged, self._bytes_untold = self._num_taken, 0
        return self._num_acknowledged

    def _lost(self, evidence: str) -> RpcError:
        return RpcError(f"item {self._num_pushed} of {self.what} was lost on its way: {evidence}.")


def _set(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


T = TypeVar("T")


class RpcStream(Generic[T], Iterator[T], AsyncIterator[T], ClosedOnExit):
    """Stream of the items that a generator yields in another worker: iterate with ``for`` or ``async for``, once.

    The generator runs at most `WINDOW_ITEMS` items ahead, then waits. The deadline of the call holds for the whole
    stream. Items that came before an error are delivered before it is raised. Closing, leaving a ``with`` block, or
    dropping the last reference tells the generator to stop: it sees `GeneratorExit` at its ``yield``.

    Raises:
        RemoteError: the generator raised; the error is also an instance of the raised class.
        WorkerDiedError, RpcTimeoutError, RpcCancelledError, BusOverloadedError: as their names say.

    Attributes:
        what: the call in words.
    """

    def __init__(self, feed: StreamFeed) -> None:
        self._feed = feed
        self.what = feed.what

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        feed = self._feed
        feed.reader_thread, feed.reader_task = threading.get_ident(), 0
        while (item := feed.take()) is None:
            if not feed.wait():
                raise StopIteration
        value: T = feed.open(item)
        return value

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        feed = self._feed
        feed.reader_thread, feed.reader_task = threading.get_ident(), id(asyncio.current_task())
        while (item := feed.take()) is None:
            if not await feed.wait_async():
                raise StopAsyncIteration
        value: T = feed.open(item)
        return value

    def close(self) -> None:
        """Close the stream: stop the generator, and drop items that have come already. Never waits."""
        self._feed.close()

    async def aclose(self) -> None:
        """Close the stream, for `contextlib.aclosing`."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        feed = getattr(self, "_feed", None)  # none, if __init__ was not reached
        if feed is not None and not feed.is_over:
            feed.abandon()

    def __reduce__(self) -> Any:
        raise TypeError(f"the stream of {self.what} cannot be sent to another process: send what is read from it.")

    def __repr__(self) -> str:
        return f"<RpcStream of {self.what}>"
