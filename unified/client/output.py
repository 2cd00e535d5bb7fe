"""Output of workers, written to the driver's own stdout and stderr.

A file or a pipe gets the output byte for byte, line by line; on a terminal each line has its worker in front.
`TracebackFilter` leaves out the tracebacks that were shown before.
A partial line is shown after a pause. If another worker prints then, the partial line is broken off. When it goes on,
it is written again from its beginning, so that each whole line stands together somewhere. If only its end was missing,
it is not written again.
"""

from __future__ import annotations

import functools
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Literal, TextIO

from unified.client.logs import Output, OutputSource, Stream, not_drawn_over, seen
from unified.client.terminal import printable, undecodable_replaced, write_bytes
from unified.protocol.client_master import JobStatus

Prefix = Literal["auto", "always", "never"]
LONGEST = 65536
"""Characters after which a line is written before its end."""
MAX_TRACEBACKS = 200
"""Number of tracebacks that are remembered."""
_ERASE_LINE = "\r\x1b[K"
_BEGUN = r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)*"
_CHAINED = r"(?:\n(?:The above exception|During handling of).*\n\n)?"
_TRACEBACK = re.compile(rf"{_BEGUN}[^ \t\n].*\n{_CHAINED}", re.MULTILINE)
_OPEN_TRACEBACK = re.compile(rf"{_BEGUN}.*\Z", re.MULTILINE)


@dataclass
class _Partial:
    """The beginning of a line."""

    text: str = ""
    shown: str = ""
    """Part of the line that was written before, also if another line has broken it off."""


class OutputWriter:
    """Writes the output of many workers to one place.

    Args:
        streams: where stdout and stderr of workers go. If there are two, both lead to one terminal or file.
        prefix: whether a line has its worker in front; ``auto``: on a terminal.

    Attributes:
        is_alone: there is one worker, so no other line can break off a partial one: all is written at once.
    """

    def __init__(self, streams: dict[Stream, TextIO], *, prefix: Prefix = "auto") -> None:
        self._streams = streams
        self._is_terminal = {name: stream.isatty() for name, stream in streams.items()}
        self._prefix = prefix
        self._partials: dict[OutputSource, _Partial] = {}
        self._open: OutputSource | None = None
        """Source of the partial line that was written last."""
        self._pieces: list[tuple[Stream, str]] = []
        self.is_alone = False

    def write(self, outputs: Iterable[Output]) -> None:
        """Write complete lines now, and a partial line after a pause."""
        for output in outputs:
            self._take(output)
        self._flush()

    def close(self) -> None:
        """Show the lines that were not ended."""
        for source, partial in self._partials.items():
            self._show(source, partial)
        self._flush()

    def break_line(self) -> None:
        """End an open line, because something else is about to be written to the same place."""
        self._go_to(None)
        self._flush()

    def _take(self, output: Output) -> None:
        source = output.source
        partial = self._partials.setdefault(source, _Partial())
        if output.note:
            self._go_to(None)
            self._put(source, f"{source.prefix}… {output.note}\n")
            partial.text = partial.shown = ""
        is_raw = self._is_raw(source)
        text = partial.text + output.text
        end = _end_of_whole(text, is_raw)
        if end:
            self._write_whole(source, partial, text[:end], is_raw)
            partial.shown = ""
        partial.text = text[end:] if is_raw else not_drawn_over(text[end:])
        if output.is_quiet or output.is_end or self.is_alone:
            self._show(source, partial)
        if output.is_end or not partial.text:
            del self._partials[source]

    def _write_whole(self, source: OutputSource, partial: _Partial, text: str, is_raw: bool) -> None:
        line, end, rest = text.partition("\n")
        if end and partial.shown and self._open != source and partial.shown == (line if is_raw else seen(line)):
            text, partial = rest, _Partial()  # broken off where it ends: an unbuffered print writes the end alone
        if not text:
            return
        if is_raw:
            self._draw(source, partial, text)
            if text[-1] == "\n":
                self._open = None
            return
        for number, line in enumerate(text.removesuffix("\n").split("\n")):
            self._draw(source, partial if number == 0 else _Partial(), seen(line))
            self._go_to(None)

    def _show(self, source: OutputSource, partial: _Partial) -> None:
        visible = partial.text if self._is_raw(source) else seen(partial.text)
        if visible != partial.shown:
            self._draw(source, partial, visible)

    def _draw(self, source: OutputSource, partial: _Partial, visible: str) -> None:
        """Write a line; only its rest, if its beginning is the last that was written."""
        self._go_to(source)
        front = self._front(source)
        if self._open is None:
            self._put(source, front + self._clean(source, visible))
        elif visible.startswith(partial.shown):
            self._put(source, self._clean(source, visible[len(partial.shown) :]))
        else:
            again = _ERASE_LINE if self._is_terminal[source.stream] else "\n"
            self._put(source, again + front + self._clean(source, visible))
        self._open, partial.shown = source, visible

    def _go_to(self, source: OutputSource | None) -> None:
        """End the open line, unless it is of this source."""
        if self._open is not None and self._open != source:
            self._put(self._open, "\n")
            self._open = None

    def _is_raw(self, source: OutputSource) -> bool:
        return not self._is_terminal[source.stream] and not self._front(source)

    def _front(self, source: OutputSource) -> str:
        is_wanted = self._prefix == "always" or (self._prefix == "auto" and self._is_terminal[source.stream])
        return source.prefix if is_wanted or source.is_prefixed else ""

    def _clean(self, source: OutputSource, text: str) -> str:
        return printable(undecodable_replaced(text)) if self._is_terminal[source.stream] else text

    def _put(self, source: OutputSource, text: str) -> None:
        if text:
            self._pieces.append((source.stream, text))

    def _flush(self) -> None:
        for name, pieces in groupby(self._pieces, key=itemgetter(0)):
            stream, text = self._streams[name], "".join(text for _, text in pieces)
            if self._is_terminal[name]:
                stream.write(text)
                stream.flush()
            else:
                write_bytes(stream, text.encode("utf-8", "surrogateescape"))
        self._pieces.clear()


