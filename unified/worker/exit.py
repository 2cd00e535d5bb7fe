"""Exit of a worker: the end of its program, as the interpreter would do it, and an end of the process without a hang.

Python's order is kept: threads and executors are joined, `atexit` functions run, globals are cleared, so that files are
flushed and closed and `__del__` runs. The runtime's own exit functions are left for the end of the process.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import gc
import io
import os
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
"""Time for a worker that has failed; one that is stopped has its grace period."""
EXIT_CUT = 1
LOOK_S = 0.1
NOTICE_S = 10.0
"""An end that takes longer says what it waits for."""
_RUNTIMES: tuple[Callable[[], object], ...] = (pool._close_all, reader._leave_all)
"""Exit functions that would take away what other workers still read."""
_EXECUTORS = ("concurrent.futures.thread", "concurrent.futures.process")
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_OWN = ("unified", "unified_agent", "unified_master")
_NOT_USERS = (*_LIBRARIES, str(Path(__file__).parent.parent) + os.sep)  # ours also under names of `unified.compat`


def _nothing(*_: object) -> None:
    """Do nothing."""


def exit_process(
    code: int,
    *,
    left_s: Callable[[], float] | None = None,
    last: Callable[[], object] = _nothing,
    clear: Callable[[], object] = _nothing,
    on_cut: Callable[[str], object] = _nothing,
) -> NoReturn:
    """End the program as Python does, and the process with `code`.

    A forked worker must not unwind into the zygote's stack, so this never returns and never raises. The interpreter is
    left standing (as multiprocessing does): destructors of libraries that hang at exit get no chance to.

    Args:
        left_s: returns how many seconds are left before the process ends all the same; default: `WITHIN_S` in all.
        last, clear: as of `end_program`.
        on_cut: told what the end was waiting for, if it is cut short.
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
    """End a process that user code forked and that came back out of it, with this error or by returning: what follows
    is for its parent to do."""
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
    """End the process with `code` as soon as no seconds are left, whatever it does then."""
    with contextlib.suppress(RuntimeError):  # no more threads for this user; the agent has a deadline of its own
        start_thread("unified-exit-watchdog", _cut, left_s, code, on_cut)


def _cut(left_s: Callable[[], float], code: int, on_cut: Callable[[str], object]) -> None:
    began = time.monotonic()
    while (left := left_s()) > 0:
        time.sleep(min(left, LOOK_S))
    text = f"its end was cut short after {time.monotonic() - began:.1f} s: it was waiting for {_waited_for()}"
    try:
        on_cut(text)
        print(f"unified: {text}. What that had not written is lost.", file=sys.stderr)
        flush_output(within_s=0.2)
    finally:
        os._exit(code)


def end_program(last: Callable[[], object], clear: Callable[[], object]) -> None:
    """End the user's program. Takes as long as its threads and `atexit` functions take; a second call ends the rest.

    Args:
        last: called when non-daemon threads and executors have been joined and the user's `atexit` functions have run.
        clear: lets go of the program's globals; called after that, and before files are flushed.
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
    """Wait for the non-daemon threads of a program that goes on answering calls, and for what its executors have to do
    as of now. The executors go on, and `atexit` functions run when the process ends."""
    pooled = _pooled_threads()
    threads = [thread for thread in _unended_threads() if thread not in pooled]
    kinds = [getattr(module, "_WorkItem", None) for module in _executors()]  # what an executor has begun or will
    items = [each for each in gc.get_objects() if type(each) in kinds]
    if not threads and not items:
        return
    with _saying_what_it_waits_for():
        for thread in threads:
            thread.join()
        concurrent.futures.wait([item.future for item in items])


def clear_program(main: str, known: Collection[str]) -> None:
    """Clear the globals of the user's modules, the newest first: of `main`, and of those that were not `known` before
    the program began.

    Whatever refers to them should have let go before. Threads that run on do so without them, as at Python's own end.
    """
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        if hasattr(sys, name):
            delattr(sys, name)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    threading.excepthook = lambda args: None
    cleared = []
    for name, module in reversed(list(sys.modules.items())):
        if name == main or (name not in known and _is_users(name, module)):
            cleared.append(weakref.ref(_Globals(vars(module))))
            sys.modules[name] = ModuleType(name) if name == "__main__" else None  # type: ignore[assignment]  # as Python does
        del module
    _flush_files()  # a collection may close a file's inner buffer before its outer one has written to it
    gc.collect()  # with their globals intact, which a `__del__` may need
    for reference in cleared:
        if (survivor := reference()) is not None:
            _clear(survivor.names)
    gc.collect()


def _flush_files() -> None:
    """Flush every file that is open for writing, whoever still refers to it."""
    for each in gc.get_objects():
        if issubclass(type(each), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):
            _run(each.flush, is_quiet=True)


def _waited_for() -> str:
    """Return what the end of a program is waiting for, as text for a message."""
    threads = dict.fromkeys([*_unended_threads(), *_pooled_threads()])  # those of an executor may be daemons
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
    """Lives as long as the globals of a module, which themselves cannot be referred to weakly."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names
        names["__unified_globals__"] = self


def _is_users(name: str, module: ModuleType | None) -> bool:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not os.path.isabs(file) or name.partition(".")[0] in _OWN:
        return False
    return not ("site-packages" in file or "dist-packages" in file or file.startswith(_NOT_USERS))


def _clear(names: dict[str, Any]) -> None:
    """Clear names as the interpreter clears a module that is still held, but objects before code that they may need."""
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
