"""One worker of the job, found by role or by name, to be called."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Coroutine, Iterable
from typing import Any, ParamSpec, Self, TypeVar, overload

from unified.api.runtime.calling import (
    DEFAULT_OPTIONS,
    CallOptions,
    Generating,
    PromisedStream,
    UnboundMethod,
    begin,
    check_stream,
)
from unified.bus.calls.future import RpcFuture
from unified.bus.streams.stream import RpcStream
from unified.errors import UsageError, listed, nearest
from unified.job.names import parse_worker
from unified.worker.context import ActorInfo, current_worker

P = ParamSpec("P")
R = TypeVar("R")


class RoleActor:
    """One worker of this job, to be called.

    Attributes:
        name: full name.
        rank: rank in its role.
        info: all that is known of the worker.
        options: options of its calls (`with_options`).
    """

    def __init__(self, info: ActorInfo, options: CallOptions = DEFAULT_OPTIONS) -> None:
        self.name = info.name
        self.rank = info.rank
        self.info = info
        self.options = options

    def with_options(self, *, timeout: float | None = None, retries: int | None = None) -> Self:
        """Return the same worker, with other options for the calls through the returned object.

        Unlike `_timeout=` and `_retries=` in a call, this keeps the signature of a typed method.

        Args:
            timeout: seconds to the deadline of each call, all its attempts together, and of each stream.
            retries: attempts after the first, if the worker died and another incarnation may come, a connection broke,
                or too much was in flight. For methods marked ``@rpc(idempotent=True)``. For a method without a mark in
                this process (a stub, a name) the caller promises that it may run twice.

        Raises:
            UsageError: a value that makes no sense.
        """
        return type(self)(self.info, self.options.but(timeout, retries))

    @overload
    def call(
        self, method: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RpcFuture[R]: ...
    @overload
    def call(
        self, method: Callable[P, Generating[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RpcFuture[RpcStream[R]]: ...
    @overload
    def call(
        self, method: UnboundMethod[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RpcFuture[R]: ...
    @overload
    def call(
        self, method: UnboundMethod[P, Generating[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RpcFuture[RpcStream[R]]: ...
    @overload
    def call(self, method: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> RpcFuture[R]: ...
    @overload
    def call(self, method: UnboundMethod[P, R], /, *args: P.args, **kwargs: P.kwargs) -> RpcFuture[R]: ...
    @overload
    def call(
        self, method: str, /, *args: Any, _timeout: float | None = None, _retries: int | None = None, **kwargs: Any
    ) -> RpcFuture[Any]: ...
    def call(self, method: Any, /, *args: Any, **kwargs: Any) -> RpcFuture[Any]:
        """Call an `@rpc` method of the worker and return at once.

        Arrays, tensors and large bytes must not be changed before the future has ended.

        Args:
            method: name of the method, or a function: its `@rpc` name, or its own name, is used.
            _timeout: seconds to the call's deadline; None: that of `with_options`, or else the job's `call_timeout_s`.
            _retries: attempts after the first; None: those of `with_options`.

        Raises:
            UsageError: (a ValueError) an argument cannot be sent; or retries of a method that is not idempotent.
        """
        options = self.options.taken_from(kwargs)
        return begin(self.name, method, args, kwargs, options)

    @overload
    def stream(
        self, method: Callable[P, AsyncIterable[R] | Iterable[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RpcStream[R]: ...
    @overload
    def stream(
        self, method: UnboundMethod[P, AsyncIterable[R] | Iterable[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RpcStream[R]: ...
    @overload
    def stream(self, method: str, /, *args: Any, _timeout: float | None = None, **kwargs: Any) -> RpcStream[Any]: ...
    def stream(self, method: Any, /, *args: Any, **kwargs: Any) -> RpcStream[Any]:
        """Call an `@rpc` method that is a generator, sync or async, and iterate over its items.

        Returns at once; reading the stream raises the errors::

            for token in actor.stream("generate", prompt):
                ...

        Args:
            method: name of the method, or a function: its `@rpc` name, or its own name, is used.
            _timeout: seconds to the deadline of the whole stream; None: as for `call`.

        Raises:
            UsageError: (a ValueError) an argument cannot be sent; or the options ask for retries: a stream has none.
        """
        options = self.options.taken_from(kwargs)
        check_stream(options)
        return PromisedStream(begin(self.name, method, args, kwargs, options))

    def __repr__(self) -> str:
        return f"RoleActor({self.name!r})"


def actors_of(role: str, *, optional: bool = False) -> list[ActorInfo]:
    """Return the workers of a role, by rank; UsageError if there are none, unless `optional`."""
    worker = current_worker()
    actors = worker.workers_of(role)
    if not actors and not optional:
        is_empty = role in worker.roles
        hint = " It has no workers." if is_empty else f"{nearest(role, worker.roles)} Roles: {listed(worker.roles)}."
        raise UsageError(f"No actors found for role '{role}'.{hint}")
    return actors


def actor_named(name: str) -> ActorInfo:
    """Return the worker of this full name or short name ``role-rank``, or rank 0 of the role of this name."""
    worker = current_worker()
    if name in worker.roles:
        return actors_of(name)[0]
    try:
        role, rank = parse_worker(name)
    except UsageError:
        raise UsageError(f"No actor is named '{name}'.{nearest(name, worker.roles)} {_known(worker.roles)}") from None
    for actor in worker.workers_of(role):
        if name in (actor.name, f"{role}-{actor.rank}"):
            return actor
    total = len(worker.workers_of(role))
    reason = f"Role '{role}' has no rank {rank}: its ranks are 0 to {total - 1}." if total else _known(worker.roles)
    raise UsageError(f"No actor is named '{name}'. {reason}")


def _known(roles: list[str]) -> str:
    return f"The job has the roles {', '.join(roles)}; write a role, role-rank or a full name."
