"""The driver's terminal: standard streams whose reader may go away, text that may hold anything, Ctrl-C and SIGTERM.

A handler turns a signal into an end in order. Otherwise Python prints a traceback, or dies at once with its cluster.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Self, TextIO, cast

from unified.config import settings
from unified.job.spec import DriverProcess

_FULL = (errno.ENOSPC, errno.EDQUOT)
_GONE = (errno.EPIPE, errno.EIO, errno.EBADF, *_FULL)
"""Errors of a pipe without a reader, of a closed terminal or descriptor, of a full disk."""
_UNWANTED = re.compile(
    r"(?P<colour>\x1b\[[0-9;:]*m)"
    r"|\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: moves the cursor, clears the screen
    r"|\x1b[]PX^_].*?(?:\x07|\x1b\\|\Z)"  # OSC and its like: sets the title or the clipboard, up to its end mark
    r"|\x1b[ -/]*[0-~]"
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]",  # the last ones change the direction of text
    re.DOTALL,
)
SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals by which terminals, SLURM, ``docker stop`` and ``timeout`` ask a program to end."""

PASSED_ON = frozenset({signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP})
"""Signals to a driver that are meant for its workers: a batch system announces the end of an allocation by them."""


def printable(line: str) -> str:
    """Drop control characters, escape sequences and marks that change the direction of text; keep tabs and colours."""
    return line if line.isprintable() else _UNWANTED.sub(lambda found: found["colour"] or "", line)


def undecodable_replaced(text: str) -> str:
    """Put U+FFFD for each byte that is no UTF-8 into a text that was decoded with ``surrogateescape``."""
    return text if text.isascii() else text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def is_watched() -> bool:
    """Return True if a person sees all output of this process: stdout and stderr are both terminals."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr))


def own_stdin() -> DriverProcess | None:
    """Return this process if a worker may read its stdin. None: it has no stdin, or it is in the background of a
    terminal, where the shell reads.
    """
    try:
        is_background = os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp()
        os.fstat(0)
        return None if is_background else DriverProcess(pid=os.getpid(), pid_space=settings.pid_space())
    except OSError:  # closed, or a system without /proc
        return None


def write_bytes(stream: TextIO, data: bytes) -> None:
    """Flush the text that was written before, write bytes unchanged, and flush."""
    stream.flush()
    buffer = getattr(stream, "buffer", None)
    if buffer is None:  # a text stream of the user's that is no file
        stream.write(data.decode("utf-8", "replace"))
    else:
        buffer.write(data)
    stream.flush()


def lasting(stream: TextIO | None) -> TextIO:
    """Return a stream that drops what is written, without an error, if it is None or has no reader any more, and from
    the moment on when its disk is full, which stderr says."""
    return stream if isinstance(stream, _LastingStream) else cast("TextIO", _LastingStream(stream))


class _LastingStream:
    """The part of a text stream that a display and rich need."""

    @property
    def buffer(self) -> Self | None:
        """Return this object, to which bytes may be written, if the stream takes bytes."""
        return self if hasattr(self._stream, "buffer") else None

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str | bytes) -> int:
        self._try(lambda stream: stream.write(text) if isinstance(text, str) else stream.buffer.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(lambda stream: stream.flush())

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("there is no such stream.")
        return self._stream.fileno()

    def _try(self, use: Callable[[TextIO], object]) -> None:
        if (stream := self._stream) is None:
            return
        try:
            use(stream)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            self._stream = None
            # `| head` has ended, or the terminal is gone. The flush at exit must not fail either.
            try:
                number = stream.fileno()
            except OSError:  # not a file
                return
            file = Path(os.path.realpath(f"/proc/self/fd/{number}"))  # of a closed descriptor, this very path
            if (nowhere := os.open(os.devnull, os.O_WRONLY)) != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            if error.errno in _FULL:
                disk = next((each for each in file.parents if os.path.ismount(each)), "")
                text = f"{error.strerror} (disk {disk}): {file} lacks all further output; `unified logs` shows it"
                print(f"unified: {text}", file=lasting(sys.stderr))


class _OwnHandler:
    """A handler of this module. An inner `handled` may replace it for a while."""

    def __init__(self, handle: Callable[[int], None]) -> None:
        self._handle = handle

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._handle(number)


@contextmanager
def handled(handle: Callable[[int], None], more: Iterable[int] = ()) -> Iterator[None]:
    """Call `handle` with the number of each signal of `SIGNALS`, and of those in `more` that nobody else handles or
    ignores. Does nothing outside the main thread, where Python sets no handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    on_signal = _OwnHandler(handle)
    others = [number for number in more if _is_free(signal.getsignal(number))]
    before = {number: signal.signal(number, on_signal) for number in (*SIGNALS, *others)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _is_free(handler: object) -> bool:
    return handler == signal.SIG_DFL or isinstance(handler, _OwnHandler)


@contextmanager
def ending_at_once(dropped: Iterable[int] = ()) -> Iterator[None]:
    """Raise `SystemExit` with `exit_code` on a signal of `SIGNALS`, so that each ``finally`` runs; tell it on stderr.

    Args:
        dropped: signals that have no effect, unless this process handles or ignores them already.
    """
    came: list[int] = []

    def end(number: int) -> None:
        if number in SIGNALS:
            came.append(number)
            raise SystemExit(exit_code(number))

    with handled(end, dropped):
        try:
            yield
        except SystemExit:
            if came and sys.stderr is not None:
                print(f"unified: ended by {signal_name(came[0])}", file=sys.stderr)
            raise


def signal_name(number: int) -> str:
    """Return the name that people know: ``Ctrl-C``, ``SIGTERM``."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def exit_code(number: int) -> int:
    """Exit code of a program that this signal ended: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + number
