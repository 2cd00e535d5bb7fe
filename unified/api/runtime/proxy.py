"""An object in another worker, called as if it were here."""

from __future__ import annotations

import functools
from typing import Any, TypeVar, cast

from unified.api.runtime.actors import actor_named
from unified.bus.registry import RpcMark, marked_methods
from unified.errors import nearest
from unified.worker.context import current_worker

T = TypeVar("T")


class UserRpcProxy:
    """Stands for an object that its owner exported with `export_rpc_instance(ns, obj)`.

    It has the `@rpc` methods of the object's class. A sync method blocks and returns the value; an ``async def`` method
    returns an awaitable.

    Args:
        owner: worker that has the object: full name, ``role-rank``, or a role's name for its rank 0.
        name: namespace of the export; None or empty for one without.
        cls: class of the object, or a base of it that declares the methods.

    Raises:
        UsageError: (a ValueError) the job has no such worker.
        NotInWorkerError: this process is not a worker.
    """

    def __init__(self, owner: str, name: str | None, cls: type) -> None:
        self._owner = actor_named(owner).name
        self._ns = name
        self._cls = cls
        for attribute, mark in marked_methods(cls).items():
            setattr(self, attribute, functools.wraps(getattr(cls, attribute))(functools.partial(self._invoke, mark)))

    def _invoke(self, mark: RpcMark, *args: Any, **kwargs: Any) -> Any:
        method = f"{self._ns}.{mark.name}" if self._ns else mark.name
        future = current_worker().bus.call(self._owner, method, args, kwargs)
        return future if mark.is_async else future.result()

    def __getattr__(self, name: str) -> Any:
        hint = nearest(name, vars(self))
        raise AttributeError(f"{vars(self).get('_cls')!r} has no @rpc method {name!r}.{hint}")

    def __repr__(self) -> str:
        return f"UserRpcProxy({self._owner!r}, {self._ns!r}, {self._cls.__name__})"


def create_rpc_proxy(owner: str, name: str | None, cls: type[T]) -> T:
    """A `UserRpcProxy`, typed as the class that it stands for."""
    return cast(T, UserRpcProxy(owner, name, cls))
