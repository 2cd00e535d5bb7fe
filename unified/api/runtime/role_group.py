"""Workers of a role, called one by one, all at once, or with a share of a batch each."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ParamSpec, TypeVar, overload

from unified.api.runtime.actors import actors_of
from unified.api.runtime.batch import check_lengths, share
from unified.api.runtime.future_sequence import FutureSequence
from unified.bus.futures import RpcFuture, gather
from unified.bus.registry import method_name
from unified.errors import UsageError
from unified.worker.context import ActorInfo, current_worker

P = ParamSpec("P")
R = TypeVar("R")


class RoleActor:
    """One worker of this job, to be called.

    Attributes:
        name: full name.
        rank: in its role.
        info: all that is known of it.
    """

    def __init__(self, info: ActorInfo) -> None:
        self.name = info.name
        self.rank = info.rank
        self.info = info

    @overload
    def call(
        self, method: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RpcFuture[R]: ...
    @overload
    def call(self, method: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> RpcFuture[R]: ...
    @overload
    def call(self, method: str, /, *args: Any, _timeout: float | None = None, **kwargs: Any) -> RpcFuture[Any]: ...
    def call(self, method: Any, /, *args: Any, **kwargs: Any) -> RpcFuture[Any]:
        """Call one of its `@rpc` methods and return at once.

        Arrays, tensors and large bytes must not be changed before the future has ended.

        Args:
            method: its name, or a function whose `@rpc` name, or own name, is meant.
            _timeout: seconds to the call's deadline; None: the job's default.
        """
        timeout = kwargs.pop("_timeout", None)
        return current_worker().bus.call(self.name, method_name(method), args, kwargs, timeout=timeout)

    def __repr__(self) -> str:
        return f"RoleActor({self.name!r})"


class RoleGroup(Sequence[RoleActor]):
    """The workers of a role, by rank; or of several roles, one after the other.

    Args:
        role: its name.
        optional: a role without workers, or that does not exist, gives an empty group instead of an error.
        name: of the group, for people; the roles' names if not given.
        roles: in place of `role`.

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
            raise UsageError("RoleGroup takes a role, or roles=[…]: one of them.")
        wanted = [role] if role is not None else list(roles or ())
        if not wanted and not optional:
            raise UsageError("RoleGroup got an empty list of roles.")
        self.name = name if name is not None else ",".join(wanted)
        self.actors = [RoleActor(info) for each in wanted for info in actors_of(each, optional=optional)]

    @overload
    def __getitem__(self, index: int) -> RoleActor: ...
    @overload
    def __getitem__(self, index: slice) -> list[RoleActor]: ...
    def __getitem__(self, index: int | slice) -> RoleActor | list[RoleActor]:
        return self.actors[index]

    def __len__(self) -> int:
        return len(self.actors)

    def __repr__(self) -> str:
        return f"RoleGroup({self.name!r}, {len(self)} actors)"

    @overload
    def call(
        self, method: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RpcFuture[list[R]]: ...
    @overload
    def call(self, method: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> RpcFuture[list[R]]: ...
    @overload
    def call(
        self, method: str, /, *args: Any, _scatter: bool = False, _timeout: float | None = None, **kwargs: Any
    ) -> RpcFuture[list[Any]]: ...
    def call(self, method: Any, /, *args: Any, **kwargs: Any) -> RpcFuture[list[Any]]:
        """Call a method of every actor; the results come in the group's order, or the first error at once.

        Args:
            method: its name, or a function whose `@rpc` name, or own name, is meant.
            _scatter: every argument is a list with one entry for each actor.
            _timeout: seconds to the calls' deadline; None: the job's default.

        Raises:
            UsageError: (a ValueError) `_scatter`, and an argument is no list of that length.
        """
        scatter, timeout = kwargs.pop("_scatter", False), kwargs.pop("_timeout", None)
        if scatter:
            self._check_scatter(args, kwargs)
        futures = []
        for i, actor in enumerate(self.actors):
            own_args = tuple(arg[i] for arg in args) if scatter else args
            own_kwargs = {key: arg[i] for key, arg in kwargs.items()} if scatter else kwargs
            futures.append(actor.call(method_name(method), *own_args, _timeout=timeout, **own_kwargs))
        return gather(futures, f"the call of {method_name(method)!r} to group {self.name}")

    @overload
    def call_rank0(
        self, method: Callable[P, Coroutine[Any, Any, R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> RpcFuture[R]: ...
    @overload
    def call_rank0(self, method: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> RpcFuture[R]: ...
    @overload
    def call_rank0(
        self, method: str, /, *args: Any, _timeout: float | None = None, **kwargs: Any
    ) -> RpcFuture[Any]: ...
    def call_rank0(self, method: Any, /, *args: Any, **kwargs: Any) -> RpcFuture[Any]:
        """Call a method of the first actor only.

        Raises:
            UsageError: (a ValueError) ``No actors in the role group.``
        """
        self._check_not_empty()
        return self.actors[0].call(method_name(method), *args, **kwargs)

    @overload
    def call_batch(
        self, method: Callable[P, Sequence[R]], size: int, /, *args: P.args, **kwargs: P.kwargs
    ) -> FutureSequence[R]: ...
    @overload
    def call_batch(
        self, method: Callable[P, Any] | str, size: int, /, *args: Any, **kwargs: Any
    ) -> FutureSequence[Any]: ...
    def call_batch(self, method: Any, size: int, /, *args: Any, **kwargs: Any) -> FutureSequence[Any]:
        """Give each actor a run of a batch.

        Lists, tuples, arrays, tensors and other sequences (but not strings and bytes) are cut into runs of
        ``ceil(size / number of actors)``; all other arguments go to every actor. An actor left without a run is not
        called. The method returns one result for each input.

        Args:
            method: its name, or a function whose `@rpc` name, or own name, is meant.
            size: of the batch, and so of each sequence among the arguments.

        Raises:
            UsageError: (a ValueError) ``No actors in the role group.``, or a sequence of another length.
        """
        self._check_not_empty()
        check_lengths(size, args, kwargs)
        run = math.ceil(size / len(self.actors))
        futures, lens = [], []
        for actor, start in zip(self.actors, range(0, size, run or 1), strict=False):
            end = min(start + run, size)
            own_kwargs = {key: share(value, start, end) for key, value in kwargs.items()}
            own_args = [share(value, start, end) for value in args]
            futures.append(actor.call(method_name(method), *own_args, **own_kwargs))
            lens.append(end - start)
        return FutureSequence(futures, lens)

    def _check_not_empty(self) -> None:
        if not self.actors:
            raise UsageError("No actors in the role group.")

    def _check_scatter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for where, value in [*((f"argument {i}", arg) for i, arg in enumerate(args)), *kwargs.items()]:
            if not isinstance(value, list | tuple):
                raise UsageError(f"_scatter: {where} is a {type(value).__name__}, not a list with one entry an actor.")
            if len(value) != len(self):
                raise UsageError(f"_scatter: {where} has {len(value)} entries for {len(self)} actors.")
