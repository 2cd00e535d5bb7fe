"""Entry point of a worker: find, check and call it.

A fault of the entry point itself is an `EntryPointError`, raised before any of its code runs where possible. A restart
would fail in the same way, so there is none. An error that the user's code raises while it runs goes through as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import importlib.machinery
import importlib.util
import inspect
import itertools
import os
import pkgutil
import re
import select
import signal
import subprocess
import sys
import sysconfig
import zipfile
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from unified import process
from unified.bus.calls.registry import RPC_THREAD, marked_methods
from unified.errors import EntryPointError, UsageError, nearest
from unified.job.payload import decode
from unified.job.spec import EntryPoint

_RUNTIME = str(Path(__file__).parent)
_STOPS = (signal.SIGTERM, signal.SIGINT)
_NOTICES = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals passed on only to a program that handles them, since they would end any other."""
_NEVER_SHADOWED = ("__main__", "encodings", "unified")
"""Modules that the interpreter, or the runtime, is made of."""
_IMPORTS_ELASTIC = re.compile(
    rb"(?:^|;)\s*(?:import|from)\b[^#\n]*\bunified(?:\.elastic\b|\s+import\b(?:[^#\n]*|\s*\([^)]*)\belastic\b)",
    re.MULTILINE,
)


class LoadedEntry(ABC):
    """An entry point that was found.

    Attributes:
        module: the module whose `@rpc` functions are exported.
        instance: the object whose `@rpc` methods are exported, once `construct` was called; None for other kinds.
        only_serves: it has nothing to run: its work begins after `run`, as calls or in threads of its own.
        is_program: only `run` defines its module's functions.
    """

    only_serves = False
    is_program = False

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.instance: object | None = None

    @abstractmethod
    def construct(self, config: Callable[[], Any]) -> None:
        """Make the instance, if this kind has one. `config` returns the user's configuration."""

    @abstractmethod
    def run(self, config: Callable[[], Any]) -> None:
        """Run to the end. `config` is as for `construct`."""


def load(entry: EntryPoint, *, is_driver: bool, is_elastic: bool = False) -> LoadedEntry:
    """Find an entry point: import its module, or compile its file.

    Args:
        is_driver: the job waits until it has run, unless it is a service.
        is_elastic: its ranks train together: a driver with nothing to run is then no service, but an error.
    """
    if entry.kind != "script":
        _forget_shadowed(_front_path())
    if entry.kind == "attribute":
        return _load_attribute(entry, is_driver, is_elastic)
    if entry.kind == "value":
        return _load_value(entry, is_driver, is_elastic)
    if entry.kind == "script":
        return _load_script(entry)
    if entry.kind == "program":
        return _Executable([entry.target, *entry.argv])
    return _load_module(entry)


def imports_elastic(entry: EntryPoint, module: ModuleType) -> bool:
    """Return True if the entry point's own file imports `unified.elastic`, be it only while it runs."""
    if entry.kind == "value":
        return (
            b"unified" in entry.code.data and b"elastic" in entry.code.data
        )  # names are plain text in the pickled bytes
    try:
        return bool(_IMPORTS_ELASTIC.search(Path(module.__file__ or "").read_bytes()))
    except OSError:  # in a zip file
        return False


# Functions and classes


class _Function(LoadedEntry):
    def __init__(self, module: ModuleType, function: Callable[..., Any], what: str) -> None:
        super().__init__(module)
        self._call = _caller(function, what)

    def construct(self, config: Callable[[], Any]) -> None:
        pass

    def run(self, config: Callable[[], Any]) -> None:
        self._call(config)


class _Class(LoadedEntry):
    def __init__(self, module: ModuleType, cls: type, what: str, is_driver: bool, is_elastic: bool) -> None:
        super().__init__(module)
        self._what = what
        self._make = _caller(cls, what)
        self.only_serves = not callable(getattr(cls, "run", None))
        if is_driver and self.only_serves and (is_elastic or not marked_methods(cls)):
            besides = ", and its role trains together" if is_elastic else " and no @rpc methods"
            raise EntryPointError(
                f"{what} has no run() method{besides}: the job would never end. Give it a run(), or call "
                "service() on the role if it only answers calls."
            )
        threads = [getattr(cls, RPC_THREAD, None), *(mark.thread for mark in marked_methods(cls).values())]
        if not self.only_serves and "main" in threads:
            advice = "and @rpc(thread='main') methods, which would wait until run() has returned: take one of them out."
            raise EntryPointError(f"{what} has a run() method, which takes the main thread, {advice}")

    def construct(self, config: Callable[[], Any]) -> None:
        self.instance = self._make(config)

    def run(self, config: Callable[[], Any]) -> None:
        if not self.only_serves:
            run: Callable[..., Any] = getattr(self.instance, "run")  # noqa: B009  # `object` has no such attribute
            _caller(run, f"{self._what}.run")(config)


