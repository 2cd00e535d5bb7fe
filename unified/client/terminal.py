"""stdout and stderr as a driver needs them: their reader may go away, and what workers print may hold anything."""

from __future__ import annotations

import errno
import os
import re
import sys
from typing import Self, TextIO, cast

from unified.config import settings
from unified.job.spec import DriverProcess

_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)
"""Of a pipe without a reader, a terminal that was closed, a descriptor that was. (A full disk is another matter.)"""
_UNWANTED = re.compile(
    r"(?P<colour>\x1b\[[0-9;:]*m)"
    r"|\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: moves the cursor, clears the screen
    r"|\x1b[]PX^_].*?(?:\x07|\x1b\\|\Z)"  # OSC and its like: sets the title or the clipboard, up to its end mark
    r"|\x1b[ -/]*[0-~]"
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f]",
    re.DOTALL,
)


def printable(line: str) -> str:
    """A line that does nothing to a terminal but colour it: control characters and escape sequences are dropped, all
    but tabs and SGR.
    """
    return line if line.isprintable() else _UNWANTED.sub(lambda found: found["colour"] or "", line)


def undecodable_replaced(text: str) -> str:
    """A text that was decoded with ``surrogateescape``, with U+FFFD for each byte that is no UTF-8."""
    return text if text.isascii() else text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def is_watched() -> bool:
    """Return True if a person looks at all that this process writes: stdout and stderr are both a terminal."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr))


def own_stdin() -> DriverProcess | None:
    """Return this process if a worker may read its stdin in its stead; None in the background of a terminal, where the
    shell reads, and without a stdin.
    """
    try:
        is_background = os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp()
        os.fstat(0)
        return None if is_background else DriverProcess(pid=os.getpid(), pid_space=settings.pid_space())
    except OSError:  # closed, or a system without /proc
        return None


def write_bytes(stream: TextIO, data: bytes) -> None:
    """Write bytes as they are, behind the text that was written before, and flush."""
    stream.flush()
    buffer = getattr(stream, "buffer", None)
    if buffer is None:  # a text stream of the user's that is no file
        stream.write(data.decode("utf-8", "replace"))
    else:
        buffer.write(data)
    stream.flush()


def lasting(stream: TextIO | None) -> TextIO:
    """The stream, which takes what is written in silence once nobody reads it any more, or if there is none."""
    return stream if isinstance(stream, _LastingStream) else cast("TextIO", _LastingStream(stream))


class _LastingStream:
    """What a display and rich need of a text stream."""

    @property
    def buffer(self) -> Self | None:
        """Takes bytes, where the stream does."""
        return self if hasattr(self._stream, "buffer") else None

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str | bytes) -> int:
        if self._stream is not None:
            try:
                if isinstance(text, str):
                    self._stream.write(text)
                else:
                    self._stream.buffer.write(text)
            except OSError as error:
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            try:
                self._stream.flush()
            except OSError as error:
                self._give_up(error)

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("there is no such stream.")
        return self._stream.fileno()

    def _give_up(self, error: OSError) -> None:
        """`| head` has seen enough, or the terminal is gone: nothing may be flushed at exit either."""
        if error.errno not in _GONE:
            raise error
        stream, self._stream = self._stream, None
        if stream is not None:
            try:
                number = stream.fileno()
            except OSError:  # not a file
                return
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)
