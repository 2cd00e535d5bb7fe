"""Trace of the product files and functions that run, in the order in which each was first entered."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
TREES = tuple(str(ROOT / tree) + "/" for tree in ("unified", "agent", "master"))


class FileTrace:
    """Files of ours that were entered, by `sys.setprofile`: in the block of `here`, and in other threads.

    Args:
        threads: beginning of the names of those threads, which must start after this is made.
    """

    def __init__(self, threads: str) -> None:
        self._threads = threads
        self.is_on = False
        """Threads other than the one in `here` are recorded while this is set."""
        self._entered: dict[tuple[str, str], None] = {}
        threading.setprofile(self._note)

    def close(self) -> None:
        threading.setprofile(None)
        self.is_on = False

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(file for file, _ in self.functions))

    @property
    def functions(self) -> list[tuple[str, str]]:
        """Files, each with the qualified name of a function in it."""
        return [(file.removeprefix(f"{ROOT}/"), name) for file, name in list(self._entered)]

    @contextmanager
    def here(self) -> Iterator[None]:
        """Record this thread, and the others from now on until `is_on` is unset."""
        self._entered.clear()
        self.is_on = True
        sys.setprofile(self._note_here)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.is_on and threading.current_thread().name.startswith(self._threads):
            self._note_here(frame, event, argument)

    def _note_here(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(TREES):
            self._entered[frame.f_code.co_filename, frame.f_code.co_qualname] = None
