"""Search in logs on the host that has them, so that only matching lines are sent.

Each request runs one process (`matcher`), which searches for a moment and reports how far it came. The reader asks
again from there. A pattern that takes too long for one part of a log is refused.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from json import dumps
from pathlib import Path

from unified.protocol.agent_master import ReadAgentLog
from unified.threads import call_guarded, start_thread
from unified_agent.logs import matcher
from unified_agent.logs.logfile import MAX_SLICE_BYTES, LogPart, LogSlice

MAX_AT_ONCE = 4
WITHIN_S = 0.5
"""Time after which a search reports how far it came, so that the reader asks for the rest."""
KILLED_AFTER_S = 5
_OFFSET_BYTES = 8


RunProgram = Callable[[list[str], float, list[int]], tuple[bytes, bytes]]
"""Function like `Processes.run_program`."""


class LogSearches:
    """The running searches, at most `MAX_AT_ONCE`; a further request is answered as busy."""

    def __init__(self, run: RunProgram) -> None:
        self._run = run
        self._free = threading.Semaphore(MAX_AT_ONCE)

    def begin(
        self,
        order: ReadAgentLog,
        path: Path,
        segments: list[LogPart],
        limits: tuple[int, int],
        *,
        is_growing: bool,
        answer: Callable[[LogSlice], None],
    ) -> None:
        """Search between the limits, from the order's offset on, in a thread.

        Args:
            is_growing: True if a last line without a newline may still grow.
        """
        first, newest = segments[0][0], segments[-1]
        size = newest[0] + newest[1]
        offset = min(max(order.offset, first, limits[0]), size)
        end = min(size, limits[1])
        if offset >= end:
            answer(LogSlice(offset=offset, size=size, path=str(path), next_offset=size))
            return
        if not self._free.acquire(blocking=False):
            answer(LogSlice(offset=offset, size=size, path=str(path), next_offset=offset, is_busy=True))
            return
        opened = ExitStack()
        opened.callback(self._free.release)
        try:
            files = [opened.enter_context(file.open("rb")) for _, _, file in segments]
            wanted = {
                "pattern": order.grep,
                "parts": [(at, length, file.fileno()) for (at, length, _), file in zip(segments, files, strict=True)],
                "start": offset,
                "end": end,
                "takes_rest": end < size or not is_growing,
                "max_bytes": max(2, min(order.max_bytes, MAX_SLICE_BYTES)),
                "within_s": WITHIN_S,
            }
            command = [sys.executable, "-I", "-S", matcher.__file__, dumps(wanted), str(KILLED_AFTER_S + 1)]
            empty = LogSlice(offset=offset, size=size, path=str(path))

            def serve() -> None:
                with opened:
                    found = self._found(command, [file.fileno() for file in files], empty)
                is_whole = found.next_offset is not None and found.next_offset >= end
                answer(found._replace(next_offset=size) if is_whole else found)

            start_thread("log-search", call_guarded, "log-unread", serve)
        except (OSError, RuntimeError) as error:
            opened.close()
            answer(LogSlice(path=str(path), error=f"it cannot be searched: {error}"))

    def _found(self, command: list[str], passed: list[int], empty: LogSlice) -> LogSlice:
        try:
            out, why = self._run(command, KILLED_AFTER_S, passed)
        except subprocess.TimeoutExpired:
            text = f"the pattern takes more than {KILLED_AFTER_S} s for one part of the log: use a simpler pattern"
            return empty._replace(error=text)
        except OSError as error:
            return empty._replace(error=f"it cannot be searched: {error.strerror}")
        if len(out) < _OFFSET_BYTES:
            said = why.decode(errors="replace").strip().splitlines()
            return empty._replace(error=said[-1] if said else "the search process was killed")
        return empty._replace(data=out[_OFFSET_BYTES:], next_offset=int.from_bytes(out[:_OFFSET_BYTES], "big"))