def _load_attribute(entry: EntryPoint, is_driver: bool, is_elastic: bool) -> LoadedEntry:
    sys.argv = [entry.target, *entry.argv]  # not the arguments of this process
    module = _import(entry.target)
    found: Any = module
    for depth, name in enumerate(entry.attribute.split(".")):
        if not hasattr(found, name):
            owner = ".".join([entry.target, *entry.attribute.split(".")[:depth]])
            raise EntryPointError(
                f"{owner!r} has no attribute {name!r}.{nearest(name, dir(found))} It was read from "
                f"{getattr(module, '__file__', None) or 'a namespace package, which has no code of its own'}."
            )
        found = getattr(found, name)
    return _entry_of(found, module, f"entry point '{entry.target}.{entry.attribute}'", is_driver, is_elastic)


def _load_value(entry: EntryPoint, is_driver: bool, is_elastic: bool) -> LoadedEntry:
    """Load a function or class that came with its code. `__main__` holds only it and the `@rpc` functions."""
    sys.argv = [entry.target]
    sys.modules["__main__"] = module = ModuleType("__main__")
    what = f"entry point '{entry.attribute}'"
    try:
        found, functions = decode(entry.code, what)
    except UsageError as error:
        raise EntryPointError(str(error)) from error
    vars(module).update({each.__name__: each for each in (*functions, found) if hasattr(each, "__name__")})
    return _entry_of(found, module, what, is_driver, is_elastic)


def _entry_of(found: Any, module: ModuleType, what: str, is_driver: bool, is_elastic: bool) -> LoadedEntry:
    if inspect.isclass(found):
        return _Class(module, found, what, is_driver, is_elastic)
    if callable(found):
        return _Function(module, found, what)
    raise EntryPointError(f"{what} is a {type(found).__name__}: it must be a function or a class.")


def _caller(function: Callable[..., Any], what: str) -> Callable[[Callable[[], Any]], Any]:
    """Return a caller for a function or class that takes no argument, or the user's configuration."""
    if _is_generator(function):
        raise EntryPointError(_generator(what))
    needed = _required(function)
    keywords = [name for name, parameter in _parameters(function).items() if parameter.kind is parameter.KEYWORD_ONLY]
    if len(needed) > 1 or set(needed) & set(keywords):
        raise EntryPointError(
            f"{what} needs the arguments {', '.join(needed)}: a worker calls it with none, or with one, the user's "
            "configuration. Read the rest from current_worker()."
        )

    def call(config: Callable[[], Any]) -> Any:
        result = function(config()) if needed else function()
        if inspect.iscoroutine(result):
            asyncio.run(result)
        elif isinstance(result, Generator | AsyncGenerator) and _is_generator(inspect.unwrap(function)):
            raise EntryPointError(_generator(what))
        return result

    return call


def _is_generator(function: Callable[..., Any]) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _generator(what: str) -> str:
    return (
        f"{what} is a generator: calling it runs none of its code. Take the `yield` out of it, or loop over it in a "
        "function and name that one."
    )


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(function).parameters)
    except (ValueError, TypeError):  # written in C, without a signature: the call itself will tell
        return {}


