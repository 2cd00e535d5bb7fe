"""How the calls of groups, actors and proxies are made: deadline, retries, streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

from unified.bus.calls.future import RpcFuture
from unified.bus.calls.registry import method_name
from unified.bus.calls.retry import RetryPolicy, check_retries, with_retries
from unified.errors import UsageError
from unified.worker.context import current_worker

T = TypeVar("T")
Method = str | Callable[..., Any]


@dataclass(frozen=True)
class CallOptions:
    """What may be said of a call besides its arguments.

    Raises:
        UsageError: a value that makes no sense.
    """

    timeout: float | None = None
    """Seconds to the deadline, all attempts together; None: the job's default, `call_timeout_s`."""
    retries: int = 0
    """Attempts after the first, where a failure is worth one (`unified.bus.calls.retry`)."""

    def __post_init__(self) -> None:
        if self.timeout is not None and (
            not isinstance(self.timeout, int | float) or isinstance(self.timeout, bool) or not self.timeout > 0
        ):
            raise UsageError(f"timeout={self.timeout!r}: a number of seconds above 0 is wanted, or None.")
        if type(self.retries) is not int or self.retries < 0:
            raise UsageError(f"retries={self.retries!r}: a number from 0 up is wanted.")

    def but(self, timeout: float | None, retries: int | None) -> Self:
        """With these in place of its own, where they are not None."""
        if timeout is None and retries is None:
            return self
        return replace(
            self,
            timeout=self.timeout if timeout is None else timeout,
            retries=self.retries if retries is None else retries,
        )

    def taken_from(self, kwargs: dict[str, Any]) -> Self:
        """With `_timeout` and `_retries` of a call's keyword arguments, which are taken out."""
        if not kwargs:
            return self
        return self.but(kwargs.pop("_timeout", None), kwargs.pop("_retries", None))


DEFAULT_OPTIONS = CallOptions()


def begin(
    target: str, method: Method, args: Sequence[Any], kwargs: dict[str, Any], options: CallOptions
) -> RpcFuture[Any]:
    """Call a method of the worker `target` (its full name).

    Raises:
        UsageError: retries of a method that is known not to be idempotent; an argument that cannot be sent.
    """
    name = method_name(method)
    if options.retries:
        check_retries(method, options.retries)
    first = current_worker().bus.call(target, name, args, kwargs, timeout=options.timeout)
    return _retried(first, target, name, args, kwargs, options) if options.retries else first


def begin_all(
    targets: Sequence[str], method: Method, args: Sequence[Any], kwargs: dict[str, Any], options: CallOptions
) -> list[RpcFuture[Any]]:
    """Call the same of several workers; the arguments are encoded once."""
    check_retries(method, options.retries)
    name = method_name(method)
    futures = current_worker().bus.call_many(targets, name, args, kwargs, timeout=options.timeout)
    if not options.retries:
        return futures
    return [
        _retried(future, target, name, args, kwargs, options) for target, future in zip(targets, futures, strict=True)
    ]


def begin_each(
    targets: Sequence[str],
    method: Method,
    arguments: Sequence[tuple[Sequence[Any], dict[str, Any]]],
    options: CallOptions,
) -> list[RpcFuture[Any]]:
    """Call the same method of several workers with arguments of their own; if one cannot be sent, none is called."""
    check_retries(method, options.retries)
    name = method_name(method)
    futures = current_worker().bus.call_each(targets, name, arguments, timeout=options.timeout)
    if not options.retries:
        return futures
    return [
        _retried(future, target, name, args, kwargs, options)
        for future, target, (args, kwargs) in zip(futures, targets, arguments, strict=True)
    ]


def check_stream(options: CallOptions) -> None:
    """UsageError if a stream is to be retried: what was consumed of it cannot be taken back."""
    if options.retries:
        raise UsageError(f"retries={options.retries} was asked for a stream: begin a new one when one has failed.")


def _retried(
    first: RpcFuture[Any], target: str, name: str, args: Sequence[Any], kwargs: dict[str, Any], options: CallOptions
) -> RpcFuture[Any]:
    def again(left_s: float | None) -> RpcFuture[Any]:
        return current_worker().bus.call(target, name, args, kwargs, timeout=left_s, block=False)

    return with_retries(first, again, RetryPolicy(retries=options.retries))
