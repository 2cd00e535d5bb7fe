"""The caller's end of a call: a standard future that can also be awaited."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

from unified.errors import RpcCancelledError, RpcError, RpcTimeoutError

T = TypeVar("T")


class RpcFuture(Future[T]):
    """What a call returns at once: a `concurrent.futures.Future`, so that ``result()``, ``add_done_callback``,
    ``concurrent.futures.wait`` and ``asyncio.wrap_future`` work, and an awaitable.

    It ends in the handler's value or in one of the errors under `unified.errors.RpcError`. Callbacks run on a thread of
    the bus: they must be short, and may not wait for another call.

    Attributes:
        deadline: of the call, on this process's monotonic clock; None if it has none.
        what: the call in words, for messages.
    """

    def __init__(
        self,
        what: str = "a call",
        *,
        deadline: float | None = None,
        on_cancel: Callable[[], object] | None = None,
        bus_threads: Collection[int | None] = (),
    ) -> None:
        super().__init__()
        self.what = what
        self.deadline = deadline
        self._on_cancel = on_cancel
        self._bus_threads = bus_threads

    def result(self, timeout: float | None = None) -> T:
        """The value, waiting for it for at most `timeout` seconds.

        Raises:
            RemoteError: the handler raised; also an instance of the class of what it raised.
            WorkerDiedError, RpcNotFoundError, RpcCancelledError, BusOverloadedError: as their names say.
            RpcTimeoutError: the call's deadline passed, or `timeout` did (then the call goes on).
        """
        self._check_may_wait()
        try:
            return super().result(timeout)
        except TimeoutError:
            if self.done():
                raise
            raise self._not_yet(timeout) from None

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the call ended in, or None if in a value; waits as `result` does."""
        self._check_may_wait()
        try:
            return super().exception(timeout)
        except TimeoutError:
            raise self._not_yet(timeout) from None

    def cancel(self) -> bool:
        """Give the call up: it ends in `RpcCancelledError`, and its handler is told. False if it has ended already."""
        if not self.done():
            if self._on_cancel is not None:
                self._on_cancel()
            self.fail(RpcCancelledError(f"{self.what} was cancelled by its caller."))
        return self.cancelled()

    def cancelled(self) -> bool:
        """Whether the call ended by being cancelled."""
        return self.done() and isinstance(super().exception(0), RpcCancelledError)

    def fail(self, error: BaseException) -> None:
        """End in `error`, unless it has ended already."""
        with contextlib.suppress(InvalidStateError):
            self.set_exception(error)

    def succeed(self, value: T) -> None:
        """End in `value`, unless it has ended already."""
        with contextlib.suppress(InvalidStateError):
            self.set_result(value)

    def __await__(self) -> Generator[Any, None, T]:
        return self._awaited().__await__()

    async def _awaited(self) -> T:
        try:
            return await asyncio.wrap_future(self)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.cancelled() and not (task is not None and task.cancelling()):
                raise RpcCancelledError(str(super().exception(0))) from None  # the call was cancelled, not the task
            raise

    def _check_may_wait(self) -> None:
        if not self.done() and threading.get_ident() in self._bus_threads:
            raise RpcError(
                f"{self.what} was waited for on the thread that its answer comes on (in a done callback, or while a "
                "value is unpickled): it would wait for ever. Wait in another thread, or chain callbacks."
            )

    def _not_yet(self, timeout: float | None) -> RpcTimeoutError:
        return RpcTimeoutError(f"{self.what} had not ended after {timeout} s of waiting; the call goes on.")


def gather(futures: Sequence[Future[T]], what: str) -> RpcFuture[list[T]]:
    """All values in order, or the first error as soon as there is one (the other calls go on). Cancelling it cancels
    them all."""

    def cancel_all() -> None:
        for future in futures:
            future.cancel()

    threads = {ident for future in futures if isinstance(future, RpcFuture) for ident in future._bus_threads}
    whole: RpcFuture[list[T]] = RpcFuture(what, on_cancel=cancel_all, bus_threads=threads)
    if not futures:
        whole.succeed([])
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
        future.add_done_callback(ended)
    return whole
