"""Functions without a body that call a role: the stubs of a ``remote_call.py``.

A provider names a stub in `@rpc(name=stub)`. Other code imports the stub and calls it like any function::

    # remote_call.py
    from unified.api.runtime.remote_call import bind

    rollout = bind("rollout")

    @rollout
    def wake_up() -> None: ...

    @rollout
    def generate(prompts: list[str], length: int) -> FutureSequence[str]: ...
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

from unified.api.runtime.batch import is_cut
from unified.api.runtime.role_group import RoleGroup
from unified.bus.calls.registry import method_name
from unified.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])
To = Literal["all", "rank0", "batch", "stream"]
_KINDS: dict[str, To] = {
    "None": "all",
    "NoneType": "all",
    "FutureSequence": "batch",
    "RpcStream": "stream",
    "Iterator": "stream",
    "Iterable": "stream",
    "Generator": "stream",
    "AsyncIterator": "stream",
    "AsyncIterable": "stream",
    "AsyncGenerator": "stream",
}
"""Way to call a stub, by the name of the type that it returns; any other type means the result of rank 0."""
_FUTURES = ("RpcFuture", "Future", "Awaitable", "Coroutine")
_EMPTY_BODY = frozenset(
    (
        *("RESUME", "NOP", "CACHE", "NOT_TAKEN", "POP_TOP", "LOAD_CONST", "LOAD_COMMON_CONSTANT"),
        *("RETURN_CONST", "RETURN_VALUE", "RETURN_GENERATOR", "CALL_INTRINSIC_1", "RERAISE"),
    )
)
"""Instructions of a function that only returns None, or of a coroutine that does."""


def bind(role: str, *, to: To | None = None, timeout: float | None = None, retries: int = 0) -> Callable[[F], F]:
    """Return a decorator for stubs: a call of the stub calls the method of its name in the workers of `role`.

    The return annotation says how a stub is called, unless `to` says it:

    ======== ========================== ========================================================================
    `to`     annotated as returning     what a call does and returns
    ======== ========================== ========================================================================
    all      ``None``                   calls every worker and waits for all; returns None, or the list of their
                                        results if something else is annotated
    batch    ``FutureSequence[…]``      cuts the sequences among the arguments, as `RoleGroup.call_batch`
    stream   ``RpcStream[…]``,          calls rank 0, and iterates over what it yields
             ``Iterator[…]``
    rank0    anything else              calls rank 0 and waits for its result; for ``RpcFuture[…]``, returns the future
    ======== ========================== ========================================================================

    An ``async def`` stub returns a coroutine, and a type checker sees each stub's own signature.

    Args:
        role: the role whose workers are called.
        to: see above; None: the return annotation decides, and must be there.
        timeout: seconds to the deadline of each call; None: the job's default.
        retries: as for `RoleActor.with_options`.

    Raises:
        UsageError: the function has a body, which would never run; or neither `to` nor an annotation says how to call.
    """
    if to is not None and to not in get_args(To):
        raise UsageError(f"bind({role!r}, to={to!r}): `to` is one of {', '.join(get_args(To))}.")

    def decorate(stub: F) -> F:
        if not isinstance(stub, types.FunctionType):
            raise UsageError(f"bind({role!r}) makes a function call a role, not {stub!r}.")
        if not is_stub(stub):
            raise UsageError(
                f"{stub.__qualname__} has a body, which would never run: bind({role!r}) wants a stub, `def "
                f"{stub.__name__}(…) -> …: ...`. The body belongs to its provider, below @rpc(name={stub.__name__})."
            )
        how, is_future = (to, False) if to is not None else _how(stub)
        is_async = inspect.iscoroutinefunction(stub)
        returns_none = _returned(stub) in ("None", "NoneType", "")
        signature = _signature(stub)

        @functools.wraps(stub)
        def call(*args: Any, **kwargs: Any) -> Any:
            signature.bind(*args, **kwargs)  # raises TypeError for a wrong argument, before the call
            group = RoleGroup(role).with_options(timeout=timeout, retries=retries)
            name = method_name(call)
            if how == "stream":
                return group[0].stream(name, *args, **kwargs)
            if how == "batch":
                return group.call_batch(name, _size(stub, args, kwargs), *args, **kwargs)
            future = group.call(name, *args, **kwargs) if how == "all" else group.call_rank0(name, *args, **kwargs)
            if is_async:
                return _none_of(future.as_coroutine()) if how == "all" and returns_none else future.as_coroutine()
            if is_future:
                return future
            value = future.result()
            return None if how == "all" and returns_none else value

        return typing.cast(F, call)

    return decorate


def bind_module(role: str, module: types.ModuleType | str) -> list[str]:
    """Bind every stub of a module to a role, as `bind` does with one: for a ``remote_call.py`` of plain stubs.

    Call it at the end of that module, ``bind_module("rollout", __name__)``: a name that was imported from the module
    before stays a stub. Functions that have a body, or are bound already, stay as they are.

    Args:
        module: the module, or its name in `sys.modules`.

    Returns:
        the names of the functions that were bound.

    Raises:
        UsageError: the module has no stub, or one without a return annotation.
    """
    module = sys.modules[module] if isinstance(module, str) else module
    stubs = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, types.FunctionType) and value.__module__ == module.__name__ and is_stub(value)
    }
    if not stubs:
        raise UsageError(f"bind_module({role!r}): module {module.__name__!r} has no function whose body is `...`.")
    for name, stub in stubs.items():
        setattr(module, name, bind(role)(stub))
    return list(stubs)


def is_stub(function: types.FunctionType) -> bool:
    """Return True if the function's body is empty: ``...``, ``pass`` or a docstring."""
    return all(each.opname in _EMPTY_BODY for each in dis.get_instructions(function)) and all(
        constant is None or constant is ... or constant == function.__doc__ for constant in function.__code__.co_consts
    )


async def _none_of(awaitable: Any) -> None:
    await awaitable


def _how(stub: types.FunctionType) -> tuple[To, bool]:
    """Return how to call the stub, and whether its caller wants the future: its return annotation says both."""
    returned = _returned(stub)
    if not returned:
        raise UsageError(
            f"{stub.__qualname__} has no return annotation, which decides whether one worker or all are called: write "
            "`-> None: ...`, or bind(role, to='all'), 'rank0', 'batch' or 'stream'."
        )
    return _KINDS.get(returned, "rank0"), returned in _FUTURES


def _returned(stub: types.FunctionType) -> str:
    """Return the name of the annotated class, without its module and parameters; empty: no annotation."""
    annotation = _signature(stub).return_annotation
    if annotation is inspect.Signature.empty:
        return ""
    if not isinstance(annotation, str):
        origin = typing.get_origin(annotation) or annotation
        annotation = str(getattr(origin, "__name__", origin))
    name: str = annotation.partition("[")[0].rpartition(".")[2].strip()
    return name


def _signature(stub: types.FunctionType) -> inspect.Signature:
    """Return the signature. Its annotations may name classes that only a type checker imports."""
    if sys.version_info >= (3, 14):
        import annotationlib

        return inspect.signature(stub, annotation_format=annotationlib.Format.STRING)
    return inspect.signature(stub)


def _size(stub: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    for value in (*args, *kwargs.values()):
        if is_cut(value):
            return len(value)
    raise UsageError(f"{stub.__qualname__} is called as a batch, but none of its arguments is a sequence.")
