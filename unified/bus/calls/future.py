"""Futures of calls: the standard future, which can also be awaited."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from concurrent.futures._base import CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED, PENDING
from typing import TYPE_CHECKING, Any, TypeVar

from unified.bus.streams.stream import Host, Unread, waited_in_vain
from unified.bus.transport.unix_connection import UnixConnection
from unified.errors import RpcCancelledError, RpcTimeoutError

T = TypeVar("T")
_LONGEST_SLEEP_S = 3600.0
"""Longest single wait for a lock: Python refuses very long ones."""
_ENDED = (FINISHED, CANCELLED, CANCELLED_AND_NOTIFIED)


class RpcFuture(Future[T]):
    """Future of a call: a `concurrent.futures.Future`, so that ``result()``, ``add_done_callback``,
    ``concurrent.futures.wait`` and ``asyncio.wrap_future`` work, and an awaitable.

    The future ends in the handler's value or in one of the errors under `unified.errors.RpcError`. An error that nobody
    reads is logged when the future is collected, or its worker ends. Callbacks run on a thread of the bus, or on one
    that waits for another answer of the same worker. They must be short, and must not wait for a call to that worker.

    The standard future makes a lock and a condition at once; most calls need neither. This class makes them on demand.

    Attributes:
        deadline: of the call, on this process's monotonic clock; None if it has none.
    """

    # Class attributes hold the state of an open call: there are many futures, and few set all of these.
    _state = PENDING
    _result: Any = None
    _exception: BaseException | None = None
    _made_condition: threading.Condition | None = None
    _waiters: list[Any]
    _done_callbacks: list[Callable[[Any], object]]
    """Made with the condition, as `_waiters` is: without it nobody uses them."""
    _is_wanted = False
    """True if the bus must receive the answer even if no thread waits for it."""
    _wants: object = None
    """Set once the link knows that, by the first of two threads that try."""
    link: UnixConnection | None = None
    """Connection that the answer comes on, where a waiting thread can receive it itself; else None."""
    parts: Sequence[Future[Any]] = ()
    """Futures that this one waits for."""
    _unread: Unread | None = None
    watcher = 0
    """Ident of the thread that waits with `concurrent.futures.wait` or `as_completed`, where `is_watched`."""

    def __init__(
        self,
        what: str | tuple[str, str] = "a call",
        *,
        deadline: float | None = None,
        host: Host | None = None,
        on_cancel: Callable[[], object] | None = None,
    ) -> None:
        self._what = what
        self.deadline = deadline
        self._host = host
        self._on_cancel = on_cancel

    @property
    def what(self) -> str:
        """The call in words, for messages."""
        what = self._what
        return what if isinstance(what, str) else call_in_words(*what)

    if TYPE_CHECKING:
        _condition: threading.Condition  # `concurrent.futures.as_completed` uses it
    else:

        @property
        def _condition(self) -> threading.Condition:
            self.watcher = threading.get_ident()
            self.be_received()
            return self._make_condition()

    def done(self) -> bool:
        """Return True if the call has ended."""
        if self._state in _ENDED:
            return True
        if not self._is_wanted:  # a caller that polls does not receive the answer itself
            self.be_received()
        return False

    def has_ended(self) -> bool:
        """Return True if the call has ended. Unlike `done`, this does not have the bus receive the answer."""
        return self._state in _ENDED

    @property
    def is_watched(self) -> bool:
        """True while a thread waits with `concurrent.futures.wait` or `as_completed`."""
        return self._made_condition is not None and bool(self._waiters)

    def comes_on(self, link: UnixConnection) -> None:
        self.link = link
        if self._is_wanted:
            self.be_received()

    def be_received(self, *, at_once: bool = True) -> None:
        """Have the bus receive the answer, for a user that is notified and may not wait. Unless `at_once`, leave
        messages alone that are held back to share a write, perhaps with this call."""
        self._is_wanted = True
        for part in self.parts:
            if isinstance(part, RpcFuture):
                part.be_received(at_once=at_once)
        link, mine = self.link, object()
        if link is None or self._state in _ENDED or self.__dict__.setdefault("_wants", mine) is not mine:
            return
        if at_once:
            link.release()
        link.want()
        if self._state in _ENDED:
            self._unwant_link()

    def on_end(self, fn: Callable[[Future[T]], object]) -> None:
        """Add a done callback. Somebody must wait for the future, or call `be_received`."""
        with self._make_condition():
            if self._state not in _ENDED:
                self._done_callbacks.append(fn)
                return
        fn(self)

    def _make_condition(self) -> threading.Condition:
        condition = self._made_condition
        if condition is None:
            made = threading.Condition()
            waiters: list[Any] = []
            callbacks: list[Callable[[Any], object]] = []
            with _making:
                condition = self._made_condition
                if condition is None:
                    self._waiters, self._done_callbacks = waiters, callbacks
                    condition = self._made_condition = made
        return condition

    def _unwant_link(self) -> None:
        """Tell the connection that the answer is not wanted any more: once, even if two threads try."""
        if self.__dict__.pop("_wants", None) is not None and self.link is not None:
            self.link.unwant()

    def result(self, timeout: float | None = None) -> T:
        """Return the value, waiting for it for at most `timeout` seconds.

        Raises:
            RemoteError: the handler raised; the error is also an instance of the raised class.
            WorkerDiedError, RpcNotFoundError, RpcCancelledError, BusOverloadedError: as their names say.
            RpcTimeoutError: the call's deadline passed, or `timeout` did (then the call goes on).
        """
        if self._state != FINISHED:
            self._wait(timeout)
        if self._exception is not None:
            self.forgive()
            try:
                raise self._exception
            finally:
                self = None  # type: ignore[assignment]  # else a reference cycle: traceback, future, error
        value: T = self._result
        return value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error that the call ended in, or None; waits as `result` does."""
        if self._state != FINISHED:
            self._wait(timeout)
        self.forgive()
        return self._exception

    def forgive(self) -> None:
        """Note that the error has been read, or need not be, so that it is not logged."""
        unread = self._unread
        if unread is not None:
            unread.was_read()

    def cancel(self) -> bool:
        """Give the call up: it ends in `RpcCancelledError`, and its handler is told. Returns False if it had ended."""
        if not self.has_ended():
            if self._on_cancel is not None:
                self._on_cancel()
            self.fail(RpcCancelledError(f"{self.what} was cancelled by its caller."))
        return self.cancelled()

    def cancelled(self) -> bool:
        """Return True if the call ended by being cancelled."""
        return isinstance(self._exception, RpcCancelledError)

    def fail(self, error: BaseException, later: list[RpcFuture[Any]] | None = None) -> None:
        """End in `error`, unless it has ended already. Done callbacks are called now. With `later`, the future is added
        there instead, and the caller calls `call_back`."""
        self._end(None, error, later)

    def call_back(self) -> None:
        """Call the done callbacks that `fail` left."""
        self._invoke_callbacks()  # type: ignore[attr-defined]  # of the standard future

    def succeed(self, value: T) -> None:
        """End in `value`, unless it has ended already."""
        self._end(value, None)

    def _end(self, value: Any, error: BaseException | None, later: list[RpcFuture[Any]] | None = None) -> None:
        """End the future; if two threads try, one of them does."""
        with _making:
            condition = self._made_condition
            if condition is None and not self._set(value, error):
                return
        if condition is not None:
            # `concurrent.futures.wait` holds the conditions of all its futures while it counts the ended ones. A future
            # that ended in between would be counted twice.
            with condition:
                if not self._set(value, error):
                    return
                for waiter in self._waiters:
                    if error is None:
                        waiter.add_result(self)
                    elif self.cancelled():  # FIRST_EXCEPTION does not count this
                        waiter.add_cancelled(self)
                    else:
                        waiter.add_exception(self)
                condition.notify_all()
        if self._wants:
            self._unwant_link()
        if self.link is not None:
            self.link.wake()
        for part in self.parts:
            if isinstance(part, RpcFuture) and part.link is not None:
                part.link.wake()
        if condition is None or not self._done_callbacks:
            return
        if later is None:
            self.call_back()
        else:
            later.append(self)

    def _set(self, value: Any, error: BaseException | None) -> bool:
        """Set the outcome, under a lock that excludes other threads; return False if it was set before."""
        if self._state in _ENDED:
            return False
        if error is not None and self._host is not None:
            self._unread = self._host.failed(self._what, error)
        self._result, self._exception = value, error
        self._state = FINISHED
        return True

    def _wait(self, timeout: float | None) -> None:
        until = None if timeout is None else time.monotonic() + timeout
        host = self._host
        token = None if host is None else host.before_wait(self)
        try:
            for part in self.parts:
                if isinstance(part, RpcFuture):
                    part.receive(until, self)
            self.receive(until, self)
            self._sleep(until)
        finally:
            if host is not None:
                host.after_wait(token)
        if not self.has_ended():
            raise RpcTimeoutError(f"{self.what} had not ended after {timeout} s of waiting; the call goes on.")

    def receive(self, until: float | None, whole: RpcFuture[Any]) -> None:
        """Receive the answer on this thread, if no other does, until this future, or `whole` around it, has ended."""
        link = self.link
        if link is None or self.has_ended() or whole.has_ended():
            return
        if link.reader == threading.get_ident():
            raise waited_in_vain(self)
        link.receive_until(self.has_ended if whole is self else lambda: self.has_ended() or whole.has_ended(), until)

    def _sleep(self, until: float | None) -> None:
        if self.has_ended():
            return
        if self.parts:  # other threads receive these now, and may stop at any time
            self.be_received()
        link = self.link
        if link is not None:
            link.want()
        try:
            condition = self._make_condition()
            with condition:
                while not self.has_ended():
                    left_s = None if until is None else until - time.monotonic()
                    if left_s is not None and left_s <= 0:
                        return
                    condition.wait(None if left_s is None else min(left_s, _LONGEST_SLEEP_S))
        finally:
            if link is not None:
                link.unwant()

    def __reduce__(self) -> Any:
        raise TypeError(f"the future of {self.what} cannot be sent to another process: send its result.")

    def __await__(self) -> Generator[Any, None, T]:
        return self.as_coroutine().__await__()

    async def as_coroutine(self) -> T:
        """Return a coroutine that waits for the call: `asyncio.run` and `create_task` take no other awaitable."""
        if not self.has_ended():
            token = None if self._host is None else self._host.before_wait(self, id(asyncio.current_task()))
            try:
                return await asyncio.wrap_future(self)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self.cancelled() and not (task is not None and task.cancelling()):
                    raise RpcCancelledError(str(self._exception)) from None  # the call was cancelled, not the task
                raise
            finally:
                if self._host is not None:
                    self._host.after_wait(token)
        return self.result()


