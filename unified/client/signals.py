"""Ctrl-C and SIGTERM in a driver: what they do instead of a traceback, or a death that takes the cluster along."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""What terminals, SLURM, ``docker stop`` and ``timeout`` send to ask a program for its end."""


@contextmanager
def handled(handle: Callable[[int], None]) -> Iterator[None]:
    """Call `handle` with the number of such a signal, where this thread is one that may say so."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        handle(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, on_signal) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Such a signal raises `SystemExit` with `exit_code`, so that all ``finally`` is done; a line on stderr says so."""
    came: list[int] = []

    def end(number: int) -> NoReturn:
        came.append(number)
        raise SystemExit(exit_code(number))

    with handled(end):
        try:
            yield
        except SystemExit:
            if came and sys.stderr is not None:
                print(f"unified: ended by {signal_name(came[0])}", file=sys.stderr)
            raise


def signal_name(number: int) -> str:
    """As people call it: ``Ctrl-C``, ``SIGTERM``."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def exit_code(number: int) -> int:
    """What a shell says of a program that this signal ended: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + number
