"""Count of a method's work, so that a test sees how the work grows without a clock."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest


class WorkCount:
    """Number of lines that run within a method, with a line of a comprehension once for each item.

    Args:
        owner: class whose method is counted from now on.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> None:
        self._number = 0
        counted: Callable[..., Any] = getattr(owner, method)

        def trace(_frame: FrameType, event: str, _argument: object) -> Any:
            self._number += event == "line"
            return trace

        def count(*args: Any) -> Any:
            before = sys.gettrace()
            sys.settrace(trace)
            try:
                return counted(*args)
            finally:
                sys.settrace(before)

        monkeypatch.setattr(owner, method, count)

    def take(self) -> int:
        """Return the number since the last look."""
        taken, self._number = self._number, 0
        return taken
