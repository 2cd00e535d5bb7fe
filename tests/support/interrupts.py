"""Interrupts at chosen points: what a signal's handler raises, at each place at which Python looks for signals.

Python looks for signals where a function begins, after it called one written in C, and before it repeats a loop. A
trace function sees the same places, so a test can have them one by one instead of waiting for a signal to hit them.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

_CHECKED = {number for name, number in dis.opmap.items() if name.startswith(("CALL", "JUMP_BACKWARD"))}
_BEGIN = -1
Point = tuple[CodeType, int]


class Interrupt(BaseException):
    """Stands for KeyboardInterrupt."""


class Interrupter:
    """Raises `Interrupt` at one point of the code below a folder, in functions that are given to `run`.

    Attributes:
        seen: points that were passed, each a code object and the offset of an instruction; -1: where it begins.
        target: point at which to raise; None again once that was done.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._last: dict[FrameType, int] = {}
        self.seen: dict[Point, None] = {}
        self.target: Point | None = None

    def run(self, function: Callable[[], object]) -> None:
        """Call it on this thread; returns also when it was interrupted."""
        sys._getframe().f_trace_opcodes = True  # from Python 3.12 on, `settrace` looks whether any frame has it, and
        # a function shows its instructions from its second call on
        sys.settrace(self._on_call)
        try:
            function()
        except Interrupt:
            pass
        finally:
            sys.settrace(None)
            self._last.clear()

    def _on_call(self, frame: FrameType, event: str, value: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._folder):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._last.pop(frame, None)
        self._pass((frame.f_code, _BEGIN))
        return self._on_event

    def _on_event(self, frame: FrameType, event: str, value: Any) -> Any:
        if event == "return":
            self._last.pop(frame, None)
            if frame.f_back in self._last:
                self._last[frame.f_back] = _BEGIN  # after one written in Python it does not look
        elif event == "opcode":
            before = self._last.get(frame)
            self._last[frame] = frame.f_code.co_code[frame.f_lasti]
            if before in _CHECKED:
                self._pass((frame.f_code, frame.f_lasti))
        return self._on_event

    def _pass(self, point: Point) -> None:
        self.seen[point] = None
        if point == self.target:
            self.target = None
            raise Interrupt
