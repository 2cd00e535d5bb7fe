"""Exit of a worker: end its program in the interpreter's order, then its process without a hang.

Threads and executors are joined, `atexit` functions run, and globals are cleared. This flushes and closes files and
runs `__del__`. The runtime's own exit functions run at the end of the process.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import gc
import io
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NoReturn

from unified.bus.shm import pool, reader
from unified.threads import start_thread
from unified.worker.failure import exit_code
from unified.worker.stop import flush_output

WITHIN_S = 5.0
"""Time for the end of a failed worker; a stopped worker has its grace period."""
EXIT_CUT = 1
LOOK_S = 0.1
NOTICE_S = 10.0
"""After this time the end of a program reports what it waits for."""
_RUNTIMES: tuple[Callable[[], object], ...] = (pool._close_all, reader._leave_all)
"""Exit functions that would remove memory that other workers still read."""
_EXECUTORS = ("concurrent.futures.thread", "concurrent.futures.process")
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_OWN = ("unified", "unified_agent", "unified_master")
_NOT_USERS = (*_LIBRARIES, str(Path(__file__).parent.parent) + os.sep)  # our files, also for names of `unified.compat`


def exit_process(
    code: int,
    *,
    left_s: Callable[[], float] | None = None,
    last: Callable[[], object] = lambda: None,
    clear: Callable[[], object] = lambda: None,
    on_cut: Callable[[str], object] = lambda text: None,
) -> NoReturn:
    """End the program in Python's order, then the process with `code`.

    This function never returns and never raises: a forked worker must not unwind into the zygote's stack. It does not
    finalize the interpreter (like multiprocessing), because destructors of some libraries hang at exit.

    Args:
        left_s: returns the seconds left until the process ends in any case; default: `WITHIN_S` in all.
        last, clear: as for `end_program`.
        on_cut: called with what the end was waiting for, if it is cut short.
    """
    until = time.monotonic() + WITHIN_S
    try:
        try:
            cut_after(left_s or (lambda: until - time.monotonic()), code or EXIT_CUT, on_cut)
            end_program(last, clear)
            for function in _RUNTIMES:
                function()
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
        flush_output(within_s=1.0)
    finally:
        os._exit(code)


def exit_fork(error: BaseException | None) -> NoReturn:
    """End a process that user code forked, once that code has raised `error` or returned: only its parent goes on."""
    code = 0
    try:
        if isinstance(error, SystemExit):
            code = exit_code(error)
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr)
        elif error is not None:
            code = 1
            traceback.print_exception(error)
        flush_output(within_s=1.0)
    finally:
        os._exit(code)


def cut_after(left_s: Callable[[], float], code: int, on_cut: Callable[[str], object]) -> None:
    """Start a thread that ends the process with `code` as soon as no time is left."""
    with contextlib.suppress(RuntimeError):  # no more threads for this user; the agent has a deadline of its own
        start_thread("unified-exit-watchdog", _cut, left_s, code, on_cut)


def _cut(left_s: Callable[[], float], code: int, on_cut: Callable[[str], object]) -> None:
    began = time.monotonic()
    while (left := left_s()) > 0:
        time.sleep(min(left, LOOK_S))
    text = f"its end was cut short after {time.monotonic() - began:.1f} s: it was waiting for {_waited_for()}"
    try:
        on_cut(text)
        print(f"unified: {text}. Output that was not written yet is lost.", file=sys.stderr)
        flush_output(within_s=0.2)
    finally:
        os._exit(code)


def end_program(last: Callable[[], object], clear: Callable[[], object]) -> None:
    """End the user's program. Takes as long as its threads and `atexit` functions; a second call ends the rest.

    Args:
        last: called when non-daemon threads and executors have been joined and the user's `atexit` functions have run.
        clear: drops the program's globals; called after `last`, and before files are flushed.
    """
    with _saying_what_it_waits_for():
        _run(threading._shutdown)  # type: ignore[attr-defined]  # there is no public name; unknown to typeshed
        for function in _RUNTIMES:
            atexit.unregister(function)
        atexit._run_exitfuncs()
    last()
    clear()
    _flush_files()


def finish_work() -> None:
    """Wait for the non-daemon threads of a program that still answers calls, and for the present work of its executors.
    The executors go on, and `atexit` functions run when the process ends."""
    pooled = _pooled_threads()
    threads = [thread for thread in _unended_threads() if thread not in pooled]
    kinds = [getattr(module, "_WorkItem", None) for module in _executors()]  # work begun or queued
    items = [each for each in gc.get_objects() if type(each) in kinds]
    if not threads and not items:
        return
    with _saying_what_it_waits_for():
        for thread in threads:
            thread.join()
        concurrent.futures.wait([item.future for item in items])


def clear_program(main: str, known: Collection[str]) -> None:
    """Clear the globals of the user's modules, newest first: `main`, and modules not `known` before the program began.

    References to the modules should be dropped before. Threads that run on lose the globals, as at Python's own end.
    Signals that the program handled have no effect any more, because a handler may need the globals.
    """
    for number in signal.valid_signals() - {signal.SIGTERM, signal.SIGINT}:  # those two are the runtime's
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        if hasattr(sys, name):
            delattr(sys, name)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    threading.excepthook = lambda args: None
    cleared = []
    for name, module in reversed(list(sys.modules.items())):
        if name == main or (name not in known and _is_users(name, module)):
            cleared.append(weakref.ref(_Globals(vars(module))))
            sys.modules[name] = ModuleType(name) if name == "__main__" else None  # type: ignore[assignment]
        del module
    _flush_files()  # a collection may close a file's inner buffer before the outer one is flushed
    gc.collect()  # while globals are intact: a `__del__` may need them
    for reference in cleared:
        if (survivor := reference()) is not None:
            _clear(survivor.names)
    gc.collect()


def _flush_files() -> None:
    """Flush every file that is open for writing, also if user code still refers to it."""
    for each in gc.get_objects():
        if issubclass(type(each), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
            _run(each.flush, is_quiet=True)


def _waited_for() -> str:
    threads = dict.fromkeys([*_unended_threads(), *_pooled_threads()])  # an executor's may be daemons
    names = [thread.name for thread in threads if thread.is_alive()]
    return f"threads {', '.join(names)}" if names else "its exit functions"


def _unended_threads() -> list[threading.Thread]:
    main = threading.main_thread()
    return [thread for thread in threading.enumerate() if not thread.daemon and thread is not main]


def _executors() -> list[ModuleType]:
    return [sys.modules[name] for name in _EXECUTORS if name in sys.modules]


def _pooled_threads() -> list[threading.Thread]:
    return [thread for module in _executors() for thread in list(getattr(module, "_threads_queues", ()))]


class _Globals:
    """Marker that ends with the globals of a module; the globals themselves take no weak reference."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names
        names["__unified_globals__"] = self


