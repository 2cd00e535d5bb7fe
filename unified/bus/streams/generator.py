"""The callee's side of a stream: a generator that runs while its caller has room (see `unified.bus.streams.stream`).

When a handler returned a generator, the **callee's** endpoint makes a `StreamSource` in the context of the call, and
has it run. The call has ended, and leaves its limit (`concurrency`, `group`), when `run` or `run_async` returns; they
do not raise. The endpoint closes the source on CANCEL, on the caller's death, and when the endpoint closes. It also
closes the source when the relay gives an ITEM back, or the connection to the relay breaks. Then the endpoint sends an
ERROR, because the caller may wait for lost items.

`send(kind, count, content, may_wait)` sends STREAM, ITEM, RESULT or ERROR on the route of the call, in the order in
which it is called. With `may_wait` it waits for room, and returns False if the peer is gone or the endpoint closes.
Without `may_wait` (on the event loop) it never waits; False means no room now: the source calls it again.

A sync generator stays on one thread from its first step to its last. While the thread waits for the caller, the pool
does not count it, as with a handler that waits for another call. Running each step on any free thread needs fewer
threads, but is wrong: between two steps a generator may hold state of its thread, such as ``torch.no_grad()``, the
current CUDA device, an ``RLock`` or a connection to SQLite. The next thread would lack it, and other handlers on the
first one would have it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator
from enum import Enum
from typing import Any, TypeGuard

from unified.bus.codec.codec import SerializedValue, encode
from unified.bus.executor import CallInterrupted, HandlerPool
from unified.bus.streams.stream import WINDOW_BYTES, WINDOW_ITEMS
from unified.core.backoff import Backoff
from unified.protocol.envelope import Kind

logger = logging.getLogger(__name__)
_SEND_AGAIN = Backoff(first_s=0.0002, limit_s=0.01, num_free=0)
Send = Callable[[Kind, int, SerializedValue, bool], bool]
AnyGenerator = Generator[Any, Any, Any] | AsyncGenerator[Any, Any]


class Step(Enum):
    SENT = "sent"
    """An item was sent; more may follow at once."""
    PARKED = "parked"
    """The caller is a whole window behind: wait for `more` or `close`."""
    ENDED = "ended"
    """The generator is closed, and the end was sent if anybody waits for it."""


def is_stream(value: object) -> TypeGuard[AnyGenerator]:
    """Return True if a handler that returned this value is a stream."""
    return inspect.isgenerator(value) or inspect.isasyncgen(value)


class StreamSource:
    """Runner of one generator for one caller.

    Args:
        send: see the module's docstring.
        describe: makes the body of an ERROR for an exception of the generator.
        what: the call in words, for logs.
        expires: deadline of the call, on this process's monotonic clock; None: none.
    """

    def __init__(
        self,
        generator: AnyGenerator,
        send: Send,
        *,
        describe: Callable[[BaseException], SerializedValue],
        what: str,
        expires: float | None = None,
    ) -> None:
        self._generator: Any = generator
        self._send = send
        self._describe = describe
        self._what = what
        self._expires = expires
        self._context = contextvars.copy_context()
        self._is_begun = False
        self._is_closed = False
        self._is_over = False
        self._changed = threading.Condition(threading.Lock())
        self._sizes: deque[int] = deque()
        """Bytes of the items that were sent and, as far as this side knows, not yet consumed."""
        self._bytes_ahead = 0
        self._num_sent = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._rung: asyncio.Event | None = None
        self._is_inside = False
        """True while the task waits for the generator's own awaits, not for room."""

    @property
    def is_async(self) -> bool:
        return inspect.isasyncgen(self._generator)

    @property
    def is_parked(self) -> bool:
        """True while the caller is so far behind that the generator does not go on."""
        return not self._is_over and not self._has_room()

    def more(self, num_consumed: int) -> None:
        """Note how many items the caller has consumed in all; from any thread."""
        with self._changed:
            while self._sizes and self._num_sent - len(self._sizes) < num_consumed:
                self._bytes_ahead -= self._sizes.popleft()
            self._ring()

    def close(self) -> None:
        """Have the running thread or task close the generator: nobody waits for it any more; from any thread."""
        with self._changed:
            self._is_closed = True
            self._ring()

    def advance(self) -> Step:
        """Run a sync generator to its next value, and send that, if there is room for one."""
        if self._is_over:
            return Step.ENDED
        if not self._is_begun:
            self._is_begun = True
            if not self._send(Kind.STREAM, 0, _NOTHING, True):
                self.close()
        if self._is_unwanted():
            return self._drop()
        if not self._has_room():
            return Step.PARKED
        try:
            content = encode(self._context.run(next, self._generator), devices=True)
        except StopIteration:
            return self._end(Kind.RESULT, _NOTHING)
        except BaseException as error:  # the generator's own, or a value that cannot be sent
            self._close_generator()
            return self._end(Kind.ERROR, self._describe(_without_ours(error)))
        if self._is_unwanted() or not self._send(Kind.ITEM, self._note(content), content, True):
            return self._drop()
        return Step.SENT

    def run(self, pool: HandlerPool) -> None:
        """Run a sync generator to its end on this thread. While it waits, the thread does not count in its pool."""
        try:
            while (step := self.advance()) is not Step.ENDED:
                if step is Step.PARKED:
                    is_counted = pool.waits()
                    try:
                        self._wait()
                    finally:
                        if is_counted:
                            pool.waited()
        except CallInterrupted:
            self._drop()
        except BaseException:
            logger.exception("event=stream-failed what=%r", self._what)

    async def run_async(self) -> None:
        """Run an async generator to its end in this task."""
        with self._changed:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            self._rung = asyncio.Event()
        try:
            await self._run_async()
        except asyncio.CancelledError:
            if not self._is_closed:  # the loop is closing
                raise
        except BaseException:
            logger.exception("event=stream-failed what=%r", self._what)
        finally:
            self._is_over = True
            await self._close_async_generator()

    async def _run_async(self) -> None:
        if not await self._send_async(Kind.STREAM, 0, _NOTHING):
            return
        while await self._until_room():
            try:
                content = encode(await self._next_value(), devices=True)
            except StopAsyncIteration:
                kind, content = Kind.RESULT, _NOTHING
            except asyncio.CancelledError as error:
                if self._task is None or self._task.cancelling():
                    raise
                kind, content = Kind.ERROR, self._describe(_without_ours(error))
            except BaseException as error:
                await self._close_async_generator()
                kind, content = Kind.ERROR, self._describe(_without_ours(error))
            else:
                if not await self._send_async(Kind.ITEM, self._note(content), content):
                    return
                continue
            await self._send_async(kind, self._num_sent, content)
            return

    async def _next_value(self) -> Any:
        self._is_inside = True
        try:
            return await anext(self._generator)
        finally:
            self._is_inside = False

    async def _until_room(self) -> bool:
        """Wait for room; return False if nobody waits for the stream any more."""
        while not self._is_unwanted():
            if self._has_room():
                return True
            assert self._rung is not None
            self._rung.clear()
            if not self._has_room() and not self._is_closed:
                left_s = None if self._expires is None else max(self._expires - time.monotonic(), 0)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._rung.wait(), left_s)
        return False

    async def _send_async(self, kind: Kind, count: int, content: SerializedValue) -> bool:
        num_tries = 0
        while not self._is_unwanted():
            if self._send(kind, count, content, False):
                return True
            await asyncio.sleep(_SEND_AGAIN.delay_s(num_tries))
            num_tries += 1
        return False

    async def _close_async_generator(self) -> None:
        try:
            await self._generator.aclose()
        except BaseException:
            self._log_of_closing()

    def _wait(self) -> None:
        left_s = None if self._expires is None else max(self._expires - time.monotonic(), 0)
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._has_room(), left_s)

    def _has_room(self) -> bool:
        return len(self._sizes) < WINDOW_ITEMS and self._bytes_ahead < WINDOW_BYTES

    def _is_unwanted(self) -> bool:
        return self._is_closed or (self._expires is not None and time.monotonic() >= self._expires)

    def _note(self, content: SerializedValue) -> int:
        """Count an item that is about to be sent; return its place in the stream."""
        nbytes = content.nbytes
        with self._changed:
            self._sizes.append(nbytes)
            self._bytes_ahead += nbytes
            self._num_sent += 1
            return self._num_sent - 1

    def _ring(self) -> None:
        """Wake the thread or task that runs the generator, under `_changed`."""
        self._changed.notify_all()
        if self._loop is not None and not self._is_over:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        if self._is_closed and self._is_inside and self._task is not None:
            if not self._task.cancelling():
                self._task.cancel()
        elif self._rung is not None:
            self._rung.set()

    def _drop(self) -> Step:
        self._is_over = True
        self._close_generator()
        return Step.ENDED

    def _end(self, kind: Kind, content: SerializedValue) -> Step:
        self._is_over = True
        if not self._is_unwanted():
            self._send(kind, self._num_sent, content, True)
        return Step.ENDED

    def _close_generator(self) -> None:
        try:
            self._context.run(self._generator.close)
        except BaseException:
            self._log_of_closing()

    def _log_of_closing(self) -> None:
        logger.warning(
            "event=stream-not-closed what=%r: its generator raised while it was being closed", self._what, exc_info=True
        )


def _without_ours(error: BaseException) -> BaseException:
    """Return the error with a traceback that begins in the generator, without frames of this module."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals is globals():
        trace = trace.tb_next
    return BaseException.with_traceback(error, trace or error.__traceback__)


_NOTHING = encode(None)
