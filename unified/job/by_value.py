"""Pickles of objects without a name that others can import: lambdas, closures, and the classes of a script.

A class or function of a script pickles by the name ``__main__.Sample``, which means something else, or nothing, in
another program. Here it travels with the path of its script and with its code. Processes that run or have imported this
script use their own object, so that `isinstance` holds; all others build it. Objects that pickle cannot handle, such as
lambdas, are left to cloudpickle. Only a job's own workers read these pickles.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import sys
import weakref
from collections.abc import Iterator
from types import FunctionType
from typing import Any

RPC_MARK = "__unified_rpc__"
"""Attribute of a function that `@rpc` has marked."""

_origins: weakref.WeakKeyDictionary[Any, tuple[str, str, bytes]] = weakref.WeakKeyDictionary()
"""Arguments of `find_or_build` for classes and functions that were built here from code, to send them on."""
_built: dict[tuple[str, str], tuple[bytes, Any]] = {}
"""Last code built, and its result, by script and name: the same code is the same class."""
_has_readers_elsewhere = True
programs = {"__main__"}
"""Modules that other processes do not import under these names; `unified submit` adds the module of its file."""


def all_run_this_script() -> None:
    """Note that every process that reads this one's bus messages runs the same script: names are enough for them."""
    global _has_readers_elsewhere
    _has_readers_elsewhere = False


def has_readers_elsewhere() -> bool:
    """Return True if a process that runs another program may read this one's messages."""
    return _has_readers_elsewhere


def dumps(value: object) -> bytes:
    """Return a pickle of any value: by pickle if possible, else by cloudpickle. `pickle.loads` reads it.

    A value that cannot be sent, such as a lock or an open file, raises any Exception, of pickle or of its own methods.
    """
    out = io.BytesIO()
    try:
        _Pickler(out, protocol=5).dump(value)
    except Exception:
        out = io.BytesIO()
        cloud_pickler()(out, protocol=5).dump(value)
    return out.getvalue()


@functools.cache
def cloud_pickler() -> Any:
    """Return a class of cloudpickle's pickler that uses `reduced`; cloudpickle is imported when it is needed."""
    import cloudpickle

    class CloudPickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
        def reducer_override(self, value: Any) -> Any:
            found = reduced(value)
            return super().reducer_override(value) if found is NotImplemented else found

    return CloudPickler


def dump_code(value: Any) -> bytes:
    """Return a cloudpickle of ``(value, functions)``: a function or class whose module workers cannot import, and the
    module's `@rpc` functions. Any Exception: something that the value refers to cannot be sent.
    """
    import cloudpickle

    inner = value
    while isinstance(inner, functools.partial):
        inner = inner.func
    module = sys.modules.get(getattr(inner, "__module__", None) or "")
    if module is None or is_importable(module.__name__):
        return bytes(cloudpickle.dumps((value, [])))
    names = [each for each in vars(module).values() if isinstance(each, FunctionType) and hasattr(each, RPC_MARK)]
    return _with_code((value, names), module)


def _with_code(value: Any, module: Any) -> bytes:
    """Return a cloudpickle that refers to nothing of this module by name."""
    import cloudpickle

    if module.__name__ == "__main__":  # cloudpickle does so by itself
        return bytes(cloudpickle.dumps(value))
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(value))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def is_importable(module: str) -> bool:
    """Return True if another process can import a module of this name as this one could: its package is found, and it
    is not the program that this process runs."""
    package = module.partition(".")[0]
    finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
    return module != "__main__" and any(find is not None and find(package, None) is not None for find in finders)


def names_main(data: bytes) -> bool:
    """Return True if a pickle may refer by name to something in the program that made it."""
    return b"__main__" in data


def reduced(value: Any, *, with_code: bool = True) -> Any:
    """Return the pickle reduction of a class or function of a script; NotImplemented for anything else.

    `with_code` includes the code, for readers that may not have the script.
    """
    if not isinstance(value, type | FunctionType) or value.__module__ not in programs:
        return NotImplemented
    origin = _origins.get(value)
    if origin is None:
        main = sys.modules.get(value.__module__)
        if _found(main, value.__qualname__) is not value:
            return NotImplemented
        path = _path_of(main)
        origin = path, value.__qualname__, _code_of(value, may_fail=bool(path)) if with_code or not path else b""
    return find_or_build, origin


def find_or_build(path: str, name: str, code: bytes) -> Any:
    """Return the class or function of a script, for pickles: this process's own if it has that script, or a new one.

    `path` is empty without a script, `code` (a cloudpickle) without code. UnpicklingError: this process has neither.
    """
    known, built = _built.get((path, name), (None, None))
    if known == code:
        return built
    for module in _modules_of(path) if path else ():
        found = _found(module, name)
        if found is not None:
            return found
    if not code:
        raise pickle.UnpicklingError(
            f"{name} is defined in the script {path}, which this process does not run, and its code could not be sent: "
            "move it to a module of its own"
        )
    built = pickle.loads(code)
    _built[path, name] = code, built
    _origins[built] = path, name, code
    return built


def _modules_of(path: str) -> Iterator[Any]:
    """Yield the modules of this process, its program first, that come from the file at `path`."""
    name = os.path.basename(path)
    for module in (sys.modules["__main__"], *list(sys.modules.values())):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(name) and _path_of(module) == path:
            yield module


def _code_of(value: Any, may_fail: bool) -> bytes:
    try:
        code = _with_code(value, sys.modules[value.__module__])
    except Exception:  # for example, it uses a lock of its script; readers that have the script need no code
        if not may_fail:
            raise
        return b""
    return code


def _path_of(module: Any) -> str:
    """Return the path of the file that a module was made from; empty for none, as in an interactive session."""
    file = getattr(module, "__file__", None)
    return os.path.realpath(file) if isinstance(file, str) and file else ""


def _found(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part, None)
    return module


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return reduced(value)
