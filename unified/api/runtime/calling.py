"""Calls of groups, actors and proxies: deadlines, retries, and streams that may not have begun yet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, Protocol, Self, TypeVar

from unified.bus.calls.future import RpcFuture
from unified.bus.calls.registry import method_name
from unified.bus.calls.retry import RetryPolicy, check_retries, with_retries
from unified.bus.streams.stream import RpcStream
from unified.errors import UsageError
from unified.worker.context import current_worker

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R", covariant=True)
Method = str | Callable[..., Any]
Arguments = tuple[Sequence[Any], dict[str, Any]]
Generating = AsyncIterator[T] | Iterator[T]


class UnboundMethod(Protocol[P, R]):
    """A method of a class, such as ``Engine.generate``. Its `self` is not among the arguments of a call.

    Type checkers tell it from a function by the name of its first parameter.
    """

    def __call__(_, self: Any, *args: P.args, **kwargs: P.kwargs) -> R: ...


@dataclass(frozen=True)
class CallOptions:
    timeout: float | None = None
    """Seconds to the deadline, all attempts together; None: the job's default, `call_timeout_s`."""
    retries: int = 0
    """Attempts after the first, if the failure is worth another attempt (`unified.bus.calls.retry`)."""

    def __post_init__(self) -> None:
        if self.timeout is not None and (
            not isinstance(self.timeout, int | float) or isinstance(self.timeout, bool) or not self.timeout > 0
        ):
            raise UsageError(f"timeout={self.timeout!r} must be a number of seconds above 0, or None.")
        if type(self.retries) is not int or self.retries < 0:
            raise UsageError(f"retries={self.retries!r} must be a whole number, 0 or more.")

    def but(self, timeout: float | None, retries: int | None) -> Self:
        """Return options with these values; None keeps the value of this object."""
        if timeout is None and retries is None:
            return self
        return replace(
            self,
            timeout=self.timeout if timeout is None else timeout,
            retries=self.retries if retries is None else retries,
        )

    def taken_from(self, kwargs: dict[str, Any]) -> Self:
        """Remove `_timeout` and `_retries` from a call's keyword arguments, and return options with them."""
        if not kwargs:
            return self
        return self.but(kwargs.pop("_timeout", None), kwargs.pop("_retries", None))


DEFAULT_OPTIONS = CallOptions()


def begin(
    target: str, method: Method, args: Sequence[Any], kwargs: dict[str, Any], options: CallOptions
) -> RpcFuture[Any]:
    """Call a method of the worker `target` (its full name)."""
    name = method_name(method)
    if options.retries:
        check_retries(method, options.retries)
    first = current_worker().bus.call(target, name, args, kwargs, timeout=options.timeout)
    return _retried(first, target, name, args, kwargs, options) if options.retries else first


def begin_all(
    targets: Sequence[str], method: Method, args: Sequence[Any], kwargs: dict[str, Any], options: CallOptions
) -> list[RpcFuture[Any]]:
    """Call a method of several workers with the same arguments, which are encoded once."""
    name = method_name(method)
    if options.retries:
        check_retries(method, options.retries)
    futures = current_worker().bus.call_many(targets, name, args, kwargs, timeout=options.timeout)
    return _all_retried(futures, targets, name, [(args, kwargs)] * len(targets), options)


def begin_each(
    targets: Sequence[str], method: Method, arguments: Sequence[Arguments], options: CallOptions
) -> list[RpcFuture[Any]]:
    """Call the same method of several workers with arguments of their own; if one cannot be sent, none is called."""
    name = method_name(method)
    if options.retries:
        check_retries(method, options.retries)
    futures = current_worker().bus.call_each(targets, name, arguments, timeout=options.timeout)
    return _all_retried(futures, targets, name, arguments, options)


def check_stream(options: CallOptions) -> None:
    """Raise UsageError if the options ask for retries: items of a stream that were read cannot be taken back."""
    if options.retries:
        raise UsageError(f"retries={options.retries}: a stream cannot be retried; start a new stream after a failure.")


def _all_retried(
    futures: list[RpcFuture[Any]],
    targets: Sequence[str],
    name: str,
    arguments: Sequence[Arguments],
    options: CallOptions,
) -> list[RpcFuture[Any]]:
    if not options.retries:
        return futures
    calls = zip(futures, targets, arguments, strict=True)
    return [_retried(future, target, name, args, kwargs, options) for future, target, (args, kwargs) in calls]


def _retried(
    first: RpcFuture[Any], target: str, name: str, args: Sequence[Any], kwargs: dict[str, Any], options: CallOptions
) -> RpcFuture[Any]:
    def again(left_s: float | None) -> RpcFuture[Any]:
        return current_worker().bus.call(target, name, args, kwargs, timeout=left_s, block=False)

    return with_retries(first, again, RetryPolicy(retries=options.retries))


class PromisedStream(RpcStream[T]):
    """Stream of a call that may not be answered yet. Only reading waits for the answer."""

    def __init__(self, future: RpcFuture[Any]) -> None:
        self._future = future
        self._stream: RpcStream[T] | None = None
        self._is_over = False
        self.what = future.what

    def __next__(self) -> T:
        if self._is_over:
            raise StopIteration
        if self._stream is None:
            try:
                self._begin(self._future.result())
            except Exception:
                self._is_over = True
                raise
        assert self._stream is not None
        return next(self._stream)

    async def __anext__(self) -> T:
        if self._is_over:
            raise StopAsyncIteration
        if self._stream is None:
            try:  # shielded: a consumer that is cancelled may read on later
                self._begin(await asyncio.shield(asyncio.ensure_future(self._future)))
            except Exception:
                self._is_over = True
                raise
        assert self._stream is not None
        return await anext(self._stream)

    def close(self) -> None:
        """Stop the generator, or keep it from beginning. Never waits."""
        self._is_over = True
        if not self._future.cancel() and self._future.exception() is None:
            stream = self._future.result()
            if isinstance(stream, RpcStream):
                stream.close()

    def __del__(self) -> None:
        """Do nothing: the inner stream ends itself. If it is not here yet, only the endpoint will hold and drop it."""

    def _begin(self, stream: Any) -> None:
        if not isinstance(stream, RpcStream):
            raise UsageError(
                f"{self.what} returned {type(stream).__name__} instead of a stream: its handler is not a generator."
            )
        self._stream = stream