def _is_users(name: str, module: ModuleType | None) -> bool:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not os.path.isabs(file) or name.partition(".")[0] in _OWN:
        return False
    return not ("site-packages" in file or "dist-packages" in file or file.startswith(_NOT_USERS))


def _clear(names: dict[str, Any]) -> None:
    """Clear names as the interpreter clears a referenced module, but objects before the code that they may need."""
    code = (ModuleType, FunctionType, type)
    for is_code in (False, True):
        for name, value in list(names.items()):
            if name != "__builtins__" and isinstance(value, code) == is_code:
                names[name] = None
        value = None


def _run(function: Callable[[], object], *, is_quiet: bool = False) -> None:
    try:
        function()
    except BaseException as error:
        if not is_quiet:
            sys.excepthook(type(error), error, error.__traceback__)


@contextlib.contextmanager
def _saying_what_it_waits_for() -> Iterator[None]:
    def say() -> None:
        print(f"unified: the program has come to its end and waits for {_waited_for()}.", file=sys.stderr, flush=True)

    notice = threading.Timer(NOTICE_S, say)
    notice.daemon, notice.name = True, "unified-exit-notice"
    with contextlib.suppress(RuntimeError):  # no more threads for this user
        notice.start()
    try:
        yield
    finally:
        notice.cancel()
