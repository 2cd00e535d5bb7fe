"""Stacks of this worker, which its agent asks for when somebody wants to see them.

The control thread answers with the interpreter's own frames and torch's flight record. If a C function holds the
interpreter's lock, no Python code can answer, and the agent sends SIGUSR2. The handler that `faulthandler` installed
then writes all stacks into a file in memory, which the agent reads through ``/proc``. When user code takes SIGUSR2 for
itself, that file is closed, and without it the agent sends no signal.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

from unified.core.hangs import flight_record
from unified.core.hangs.stacks import MAX_FRAMES, Thread, add_threads, frame
from unified.core.hangs.verdict import DEFAULT_GROUP
from unified.protocol.stacks import GroupCollectives, StackReport, WorkerStacks
from unified.protocol.worker_agent import Launch
from unified.worker import cleanup_watch

SIGNAL = signal.SIGUSR2
"""Signal of the handler. NCCL, among others, uses SIGUSR1."""
MEMORY_FILE = "unified-stacks"


class StackDumper:
    """Makes reports of this process's stacks.

    Args:
        launch: identity of the worker.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._rank = launch.place.rank
        self._round_began_ns = 0
        self._has_ended = False
        self._file = -1

    def install(self) -> None:
        """Install the signal handler. Main thread only, and before user code runs."""
        self._file = os.memfd_create(MEMORY_FILE, os.MFD_CLOEXEC)
        fcntl.fcntl(self._file, fcntl.F_SETFL, os.O_APPEND)  # the reader truncates the file before each signal
        faulthandler.register(SIGNAL, file=self._file, all_threads=True, chain=False)
        for module, name in ((signal, "signal"), (faulthandler, "register")):
            self._watch(module, name)

    def begin_round(self, rank: int) -> None:
        """Forget the collectives of earlier rounds; `rank` is the one in the new round."""
        self._rank = rank
        self._round_began_ns = time.time_ns()

    def end_program(self) -> None:
        self._has_ended = True

    def num_collectives(self) -> int | None:
        """Return the number of collectives of the default group that the program has entered."""
        groups, _, _ = self._collectives()
        return next((group.entered for group in groups or () if group.group == DEFAULT_GROUP), None)

    def open_collective(self) -> str:
        """Return the first collective that this rank has entered and not left, as ``all_reduce 31``; empty: none."""
        groups, _, _ = self._collectives()
        found = [each for group in groups or () for each in group.recent if not each.is_done]
        return f"{found[0].operation} {found[0].number}" if found else ""

    def report(self) -> StackReport:
        """Return the stacks of all threads but the calling one, and the collectives of the round."""
        launch = self._launch
        groups, is_cut, note = self._collectives()
        error = cleanup_watch.handled()
        worker = WorkerStacks(
            worker=launch.name,
            incarnation=launch.incarnation,
            rank=self._rank,
            node=launch.node,
            pid=os.getpid(),
            source="interpreter",
            note=note,
            groups=groups,
            handles="" if error is None else cleanup_watch.in_words(error),
            has_ended=self._has_ended,
            is_cut=is_cut,
        )
        return add_threads(worker, threads())

    def _collectives(self) -> tuple[list[GroupCollectives] | None, bool, str]:
        distributed = sys.modules.get("torch.distributed")
        try:
            if distributed is None or not distributed.is_available():
                return [], False, ""
            dump = getattr(sys.modules["torch"]._C._distributed_c10d, "_dump_fr_trace_json", None)
        except AttributeError:
            return None, False, "torch is being imported"
        if dump is None:
            return None, False, f"torch {sys.modules['torch'].__version__} has no flight recorder"
        try:
            record = flight_record.read(dump(), process_groups(), self._round_began_ns, time.time_ns())
        except ValueError as error:
            return None, False, str(error)
        return record.groups, record.is_cut, ""

    def _watch(self, module: ModuleType, name: str) -> None:
        """Wrap a function that installs handlers: it first removes ours if the signal is the same."""
        real: Callable[..., Any] = getattr(module, name)

        @functools.wraps(real)
        def install(signalnum: int, *args: Any, **options: Any) -> Any:
            if signalnum == SIGNAL:
                self._remove()
            return real(signalnum, *args, **options)

        setattr(module, name, install)

    def _remove(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            faulthandler.unregister(SIGNAL)
            os.close(file)


def threads() -> list[Thread]:
    """Return all threads of this process but the calling one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own, main = threading.get_ident(), threading.main_thread().ident
    return [
        Thread(names.get(ident) or f"thread {ident}", _lines(top), ident == main)
        for ident, top in sys._current_frames().items()
        if ident != own
    ]


def _lines(top: FrameType | None) -> list[str]:
    lines: list[str] = []
    while top is not None and len(lines) < MAX_FRAMES:
        lines.insert(0, frame(top.f_code.co_filename, top.f_lineno, top.f_code.co_name))
        top = top.f_back
    return lines


def process_groups() -> dict[str, list[int]]:
    """Return the ranks of each process group of torch that there is now, by its name.

    torch has no public way to list the groups; without this the verdict knows only the groups that were used.
    """
    found: dict[str, list[int]] = {}
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    with contextlib.suppress(AttributeError, KeyError, TypeError, RuntimeError):
        world = c10d._world  # type: ignore[union-attr]
        for group, name in list(world.pg_names.items()):
            found[str(name)] = sorted(world.pg_group_ranks[group])
    return found
