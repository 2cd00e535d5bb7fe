"""Retries of calls that have failed and may run twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from random import Random, SystemRandom
from typing import Any, TypeVar

from unified.bus.calls.future import RpcFuture
from unified.bus.calls.registry import RPC_REGISTRY, mark_of, method_name
from unified.core.backoff import Backoff
from unified.errors import RpcError, UsageError, WorkerDiedError
from unified.threads import DelayedCalls
from unified.values import Value

T = TypeVar("T")
BACKOFF = Backoff(first_s=0.05, limit_s=5.0, num_free=1)
"""Waits before retries after an overload or a broken connection."""


class RetryPolicy(Value, frozen=True, kw_only=True):
    """Policy of retries: which failures are worth another attempt, and when to make it. Pure.

    Retryable: the end of the callee's incarnation if another may come, a broken connection, and too many bytes in
    flight. Not retryable: an exception of the handler (even a WorkerDiedError of a call that it made), a deadline, a
    cancellation, and a method that does not exist.
    """

    retries: int
    """Attempts after the first."""
    backoff: Backoff = BACKOFF

    def delay_s(self, num_failed: int, error: BaseException, rng: Random | None = None) -> float | None:
        """Return the seconds to wait after `num_failed` attempts, the last of which ended in `error`; None: give up."""
        if num_failed > self.retries or not (isinstance(error, RpcError) and error.retryable):
            return None
        if isinstance(error, WorkerDiedError):
            return None if error.is_final else 0.0  # the call itself waits for the next incarnation
        return self.backoff.delay_s(num_failed, rng)


def check_retries(
    method: str | Callable[..., Any], retries: int, registry: Mapping[str, Callable[..., Any]] = RPC_REGISTRY
) -> None:
    """Check that a method may be retried.

    A function allows retries with ``@rpc(idempotent=True)``; a name is looked up in this process. For a method without
    a mark here (a stub, or one that only the callee has) the caller is trusted.

    Raises:
        UsageError: `retries` is no number from 0 up, or the method is known not to be idempotent.
    """
    if type(retries) is not int or retries < 0:
        raise UsageError(f"retries={retries!r} must be a whole number, 0 or more.")
    if not retries:
        return
    function = registry.get(method) if isinstance(method, str) else method
    mark = None if function is None else mark_of(function)
    if mark is not None and not mark.idempotent:
        raise UsageError(
            f"retries={retries} was asked for {method_name(method)!r}, which is not marked @rpc(idempotent=True): "
            "when a call fails its handler may have run, and would run again. Mark it if that does no harm."
        )


def with_retries(
    first: RpcFuture[T], again: Callable[[float | None], RpcFuture[T]], policy: RetryPolicy
) -> RpcFuture[T]:
    """Return a future of the first attempt that succeeds, or whose error is not worth another attempt.

    The deadline of the first call holds for all attempts together. Cancelling the future cancels the running attempt.
    An error after several attempts has a note with their number. `again(left_s)` begins another attempt with so many
    seconds left (None: no deadline); it should not wait for room.
    """
    return _Retried(first, again, policy).outer


class _Retried:
    def __init__(
        self, first: RpcFuture[Any], again: Callable[[float | None], RpcFuture[Any]], policy: RetryPolicy
    ) -> None:
        self._again = again
        self._policy = policy
        self._num_failed = 0
        self._attempt = first
        self.outer: RpcFuture[Any] = RpcFuture(first.what, deadline=first.deadline, host=first._host)
        self.outer.on_end(lambda _: self._attempt.cancel())  # `outer` has ended: no attempt is needed any more
        self.outer.parts = [first]
        Future.add_done_callback(first, self._on_ended)  # a thread that waits for `outer` receives the answer

    def _on_ended(self, attempt: Future[Any]) -> None:
        error = attempt.exception()
        if error is None:
            self.outer.succeed(attempt.result())
        else:
            self._on_failed(error)

    def _on_failed(self, error: BaseException) -> None:
        self._num_failed += 1
        delay_s = self._policy.delay_s(self._num_failed, error, SystemRandom())
        left_s = self._left_s()
        if delay_s is None or (left_s is not None and left_s <= delay_s):
            if self._num_failed > 1:
                error.add_note(f"That was attempt {self._num_failed} of at most {self._policy.retries + 1}.")
            self.outer.fail(error)
        elif not self.outer.done():
            LATER.call_after(delay_s, self._try_again)

    def _try_again(self) -> None:
        if self.outer.done():
            return
        try:
            attempt = self._again(self._left_s())
        except RpcError as error:
            self._on_failed(error)
            return
        except Exception as error:
            self.outer.fail(error)
            return
        self._attempt = attempt
        self.outer.parts = [attempt]
        if self.outer.done():
            attempt.cancel()
        attempt.add_done_callback(self._on_ended)

    def _left_s(self) -> float | None:
        deadline = self.outer.deadline
        return None if deadline is None else max(deadline - time.monotonic(), 0.0)


LATER = DelayedCalls("bus-retry")