_making = threading.RLock()
"""Lock that keeps a future from ending without a condition while one is being made. It is held so briefly that one lock
serves all futures. Reentrant: a finalizer that runs meanwhile may end another future."""


def call_in_words(method: str, target: str) -> str:
    return f"the call of {method!r} to worker {target}"


def gather(futures: Sequence[Future[T]], what: str) -> RpcFuture[list[T]]:
    """Return a future of all values in order, or of the first error as soon as there is one (the other calls go on).
    Cancelling the future cancels all calls."""

    def cancel_all() -> None:
        for future in futures:
            future.cancel()

    host = next((future._host for future in futures if isinstance(future, RpcFuture)), None)
    whole: RpcFuture[list[T]] = RpcFuture(what, on_cancel=cancel_all, host=host)
    if not futures:
        whole.succeed([])
    whole.parts = futures
    lock = threading.Lock()
    left = len(futures)

    def ended(future: Future[T]) -> None:
        nonlocal left
        error = future.exception()
        if error is not None:
            whole.fail(error)
            return
        with lock:
            left -= 1
            is_last = left == 0
        if is_last:
            whole.succeed([each.result() for each in futures])

    for future in futures:
        if isinstance(future, RpcFuture):
            future.on_end(ended)  # a thread that waits for `whole` receives it
        else:
            future.add_done_callback(ended)
    return whole
