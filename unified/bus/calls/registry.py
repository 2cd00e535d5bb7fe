"""Registry of the functions of this process that other workers may call, with the properties of each."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, overload

from unified.bus.calls.concurrency import ConcurrencyLimit, InlinePolicy
from unified.errors import RpcNotFoundError, UsageError, listed, nearest
from unified.job.by_value import RPC_MARK

F = TypeVar("F", bound=Callable[..., Any])
MAX_NAMED = 50
RPC_THREAD = "__unified_rpc_thread__"  # attribute of a class that `@rpc(thread=…)` has marked
_RUNTIMES = ("unified.", "__queue__.")
"""Prefixes of the names of the runtime's own methods, which are not for users."""

EARLY = ("unified.attach", "unified.weights.", "unified.engine.")
"""Prefixes of methods that answer before the exports are complete: entry points have breakpoints, and load weights."""


class RpcMark(NamedTuple):
    """Mark that `@rpc` leaves on a function."""

    name: str
    is_async: bool
    is_stream: bool = False
    """True for a generator, sync or async, whose caller gets an iterator."""
    inline: bool = False
    concurrency: int | None = None
    group: str | None = None
    idempotent: bool = False
    thread: str | None = None


class MarkedOrDecorator(Protocol):
    """Result of bare `@rpc` on a function, or the decorator that `rpc(stub)` returns: types cannot tell which."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class MethodRegistry(dict[str, Callable[..., Any]]):
    """Functions by the name under which they are called."""

    on_missing: Callable[[str, Callable[[], object]], bool] | None = None
    """Function that gets the name of a missing method and a callback. If it returns True, it calls the callback when
    the method is there, or never will be."""

    owners: Sequence[object] = ()
    """Class and module of the entry point: if a missing method is an unmarked function there, the error says so."""

    def register(self, name: str, function: Callable[..., Any]) -> None:
        """Make `function` callable as `name`; ValueError: the name is taken."""
        if name in self:
            raise ValueError(f"RPC method '{name}' already registered.")
        self[name] = function

    def unregister(self, name: str) -> None:
        """Forget a name; one that is not registered is no error."""
        self.pop(name, None)

    def adopt(self, name: str, function: Callable[..., Any]) -> None:
        """Register a function that the runtime found by itself. It may be registered already, and a bound method
        replaces its own plain function (``@rpc(export=True)`` inside a class registers the plain one)."""
        there = self.get(name)
        if there == function or (there is not None and there is getattr(function, "__func__", None)):
            self[name] = function
            return
        self.register(name, function)

    def find(self, name: str, worker: str) -> Callable[..., Any]:
        """Return the function of this name; RpcNotFoundError: there is none."""
        function = self.get(name)
        if function is None:
            own = self.users_names()
            if any(inspect.isroutine(getattr(owner, name, None)) for owner in self.owners):
                raise RpcNotFoundError(
                    f"worker {worker}: {name!r} exists, but is not marked @rpc: put @rpc() above its definition. "
                    f"{_named(own) if own else ''}".rstrip()
                )
            raise RpcNotFoundError(f"worker {worker} has no rpc method {name!r}.{nearest(name, own)} {_named(own)}")
        return function

    def users_names(self) -> list[str]:
        """Return the names of the methods that user code registered, sorted."""
        return sorted(name for name in self if not is_runtimes(name))


def _named(names: list[str]) -> str:
    if not names:
        return "Nothing is registered there: is the function marked with @rpc, in the module of the entry point?"
    return f"Registered there: {listed(names, MAX_NAMED)}."


def is_runtimes(name: str) -> bool:
    """Return True if a method of this name is the runtime's own."""
    return name.startswith(_RUNTIMES)


RPC_REGISTRY = MethodRegistry()
"""The methods of this process."""


