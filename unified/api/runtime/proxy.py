"""An object in another worker, called as if it were here."""

from __future__ import annotations

import functools
from typing import Any, TypeVar, cast

from unified.api.runtime.calling import CallOptions, PromisedStream, begin
from unified.api.runtime.role_actor import actor_named
from unified.bus.calls.registry import RpcMark, marked_methods
from unified.errors import UsageError, nearest

T = TypeVar("T")


class UserRpcProxy:
    """Proxy of an object that its owner exported with `export_rpc_instance(ns, obj)`.

    The proxy has the `@rpc` methods of the object's class. A sync method blocks and returns the value. An ``async def``
    method makes the call at once and returns a coroutine, to be awaited, or given to `asyncio.run` or `create_task`. A
    generator method returns an iterator at once, and an async one an async iterator. Reading it raises the errors.

    Attributes:
        owner, name, cls: as given; a method of the class with the same name hides the attribute.

    Args:
        owner: worker that has the object: full name, ``role-rank``, or a role's name for its rank 0.
        name: namespace of the export; None or empty: the export has none.
        cls: class of the object, or a base of it that declares the methods.
        timeout: seconds to the deadline of each call; None: the job's default.
        retries: attempts after the first, for the methods that are marked ``@rpc(idempotent=True)``; the others are
            called once.

    Raises:
        UsageError: (a ValueError) the job has no such worker; or `retries` is given, and no method may be retried.
        NotInWorkerError: this process is not a worker.
    """

    def __init__(self, owner: str, name: str | None, cls: type, timeout: float | None = None, retries: int = 0) -> None:
        self.owner = owner
        self.name = name
        self.cls = cls
        self._owner = actor_named(owner).name
        self._ns = name
        self._cls = cls
        self._options = CallOptions(timeout, retries)
        methods = marked_methods(cls)
        if retries and not any(_may_retry(mark) for mark in methods.values()):
            raise UsageError(
                f"retries={retries}: {cls.__name__} has no method that may be retried: one marked "
                "@rpc(idempotent=True) that is not a stream."
            )
        for attribute, mark in methods.items():
            setattr(self, attribute, functools.wraps(getattr(cls, attribute))(functools.partial(self._invoke, mark)))

    def _invoke(self, mark: RpcMark, *args: Any, **kwargs: Any) -> Any:
        method = f"{self._ns}.{mark.name}" if self._ns else mark.name
        options = self._options if _may_retry(mark) else CallOptions(self._options.timeout)
        future = begin(self._owner, method, args, kwargs, options)
        if mark.is_stream:
            return PromisedStream(future)
        return future.as_coroutine() if mark.is_async else future.result()

    def __getattr__(self, name: str) -> Any:
        hint = nearest(name, vars(self))
        raise AttributeError(f"{vars(self).get('_cls')!r} has no @rpc method {name!r}.{hint}", name=name)

    def __repr__(self) -> str:
        return f"UserRpcProxy({self._owner!r}, {self._ns!r}, {self._cls.__name__})"


def create_rpc_proxy(owner: str, name: str | None, cls: type[T], timeout: float | None = None, retries: int = 0) -> T:
    """Return a `UserRpcProxy`, typed as the class that it stands for."""
    return cast(T, UserRpcProxy(owner, name, cls, timeout, retries))


def _may_retry(mark: RpcMark) -> bool:
    return mark.idempotent and not mark.is_stream
