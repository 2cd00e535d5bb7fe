"""The last moments of a worker: a normal exit of the interpreter that cannot hang."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from unified.worker import ending
from unified.worker.failure import exit_code
from unified.worker.stop import flush_output

WITHIN_S = 5.0
"""For a worker that has failed; one that is stopped has its grace period."""
EXIT_CUT = 1
LOOK_S = 0.1


def leave(
    code: int,
    *,
    left_s: Callable[[], float] | None = None,
    last: Callable[[], None] = lambda: None,
    clear: Callable[[], None] = lambda: None,
    on_cut: Callable[[str], None] = lambda text: None,
) -> NoReturn:
    """End the program as Python does, and the process with `code`.

    A forked worker must not unwind into the zygote's stack, so this never returns and never raises. It leaves the
    interpreter standing (as multiprocessing does): destructors of libraries that hang at exit get no chance to.

    Args:
        left_s: how many seconds there are left, by now, before it ends all the same; default: `WITHIN_S` in all.
        last: called when threads have been joined and `atexit` functions run.
        clear: lets go of the program's globals; called after that.
        on_cut: told what the end was waiting for, if it is cut short.
    """
    until = time.monotonic() + WITHIN_S
    try:
        try:
            cut_after(left_s or (lambda: until - time.monotonic()), code or EXIT_CUT, on_cut)
            ending.finish_program()
            last()
            clear()
            atexit._run_exitfuncs()
            ending.flush_files()
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


def cut_after(left_s: Callable[[], float], code: int, on_cut: Callable[[str], None]) -> None:
    """End the process with `code` as soon as no seconds are left, whatever it does then."""
    watchdog = threading.Thread(target=_cut, args=(left_s, code, on_cut), name="unified-exit-watchdog", daemon=True)
    with contextlib.suppress(RuntimeError):  # no more threads for this user; the agent has a deadline of its own
        watchdog.start()


def _cut(left_s: Callable[[], float], code: int, on_cut: Callable[[str], None]) -> None:
    began = time.monotonic()
    while (left := left_s()) > 0:
        time.sleep(min(left, LOOK_S))
    text = f"its end was cut short after {time.monotonic() - began:.1f} s: it was waiting for {ending.waited_for()}"
    try:
        on_cut(text)
        print(f"unified: {text}. What that had not written is lost.", file=sys.stderr)
        flush_output(within_s=0.2)
    finally:
        os._exit(code)
