"""stdout and stderr as a driver needs them: their reader may go away, and what workers print may hold anything."""

from __future__ import annotations

import errno
import os
import re
from typing import TextIO, cast

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


def lasting(stream: TextIO | None) -> TextIO:
    """The stream, which takes what is written in silence once nobody reads it any more, or if there is none."""
    return stream if isinstance(stream, _LastingStream) else cast("TextIO", _LastingStream(stream))


class _LastingStream:
    """What a display and rich need of a text stream."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        if self._stream is not None:
            try:
                self._stream.write(text)
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