def _required(function: Callable[..., Any]) -> list[str]:
    return [
        name
        for name, parameter in _parameters(function).items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except SyntaxError as error:
        raise EntryPointError(_syntax(error)) from error
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise EntryPointError(_missing(name, error.name)) from None
        raise EntryPointError(
            f"module {name!r} imports {error.name!r}, which is not installed for {sys.executable}: install it there, "
            "or give the job an interpreter that has it (python=)."
        ) from error
    except SystemExit as error:
        raise EntryPointError(
            f"module {name!r} exited with {error.code!r} while it was imported: put what it runs as a program under "
            "`if __name__ == '__main__':`, or use the file itself as the entry point."
        ) from error
    except Exception as error:
        raise EntryPointError(
            f"module {name!r} raised {type(error).__name__} while it was imported: {_first_line(error)}"
        ) from error


def _missing(name: str, missing: str) -> str:
    parent, _, last = missing.rpartition(".")
    path = list(getattr(sys.modules.get(parent), "__path__", [])) if parent else _user_path()[:4]
    hint = nearest(last, (module.name for module in pkgutil.iter_modules(path)))
    if not hint and not name.isascii():
        hint = " Module names are best written in ASCII."
    searched = ", ".join(entry or "." for entry in path)
    return (
        f"there is no module {missing!r} for the entry point {name!r}.{hint} Submit from the folder that holds it, or "
        f"name that folder with working_dir=. Looked first in: {searched}."
    )


def _user_path() -> list[str]:
    """`sys.path` without Python's own library, where no user keeps a module."""
    return [entry for entry in sys.path if not _is_library(entry)]


def _front_path() -> list[str]:
    """`sys.path` before Python's own library."""
    return list(itertools.takewhile(lambda entry: not _is_library(entry), sys.path))


def _is_library(entry: str) -> bool:
    library = Path(sysconfig.get_path("stdlib"))
    zipped = library.with_name(library.name.replace(".", "") + ".zip")
    return Path(entry) in (library, library / "lib-dynload", zipped)


def _forget_shadowed(folders: Sequence[str]) -> None:
    """Forget imported modules that have another module of the same name in these folders, the first of `sys.path`.

    A zygote imports modules before the user's folders are known. In plain Python a script imports the ``calendar.py``
    beside it; only the interpreter's built-in and frozen modules come first there, too.
    """
    for found in pkgutil.iter_modules(folders):
        loaded = getattr(sys.modules.get(found.name), "__spec__", None)
        if loaded is None or loaded.origin in ("built-in", "frozen") or found.name in _NEVER_SHADOWED:
            continue
        own = found.module_finder.find_spec(found.name, None)
        if own is not None and own.origin and os.path.realpath(own.origin) != os.path.realpath(loaded.origin or ""):
            for name in [name for name in sys.modules if name.partition(".")[0] == found.name]:
                del sys.modules[name]


# Scripts and modules


class _Program(LoadedEntry):
    """Code that runs as `__main__`."""

    is_program = True

    def __init__(self, code: CodeType, module: ModuleType, argv: list[str], directory: str | None) -> None:
        super().__init__(module)
        self._code = code
        self._argv = argv
        self._directory = directory

    def construct(self, config: Callable[[], Any]) -> None:
        """Make this program the process's `__main__`, so that pickle and multiprocessing find its names."""
        sys.modules["__main__"] = self.module
        sys.argv = self._argv
        if self._directory is not None:
            sys.path.insert(0, self._directory)
            _forget_shadowed([self._directory])

    def run(self, config: Callable[[], Any]) -> None:
        try:
            exec(self._code, self.module.__dict__)
        except (ImportError, SyntaxError) as error:
            if _is_top_level(error):
                advice = _syntax(error) if isinstance(error, SyntaxError) else _first_line(error)
                raise EntryPointError(f"{self._argv[0]} cannot be run with {sys.executable}: {advice}") from error
            raise


def _load_script(entry: EntryPoint) -> LoadedEntry:
    path = Path(entry.target).absolute()
    if path.is_dir() or zipfile.is_zipfile(path):
        return _load_container(entry, path)
    try:
        source = path.read_bytes()
    except OSError as error:
        names = [found.name for found in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise EntryPointError(
            f"script {entry.target} cannot be read on this node ({error.strerror}).{nearest(path.name, names)} "
            f"It was looked for at {path}; working_dir= says where relative names begin."
        ) from None
    if is_executable(entry):
        return _Executable([str(path), *entry.argv])
    try:
        code = compile(source, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise EntryPointError(_syntax(error)) from error
    except ValueError as error:  # null bytes
        raise EntryPointError(f"{path} is not Python source: {error}") from None
    folder = os.path.dirname(os.path.realpath(path))  # of a link's target, as in plain Python
    return _Program(code, _new_main(str(path)), [entry.target, *entry.argv], folder)


def is_executable(entry: EntryPoint) -> bool:
    """Return True if the entry point is a program that is not Python: it makes its own process group, if any."""
    if entry.kind != "script":
        return entry.kind == "program"
    try:
        with open(entry.target, "rb") as file:
            first, _, _ = file.read(200).partition(b"\n")
    except OSError:
        return False
    is_python = not first.startswith(b"\x7fELF") and (not first.startswith(b"#!") or b"python" in first)
    return not is_python and os.access(entry.target, os.X_OK)


class _Executable(LoadedEntry):
    """A program that is not Python: a child. This process passes signals on to it, and ends as the child does."""

    def __init__(self, command: list[str]) -> None:
        super().__init__(_new_main(command[0]))
        self._command = command

    def construct(self, config: Callable[[], Any]) -> None:
        pass

    def run(self, config: Callable[[], Any]) -> None:
        children: list[subprocess.Popen[bytes]] = []
        early: list[int] = []

        def pass_on(number: int, _: object = None) -> None:
            if not children:
                early.append(number)
            elif number in _STOPS or process.is_handled(children[0].pid, number):
                children[0].send_signal(number)

        for number in (*_STOPS, *_NOTICES):  # before the start, so that no early signal is lost
            signal.signal(number, pass_on)
        try:
            children.append(subprocess.Popen(self._command))
        except OSError as error:
            why = "it has no #! line" if error.errno == errno.ENOEXEC else error.strerror
            raise EntryPointError(f"the program {self._command[0]!r} cannot be started on this node: {why}.") from None
        while early:
            pass_on(early.pop(0))
        code = _wait(children[0])
        if code < 0:  # end by the same signal, so that the parent sees it
            with contextlib.suppress(OSError):  # SIGKILL has no handler
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        if code:
            raise SystemExit(code)


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Wait for a child and return its exit code; signal handlers run meanwhile.

    The kernel may give a signal to another thread, which does not wake a main thread in `waitpid`.
    """
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(read, select.POLLIN)
    poll.register(os.pidfd_open(child.pid), select.POLLIN)
    while child.poll() is None:
        poll.poll()
        with contextlib.suppress(BlockingIOError):
            os.read(read, 512)
    return child.returncode


def _load_container(entry: EntryPoint, path: Path) -> LoadedEntry:
    """Load a folder or a zip file: its `__main__.py` runs, and may import its modules."""
    spec = importlib.machinery.PathFinder.find_spec("__main__", [str(path)])
    if spec is None or spec.loader is None:
        raise EntryPointError(
            f"{entry.target} is a {'folder' if path.is_dir() else 'zip file'} without a __main__.py, so there is "
            f"nothing in it to run. It was looked for at {path}."
        )
    return _program_of(spec, [entry.target, *entry.argv], str(path))


def _load_module(entry: EntryPoint) -> LoadedEntry:
    name = entry.target
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        raise EntryPointError(_missing(name, error.name or name)) from None
    except Exception as error:
        raise EntryPointError(f"the package of {name!r} cannot be imported: {_first_line(error)}") from error
    if spec is None:
        raise EntryPointError(_missing(name, name))
    return _program_of(spec, [spec.origin or name, *entry.argv], None)


def _program_of(spec: ModuleSpec, argv: list[str], directory: str | None) -> _Program:
    get_code = getattr(spec.loader, "get_code", None)
    try:
        code: CodeType | None = None if get_code is None else get_code(spec.name)
    except SyntaxError as error:
        raise EntryPointError(_syntax(error)) from error
    if code is None:
        raise EntryPointError(f"module {spec.name!r} has no Python code that could run as a program.")
    module = _new_main(spec.origin or argv[0])
    module.__spec__ = spec  # multiprocessing's spawn reads it to import this program again
    module.__package__ = spec.parent
    module.__loader__ = spec.loader
    return _Program(code, module, argv, directory)


def _new_main(file: str) -> ModuleType:
    module = ModuleType("__main__")
    module.__file__ = file
    return module


def _is_top_level(error: BaseException) -> bool:
    """Return True if an import at the program's top level raised the error: it would fail again."""
    frame = error.__traceback__
    while frame is not None:
        code = frame.tb_frame.f_code
        is_machinery = code.co_filename.startswith(("<frozen importlib", _RUNTIME))
        if not is_machinery and code.co_name != "<module>":
            return False
        frame = frame.tb_next
    return True


def _syntax(error: SyntaxError) -> str:
    return f"{error.filename or '<unknown>'}:{error.lineno or 0}: {type(error).__name__}: {error.msg}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__
