"""A call whose handler is a generator: what its caller iterates over.

The caller's side is `unified.bus.streams.feed`, the callee's `unified.bus.streams.generator`; neither touches a socket.
The messages, all with the call's id, and what they carry in the envelope's `count`::

    caller                                 callee
    CALL                    ───────►       calls the function and gets a generator
                            ◄───────       STREAM
                            ◄───────       ITEM  count=0, 1, 2 …: its place in the stream
    MORE  count=n           ───────►       n items have been consumed in all, so WINDOW_ITEMS beyond that may be sent
    CANCEL                  ───────►       early close, deadline, or the caller's handle was dropped
                            ◄───────       RESULT (of None) count=n: all n items were sent; or ERROR

What the endpoint of the **caller** does, with no lock of its own held:

- STREAM, from the inbox that was asked, first time for this call: make a `StreamFeed`, end the call's future with
  ``RpcStream(feed)``, and keep the feed by call id. The call stays open in the table, so that its deadline and the
  death of its target still end it. Keep no reference to the future or the stream: that the user dropped it is noticed
  by its being collected.
- ITEM: ``feed.push(envelope.count, body, buffers)``. RESULT: ``feed.end(envelope.count)``, ERROR:
  ``feed.fail(rebuild(…))``; these two close the call. Items come in the order of one connection, on one thread at a
  time.
- whatever else ends the call (`FailCall`: death, deadline, cancellation, a lost route, the endpoint closing):
  ``feed.fail(error)``.
- `send_more(n)`: send MORE with count=n; it may be called on any thread, an event loop's too, and must neither block
  nor raise. A MORE that a relay gives back: ``feed.fail(error)``, and CANCEL.
- `cancel()`: what cancelling the call's future does.
- `abandon()`: the same, called by the garbage collector, which may be anywhere, inside the endpoint's own lock too: it
  may only do what is safe there, such as `unified.bus.errands.Errands.put`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from unified.bus.streams.feed import StreamFeed

T = TypeVar("T")


class RpcStream(Generic[T], Iterator[T], AsyncIterator[T]):
    """What a generator yields in another worker, as it comes: iterate with ``for`` or ``async for``, once.

    The generator runs at most `WINDOW_ITEMS` items ahead, then waits. The deadline of the call is one for the whole
    stream. Items that came before an error are delivered before it is raised. Closing, leaving a ``with`` block, or
    dropping the last reference tells the generator to stop: it sees `GeneratorExit` at its ``yield``.

    Raises:
        RemoteError: the generator raised; also an instance of the class of what it raised.
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
        """Want no more: the generator is told to stop, and what has come already is dropped. Never waits."""
        self._feed.close()

    async def aclose(self) -> None:
        """As `close`, for `contextlib.aclosing`."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        feed = getattr(self, "_feed", None)  # none, if __init__ was not reached
        if feed is not None and not feed.is_over:
            feed.abandon()

    def __reduce__(self) -> Any:
        raise TypeError(f"the stream of {self.what} cannot be sent to another process: send what is read from it.")

    def __repr__(self) -> str:
        return f"<RpcStream of {self.what}>"
