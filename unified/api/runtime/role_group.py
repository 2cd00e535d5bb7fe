"""Workers of a role, called one by one, all at once, or with a share of a batch each."""

from __future__ import annotations

import copy
import math
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, overload

from unified.api.runtime.batch import FutureSequence, check_lengths, share, size_of_batch
from unified.api.runtime.calling import (
    DEFAULT_OPTIONS,
    CallOptions,
    Generating,
    PromisedStream,
    UnboundMethod,
    begin_all,
    begin_each,
    check_stream,
)
from unified.api.runtime.engines import least_busy, urls_from_here
from unified.api.runtime.role_actor import RoleActor, actors_of
from unified.bus.calls.future import RpcFuture, gather
from unified.bus.calls.registry import method_name
from unified.bus.streams.stream import RpcStream
from unified.errors import UsageError
from unified.lazy import needed_by
from unified.weights.transfer_plan import BUCKET_BYTES

if TYPE_CHECKING:
    import torch

    from unified.weights.versions import SyncReport

P = ParamSpec("P")
R = TypeVar("R")


class RoleGroup(Sequence[RoleActor]):
    """The workers of a role, by rank; or of several roles, one after the other.

    Args:
        role: name of the role.
        optional: a role without workers, or that does not exist, gives an empty group instead of an error.
        name: name of the group, for people; the roles' names if not given.
        roles: names of several roles, in place of `role`.

    Attributes:
        options: options of its calls (`with_options`).
        synced: of the last `sync_weights`: the version, its `receivers`, and who was `left_out`, and why; else None.

    Raises:
        UsageError: (a ValueError) ``No actors found for role 'x'.``
        NotInWorkerError: this process is not a worker.
    """

    def __init__(
        self,
        role: str | None = None,
        optional: bool = False,
        *,
        name: str | None = None,
        roles: Sequence[str] | None = None,
    ) -> None:
        if (role is None) == (roles is None):
            raise UsageError("give RoleGroup either a role or roles=[…].")
        wanted = [role] if role is not None else list(roles or ())
        if not wanted and not optional:
            raise UsageError("RoleGroup got an empty list of roles.")
        self.name = name if name is not None else ",".join(wanted)
        self.options = DEFAULT_OPTIONS
        self.synced: SyncReport | None = None
        self.actors = [RoleActor(info) for each in wanted for info in actors_of(each, optional=optional)]

    def with_options(self, *, timeout: float | None = None, retries: int | None = None) -> Self:
        """Return the same workers, with other options for the calls through the returned group or its actors. For the
        arguments see `RoleActor.with_options`."""
        view = copy.copy(self)
        view.options = self.options.but(timeout, retries)
        view.actors = [actor.with_options(timeout=timeout, retries=retries) for actor in self.actors]
        return view

    @overload
    def __getitem__(self, index: int) -> RoleActor: ...
    @overload
    def __getitem__(self, index: slice) -> list[RoleActor]: ...
    def __getitem__(self, index: int | slice) -> RoleActor | list[RoleActor]:
        try:
            return self.actors[index]
        except IndexError:
            raise IndexError(
                f"RoleGroup({self.name!r})[{index}]: it has {len(self)} workers, numbered from 0."
            ) from None

    def __len__(self) -> int:
        return len(self.actors)

    def __repr__(self) -> str:
        return f"RoleGroup({self.name!r}, {len(self)} actors)"

    @overload
    def call(
        self, method: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RpcFuture[list[R]]: ...
    @overload
    def call(
        self, method: Callable[P, Generating[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RpcFuture[list[RpcStream[R]]]: ...
    @overload
    def call(
        self, method: UnboundMethod[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RpcFuture[list[R]]: ...
    @overload
    def call(
        self, method: UnboundMethod[P, Generating[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RpcFuture[list[RpcStream[R]]]: ...
    @overload
    def call(self, method: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> RpcFuture[list[R]]: ...
    @overload
    def call(self, method: UnboundMethod[P, R], /, *args: P.args, **kwargs: P.kwargs) -> RpcFuture[list[R]]: ...
    @overload
    def call(
        self,
        method: str,
        /,
        *args: Any,
        _scatter: bool = False,
        _timeout: float | None = None,
        _retries: int | None = None,
        **kwargs: Any,
    ) -> RpcFuture[list[Any]]: ...
    def call(self, method: Any, /, *args: Any, **kwargs: Any) -> RpcFuture[list[Any]]:
        """Call a method of every actor. The future has the results in the group's order, or the first error at once.

        The arguments are encoded once for all actors, and are in the shared memory of each host only once. If an
        argument cannot be sent, no actor is called.

        Args:
            method: name of the method, or a function: its `@rpc` name, or its own name, is used.
            _scatter: every argument is a list with one entry for each actor.
            _timeout, _retries: as for `RoleActor.call`, for each of the calls.

        Raises:
            UsageError: (a ValueError) with `_scatter`, an argument is no list with one entry for each actor; or as for
                `RoleActor.call`.
        """
        scatter = kwargs.pop("_scatter", False)
        options = self.options.taken_from(kwargs)
        futures = self._begin_all(method, args, kwargs, options, scatter)
        return gather(futures, f"the call of {method_name(method)!r} to group {self.name}")

    @overload
    def call_rank0(
        self, method: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RpcFuture[R]: ...
    @overload
    def call_rank0(
        self, method: Callable[P, Generating[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RpcFuture[RpcStream[R]]: ...
    @overload
    def call_rank0(
        self, method: UnboundMethod[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RpcFuture[R]: ...
    @overload
    def call_rank0(
        self, method: UnboundMethod[P, Generating[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RpcFuture[RpcStream[R]]: ...
    @overload
    def call_rank0(self, method: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> RpcFuture[R]: ...
    @overload
    def call_rank0(self, method: UnboundMethod[P, R], /, *args: P.args, **kwargs: P.kwargs) -> RpcFuture[R]: ...
    @overload
    def call_rank0(
        self, method: str, /, *args: Any, _timeout: float | None = None, _retries: int | None = None, **kwargs: Any
    ) -> RpcFuture[Any]: ...
    def call_rank0(self, method: Any, /, *args: Any, **kwargs: Any) -> RpcFuture[Any]:
        """Call a method of the first actor only, as `RoleActor.call` does.

        Raises:
            UsageError: (a ValueError) ``No actors in the role group.``
        """
        self._check_not_empty()
        result: RpcFuture[Any] = self.actors[0].call(method, *args, **kwargs)
        return result

    @overload
    def call_batch(
        self, method: Callable[P, Coroutine[Any, Any, Sequence[R]]], /, size: int, *args: P.args, **kwargs: P.kwargs
    ) -> FutureSequence[R]: ...
    @overload
    def call_batch(
        self, method: Callable[P, Sequence[R]], /, size: int, *args: P.args, **kwargs: P.kwargs
    ) -> FutureSequence[R]: ...
    @overload
    def call_batch(
        self,
        method: UnboundMethod[P, Coroutine[Any, Any, Sequence[R]]],
        /,
        size: int,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> FutureSequence[R]: ...
    @overload
    def call_batch(
        self, method: UnboundMethod[P, Sequence[R]], /, size: int, *args: P.args, **kwargs: P.kwargs
    ) -> FutureSequence[R]: ...
    @overload
    def call_batch(
        self,
        method: Callable[..., Any] | str,
        /,
        size: int,
        *args: Any,
        _timeout: float | None = None,
        _retries: int | None = None,
        **kwargs: Any,
    ) -> FutureSequence[Any]: ...
    def call_batch(self, method: Any, /, *args: Any, **kwargs: Any) -> FutureSequence[Any]:
        """Call a method of each actor with its run of a batch.

        Lists, tuples, arrays, tensors and other sequences (but not strings and bytes) are cut into runs of
        ``ceil(size / number of actors)``; all other arguments go to every actor. An actor left without a run is not
        called. The method must return one result for each input.

        Args:
            method: name of the method, or a function: its `@rpc` name, or its own name, is used.
            size: size of the batch, and so of each sequence among the arguments; by position or as ``size=``.
            _timeout, _retries: as for `RoleActor.call`, for each of the calls.

        Raises:
            UsageError: (a ValueError) ``No actors in the role group.``, or a sequence of another length.
        """
        self._check_not_empty()
        options = self.options.taken_from(kwargs)
        size, args = size_of_batch(args, kwargs)
        check_lengths(size, args, kwargs)
        run = math.ceil(size / len(self.actors))
        runs = [(start, min(start + run, size)) for start in range(0, size, run or 1)]
        arguments = [
            ([share(value, *ends) for value in args], {key: share(value, *ends) for key, value in kwargs.items()})
            for ends in runs
        ]
        targets = [actor.name for actor in self.actors[: len(runs)]]
        return FutureSequence(begin_each(targets, method, arguments, options), [end - start for start, end in runs])

    @overload
    def stream(
        self, method: Callable[P, AsyncIterable[R] | Iterable[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[RpcStream[R]]: ...
    @overload
    def stream(
        self, method: UnboundMethod[P, AsyncIterable[R] | Iterable[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[RpcStream[R]]: ...
    @overload
    def stream(
        self, method: str, /, *args: Any, _scatter: bool = False, _timeout: float | None = None, **kwargs: Any
    ) -> list[RpcStream[Any]]: ...
    def stream(self, method: Any, /, *args: Any, **kwargs: Any) -> list[RpcStream[Any]]:
        """Call a generator method of every actor: one stream each, in the group's order. See `RoleActor.stream`."""
        scatter = kwargs.pop("_scatter", False)
        options = self.options.taken_from(kwargs)
        check_stream(options)
        return [PromisedStream(future) for future in self._begin_all(method, args, kwargs, options, scatter)]

    def urls(self, *, require: int = 1, timeout: float = 1800.0) -> list[str]:
        """Return the addresses, such as ``http://127.0.0.1:20417``, of the group's engines that are ready, by rank.

        Engines listen on loopback unless their command has another ``--host``. An engine on another host is only
        listed if it listens there; `next` reaches all of them. After a restart on its node an engine has its address
        again.

        Args:
            require: number of engines to wait for.
            timeout: seconds of that wait.

        Raises:
            EngineError: there are fewer; names those that are not ready.
            UsageError: no engine can be reached from this host by its address.
        """
        return urls_from_here(self.actors, require, timeout)

    def next(self, *, timeout: float = 1800.0) -> RoleActor:
        """Return the worker of the group to which this process has the fewest open calls: a simple load balancer.

            text = RoleGroup("rollout").next().call("request", "POST", "/v1/completions", {"prompt": "…"}).result()

        Workers of engines count once their engine is ready.

        Args:
            timeout: seconds to wait until one of the engines is ready.

        Raises:
            EngineError: none was ready in time.
        """
        self._check_not_empty()
        return least_busy(self.actors, timeout)

    def sync_weights(
        self,
        weights: torch.nn.Module | Mapping[str, Any],
        *,
        version: int | None = None,
        name: str = "default",
        dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        timeout: float = 300.0,
        wait: bool = True,
        force: bool = False,
        collective: bool | None = None,
        require: int = 1,
    ) -> int:
        """Send a model to all workers of the group that have a `WeightsReceiver`.

        One rank calls this; or all ranks of an FSDP2 or DDP model call it together, like a collective. A worker that
        has no receiver, since it starts or has died, is left out, and the call does not wait for it. It gets the newest
        version from a member of its role when it makes its receiver, before the receiver can be used.

        Args:
            weights: a module, or a state dict. Wrappers of DDP and torch.compile are ignored. Sharded tensors (FSDP2,
                DTensor) are gathered bucket by bucket; tied tensors are sent once; non-tensor entries are sent, too.
            version: its number, from 1; None: one more than any worker of the group has.
            name: name of the receivers.
            dtype: floating-point tensors are cast to it; None: no cast.
            bucket_bytes: bytes that are gathered and sent at a time; a larger tensor is a bucket by itself.
            timeout: seconds for all of it, from the wait for receivers to the last answer.
            wait: True: return when every worker has the version. False: return when this process has a copy of its
                part. A thread then sends it, and the next call raises its errors.
            force: True: the version may be lower than that of a worker.
            collective: True: all ranks of the process group call this together. None: True if the model is a
                DistributedDataParallel or sharded.
            require: number of workers that must have the version: the call waits for so many receivers. For all of the
                group, give its length.

        Returns:
            The version, the same on every rank. `synced` says who has it.

        Raises:
            WeightsVersionError: a worker has a newer version, or gets this one from another sender.
            WeightsTimeoutError: a worker did not have it in time; the message says which, and why.
            WeightsError: a worker cannot have it; or the previous version, sent with ``wait=False``, did not arrive.
            UsageError: (a ValueError) ``No actors in the role group.``, or `weights` cannot be sent.
        """
        with needed_by("RoleGroup.sync_weights()"):
            from unified.weights.handshake import SyncOptions
            from unified.weights.sender import sync_weights  # imports torch

        order = SyncOptions(version, dtype, bucket_bytes, timeout, wait, force, collective, require)
        self.synced = sync_weights(self.name, [actor.info for actor in self.actors], weights, name, order)
        return self.synced.version

    def _begin_all(
        self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions, scatter: bool
    ) -> list[RpcFuture[Any]]:
        if not scatter:
            return begin_all([actor.name for actor in self.actors], method, args, kwargs, options)
        self._check_scatter(args, kwargs)
        arguments = [
            (tuple(arg[i] for arg in args), {key: arg[i] for key, arg in kwargs.items()}) for i in range(len(self))
        ]
        return begin_each([actor.name for actor in self.actors], method, arguments, options)

    def _check_not_empty(self) -> None:
        if not self.actors:
            raise UsageError("No actors in the role group.")

    def _check_scatter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for where, value in [*((f"argument {i}", arg) for i, arg in enumerate(args)), *kwargs.items()]:
            if not isinstance(value, list | tuple):
                raise UsageError(f"_scatter: {where} is a {type(value).__name__}, not a list with one entry per actor.")
            if len(value) != len(self):
                raise UsageError(f"_scatter: {where} has {len(value)} entries for {len(self)} actors.")
