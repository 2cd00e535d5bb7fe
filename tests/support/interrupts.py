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
    """Raises `Interrupt` once in each `run`, at the first point of the code below a folder that had none yet.

    A test repeats `run` until it passes no such point any more. So each point that was passed had its interrupt,
    whatever way the runs went.

    Attributes:
        hit: points that had an interrupt, each a code object and the offset of an instruction; -1: where it begins.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._last: dict[FrameType, int] = {}
        self._is_armed = False
        self.hit: dict[Point, None] = {}

    def run(self, function: Callable[[], object]) -> Point | None:
        """Call it on this thread; return the point of its interrupt, or None if it passed no new one."""
        sys._getframe().f_trace_opcodes = True  # from Python 3.12 on, `settrace` looks whether any frame has it, and
        # a function shows its instructions from its second call on
        self._is_armed = True
        sys.settrace(self._on_call)
        try:
            function()
        except Interrupt:
            pass
        finally:
            sys.settrace(None)
            self._last.clear()
        return None if self._is_armed else [*self.hit][-1]

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
        if self._is_armed and point not in self.hit:
            self._is_armed = False
            self.hit[point] = None
            self._interrupt()

    def _interrupt(self) -> None:
        raise Interrupt