@overload
def rpc(name: Callable[..., Any], /) -> MarkedOrDecorator: ...
@overload
def rpc(
    name: str | Callable[..., Any] | None = None,
    export: bool = ...,
    *,
    inline: bool = ...,
    concurrency: int | None = ...,
    group: str | None = ...,
    idempotent: bool = ...,
    thread: Literal["main", "any"] | None = ...,
) -> Callable[[F], F]: ...
def rpc(
    name: Any = None,
    export: bool = False,
    *,
    inline: bool = False,
    concurrency: int | None = None,
    group: str | None = None,
    idempotent: bool = False,
    thread: Literal["main", "any"] | None = None,
) -> Any:
    """Mark a function or method as callable by other workers of the job.

    ``@rpc``, ``@rpc()``, ``@rpc("name")``, ``@rpc(stub)`` (the name is that of the function `stub`; see the
    ``remote_call.py`` pattern), ``@rpc(name=…, export=True)``. The runtime exports the marked functions of the entry
    point's module and the marked methods of its instance; with `export` the function is registered at once.

    A generator function, sync or async, is a stream: its caller iterates over what it yields while it runs.

    Args:
        name: name for callers; default: the function's own name.
        export: register it now.
        inline: run it on the receiving thread, one call after the other; for a handler of microseconds that never
            waits. It may return a `concurrent.futures.Future` to answer later. Beside a call of over 50 ms others run.
        concurrency: how many calls of it may run at once in one worker; default: as many as there are threads.
        group: the functions of a group together run one call at a time, or `concurrency` calls.
        idempotent: running it twice does no harm, so that a caller may ask for retries.
        thread: "main": run it in the main thread of a service, the thread that made the object; all such methods of a
            worker together run one call at a time. Above a class, this holds for its `@rpc` methods with a `self`
            that have no `thread` of their own. "any": as without it, in such a class.

    Raises:
        ValueError: `export` was asked for, and the name is taken; or options contradict each other.
    """
    if inline and (concurrency is not None or group is not None):
        raise UsageError(
            "@rpc(inline=True) runs on one thread, one call at a time: give it no concurrency and no group."
        )
    if concurrency is not None and (type(concurrency) is not int or concurrency < 1):
        raise UsageError(f"@rpc(concurrency={concurrency!r}): give a number of calls, 1 or more.")
    how = RpcMark("", False, False, inline, concurrency, group, idempotent, thread)
    if callable(name) and not export and how == RpcMark("", False) and not _is_bound(name, sys._getframe(1)):
        return _mark(name, None, how)  # bare @rpc: the function is being defined, so nothing is bound to it yet

    def decorate(function: F) -> F:
        if not callable(_plain(function)):
            raise TypeError(
                f"rpc(…) decorates a function, not {function!r}. (Given a function that has a name already, "
                "rpc takes it for a stub and returns a decorator.)"
            )
        if isinstance(function, type) and thread:
            setattr(function, RPC_THREAD, thread)
            return function
        _mark(function, method_name(name) if callable(name) else name, how)
        if export:
            export_rpc_method(method_name(function), _plain(function))
        return function

    return decorate


def method_name(method: str | Callable[..., Any]) -> str:
    """Return the name a method is called by: a string as it is, a function by its `@rpc` name or else its own."""
    if isinstance(method, str):
        return method
    mark = mark_of(method)
    if mark is not None:
        return mark.name
    name = getattr(method, "__name__", None)
    if not isinstance(name, str):
        raise TypeError(f"an rpc method is given by name or as a function, not as {method!r}.")
    return name


def mark_of(function: object) -> RpcMark | None:
    mark = getattr(_plain(function), RPC_MARK, None)
    return mark if isinstance(mark, RpcMark) else None


def export_rpc_method(name: str, func: Callable[..., Any]) -> None:
    """Make any function callable by other workers, as `name`.

    Raises:
        ValueError: ``RPC method 'x' already registered.``
    """
    RPC_REGISTRY.register(name, func)


def export_rpc_instance(ns: str | None, instance: Any) -> None:
    """Make the `@rpc` methods of an object callable as ``ns.method``, or as ``method`` when `ns` is None.

    A method that a subclass overrides without a mark of its own keeps the name that its base class gave it. For a
    module, the `@rpc` functions among its top-level names are exported.

    Raises:
        UsageError: (a ValueError) the object has no `@rpc` methods.
        ValueError: one of the names is taken.
    """
    if not adopt_instance(ns, instance):
        hint = ""
        if isinstance(instance, type):
            hint = f" It is a class: export an instance of it, {instance.__name__}(…)."
        raise UsageError(f"export_rpc_instance({ns!r}, {instance!r}): it has no method that is marked with @rpc.{hint}")


def adopt_instance(ns: str | None, instance: Any) -> int:
    """Export as `export_rpc_instance` does, but accept an object without `@rpc` methods; return their number."""
    if isinstance(instance, ModuleType):
        functions = {mark.name: function for function, mark in marked_functions(vars(instance))}
    else:
        methods = marked_methods(type(instance))
        functions = {mark.name: getattr(instance, attribute) for attribute, mark in methods.items()}
        for attribute, mark in methods.items():
            _check_thread(mark, mark.thread or getattr(type(instance), RPC_THREAD, None), attribute)
    for name, function in functions.items():
        RPC_REGISTRY.adopt(f"{ns}.{name}" if ns else name, function)
    return len(functions)


