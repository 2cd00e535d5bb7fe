"""The last moments of a worker: a normal exit of the interpreter that cannot hang."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

from unified.worker.failure import exit_code
from unified.worker.stop import flush_output

WITHIN_S = 5.0
"""For a worker that ends by itself; one that is stopped has its grace period."""


def leave(code: int, *, within_s: float | None = None, last: Callable[[], None] = lambda: None) -> NoReturn:
    """Join non-daemon threads, run `atexit` functions, then `last`, flush, and end with `code`.

    After `within_s` seconds (default `WITHIN_S`) it ends all the same.

    A forked worker must not unwind into the zygote's stack, so this never returns and never raises. It leaves the
    interpreter standing (as multiprocessing does): destructors of libraries that hang at exit get no chance to.
    """
    within_s = WITHIN_S if within_s is None else within_s
    try:
        try:
            _watch(code, within_s)
            # These two are what the interpreter itself calls; there is no public name for either.
            threading._shutdown()  # type: ignore[attr-defined]  # unknown to typeshed
            atexit._run_exitfuncs()
            last()
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
        flush_output(within_s=1.0)
    finally:
        os._exit(code)


def leave_fork(error: BaseException | None) -> NoReturn:
    """End a process that user code forked and that came back out of it: what follows is for its parent to do.

    Args:
        error: what it left with; None if it returned.
    """
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


def _watch(code: int, within_s: float) -> None:
    watchdog = threading.Timer(within_s, _cut, args=(code, within_s))
    watchdog.daemon = True
    watchdog.name = "unified-exit-watchdog"
    with contextlib.suppress(RuntimeError):  # no more threads for this user; the agent has a deadline of its own
        watchdog.start()


def _cut(code: int, within_s: float) -> None:
    names = [thread.name for thread in threading.enumerate() if not thread.daemon and thread.name != "MainThread"]
    threads = f" Threads still running: {', '.join(names)}." if names else ""
    try:
        print(f"unified: the exit took longer than {within_s:g} s and was cut short.{threads}", file=sys.stderr)
        flush_output(within_s=0.2)
    finally:
        os._exit(code)