class WorkerOutput:
    """Writes the output of workers to stdout and stderr of this process; `prefix` is as of `OutputWriter`."""

    def __init__(self, out: TextIO, err: TextIO, prefix: Prefix = "auto") -> None:
        if is_same_place(out, err):
            self._out = self._err = OutputWriter({"out": out, "err": err}, prefix=prefix)
        else:
            self._out = OutputWriter({"out": out}, prefix=prefix)
            self._err = OutputWriter({"err": err}, prefix=prefix)

    def update(self, status: JobStatus) -> None:
        """Note whether there is only one worker: no other line can break off its partial lines."""
        if sum(role.total for role in status.roles) == 1:
            self._out.is_alone = self._err.is_alone = True

    def write(self, outputs: list[Output]) -> None:
        """Write each output to the stream of this process that it belongs to."""
        if self._out is self._err:
            self._out.write(outputs)
            return
        self._out.write(output._replace(note="") for output in outputs if output.source.stream == "out")
        self._err.write(
            output if output.source.stream == "err" else Output(output.source._replace(stream="err"), note=output.note)
            for output in outputs
            if output.source.stream == "err" or output.note  # notes are our own text, so they go to stderr
        )

    def break_line(self) -> None:
        """End an open line, because a sentence of ours is about to be written to stderr."""
        self._err.break_line()

    def close(self) -> None:
        """Show the lines that were not ended, and begin a new one on stderr."""
        self._out.close()
        self._err.close()
        self.break_line()


class TracebackFilter:
    """Shows each traceback in the stderr of workers once, and for other workers and incarnations only its last line."""

    def __init__(self) -> None:
        self._shown_by: dict[str, OutputSource] = {}
        self._open: dict[OutputSource, str] = {}
        """Beginnings of tracebacks, by source."""

    def feed(self, outputs: Iterable[Output]) -> Iterator[Output]:
        """Yield the outputs to show. A partial traceback waits for its end."""
        for output in outputs:
            source = output.source
            if source.stream != "err":
                yield output
                continue
            begun = self._open.pop(source, "")
            if begun and output.note:
                yield Output(source, begun)
                begun = ""
            text = _TRACEBACK.sub(functools.partial(self._once, source), begun + output.text)
            is_over = output.is_end or output.is_quiet or len(text) > LONGEST
            if not is_over and (found := _OPEN_TRACEBACK.search(text)):
                self._open[source] = found[0]
                text = text[: found.start()]
            yield output._replace(text=text)

    def has_shown(self, traceback: str) -> bool:
        parts = _TRACEBACK.findall(traceback)
        return bool(parts) and all(part in self._shown_by for part in parts)

    def _once(self, source: OutputSource, found: re.Match[str]) -> str:
        text = found[0]
        if text not in self._shown_by and len(self._shown_by) < MAX_TRACEBACKS:
            self._shown_by[text] = source
        if (first := self._shown_by.get(text, source)) == source:
            return text
        *_, line, end = text.split("\n")
        return "" if not line else f"{line} (the same traceback as {first.prefix.strip('[]: ')}, above)\n{end}"


def is_same_place(one: TextIO, other: TextIO) -> bool:
    """Return True if both streams write to the same terminal, file or pipe."""
    if one.isatty() and other.isatty():
        return True
    try:
        first, second = (os.fstat(stream.fileno()) for stream in (one, other))
    except (OSError, ValueError):
        return one is other
    return (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino) and not stat.S_ISCHR(first.st_mode)


def _end_of_whole(text: str, is_raw: bool) -> int:
    """Return the end of the part that is written without waiting for more text."""
    end = text.rfind("\n") + 1
    if is_raw:  # each state of a progress bar is written at once
        end = max(end, text.rfind("\r") + 1)
    return len(text) if len(text) - end > LONGEST else end