def export_rpc_module(module: ModuleType | Mapping[str, Any], registry: MethodRegistry = RPC_REGISTRY) -> None:
    """Make the `@rpc` functions among the top-level names of a module callable.

    Raises:
        ValueError: one of the names is taken by another function.
    """
    names = vars(module) if isinstance(module, ModuleType) else module
    for function, mark in marked_functions(names):
        registry.adopt(mark.name, function)


def marked_functions(names: Mapping[str, Any]) -> Iterator[tuple[Callable[..., Any], RpcMark]]:
    """Return the `@rpc` functions among the names of a module."""
    for value in list(names.values()):
        mark = mark_of(value) if inspect.isroutine(value) else None
        if mark is not None:
            yield value, mark


def marked_methods(cls: type) -> dict[str, RpcMark]:
    """Return the `@rpc` methods of a class by attribute, with the marks of the nearest class in its MRO."""
    found: dict[str, RpcMark] = {}
    for base in cls.__mro__:
        for attribute, value in vars(base).items():
            mark = mark_of(value)
            if mark is not None:
                found.setdefault(attribute, mark)
    return found


def is_async(function: Callable[..., Any]) -> bool:
    """Return True if a call of the function returns a coroutine."""
    mark = mark_of(function)
    if mark is not None:
        return mark.is_async and not mark.is_stream
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _mark(function: F, name: str | None, how: RpcMark) -> F:
    plain = _plain(function)
    is_async = inspect.iscoroutinefunction(plain) or inspect.isasyncgenfunction(plain)
    is_stream = inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain)
    if how.inline and (is_async or is_stream):
        raise UsageError(f"@rpc(inline=True) on {plain.__qualname__}: only a plain function can run inline.")
    mark = how._replace(name=name or plain.__name__, is_async=is_async, is_stream=is_stream)
    _check_thread(mark, mark.thread, plain.__qualname__)
    setattr(plain, RPC_MARK, mark)
    return function


def _check_thread(mark: RpcMark, thread: str | None, name: str) -> None:
    is_plain = not (mark.is_async or mark.inline or mark.group is not None or (mark.concurrency or 1) > 1)
    if thread not in (None, "any") and not (thread == "main" and is_plain):
        raise UsageError(
            f"@rpc(thread={thread!r}) of {name}: give 'main' or 'any'. The main thread runs one plain call at a time: "
            "the method cannot be `async def` or inline, and takes no group and no concurrency above 1. A method of a "
            "class that is marked 'main' runs elsewhere with @rpc(thread='any')."
        )


def _plain(function: Any) -> Any:
    """Return the function inside a staticmethod, classmethod or bound method."""
    return getattr(function, "__func__", function)


def _is_bound(function: Callable[..., Any], frame: FrameType) -> bool:
    """Return True if a name refers to the function already: it is a stub, and not being decorated."""
    value: object = sys.modules.get(getattr(function, "__module__", None) or "")
    for part in getattr(function, "__qualname__", "").split("."):
        value = inspect.getattr_static(value, part, None)
        value = getattr(value, "__func__", value)
    return any(each is function for each in (value, *frame.f_locals.values(), *frame.f_globals.values()))


class Method(NamedTuple):
    """A registered function, and the way to run it."""

    function: Callable[..., Any]
    is_async: bool
    is_inline: bool
    on_main: bool
    limit: ConcurrencyLimit[Any] | None
    inline_policy: InlinePolicy


def describe_method(name: str, function: Callable[..., Any], limits: dict[str, ConcurrencyLimit[Any]]) -> Method:
    """Describe a function. Its concurrency limit comes from the server's `limits`; a missing one is added there."""
    mark = mark_of(function) or RpcMark(name, False)
    limit, owner = None, getattr(function, "__self__", None)
    on_main = (mark.thread or inspect.getattr_static(owner, RPC_THREAD, None)) == "main"
    if on_main or mark.group is not None or mark.concurrency is not None:
        size = mark.concurrency or 1
        key = "the main thread" if on_main else f"method {name!r}" if mark.group is None else f"group {mark.group!r}"
        limit = limits.get(key)
        if limit is None:
            limit = limits[key] = ConcurrencyLimit(key, size)
        limit.size = min(limit.size, size)  # members of a group may have different numbers
    return Method(function, is_async(function), mark.inline, on_main, limit, InlinePolicy())
