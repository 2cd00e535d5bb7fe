"""The processes that write a server's snapshots to storage, a few at a time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from unified.protocol.snapshots import StorageTarget
from unified.snapshot.storage import write_within_s

MAX_WRITERS = 2
OnEnd = Callable[[str], None]


@dataclass(eq=False)
class _Order:
    descriptor: int
    length: int
    target: StorageTarget
    name: str
    on_end: OnEnd

    @property
    def within_s(self) -> float:
        """Time after which its writer is killed."""
        return write_within_s(self.length)


@dataclass(eq=False)
class _Writer:
    order: _Order
    process: subprocess.Popen[bytes]
    pidfd: int
    errors: IO[bytes]
    deadline: float


class StorageWriters:
    """Writers at work, and orders that wait for one."""

    def __init__(self) -> None:
        self._waiting: deque[_Order] = deque()
        self._writers: dict[int, _Writer] = {}

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._writers

    @property
    def next_deadline(self) -> float | None:
        """Time of the monotonic clock at which `tick` is due."""
        return min((writer.deadline for writer in self._writers.values()), default=None)

    def watched(self) -> dict[int, Callable[[], None]]:
        """Return the descriptors to poll, with the functions to call."""
        return {
            pidfd: lambda writer=writer: self._on_ended(writer)  # type: ignore[misc]
            for pidfd, writer in self._writers.items()
        }

    def write(self, descriptor: int, length: int, target: StorageTarget, name: str, on_end: OnEnd) -> None:
        """Have the first `length` bytes of a buffer written; `on_end` gets the error, or ""."""
        self._waiting.append(_Order(descriptor, length, target, name, on_end))
        self._go_on()

    def tick(self) -> None:
        """Kill writers that take too long."""
        now = time.monotonic()
        for writer in self._writers.values():
            if writer.deadline <= now:
                writer.process.kill()
                writer.deadline = now + writer.order.within_s

    def close(self) -> None:
        """Kill all writers, and drop the waiting orders."""
        self._waiting.clear()
        for writer in list(self._writers.values()):
            writer.process.kill()
            self._on_ended(writer)

    def _go_on(self) -> None:
        while self._waiting and len(self._writers) < MAX_WRITERS:
            order = self._waiting.popleft()
            try:
                self._start(order)
            except OSError as error:
                order.on_end(f"a process to write it cannot be started: {error.strerror}")

    def _start(self, order: _Order) -> None:
        target = order.target
        with contextlib.ExitStack() as undo:
            errors = undo.enter_context(tempfile.TemporaryFile())
            running = subprocess.Popen(
                [
                    *(sys.executable, "-m", "unified.snapshot.storage", str(order.descriptor), str(order.length)),
                    *(target.location, target.folder, order.name, "--parent", str(os.getpid())),
                ],
                pass_fds=[order.descriptor],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, **target.env},
            )
            undo.callback(running.wait)
            undo.callback(running.kill)
            pidfd = os.pidfd_open(running.pid)
            undo.pop_all()
        self._writers[pidfd] = _Writer(order, running, pidfd, errors, time.monotonic() + order.within_s)

    def _on_ended(self, writer: _Writer) -> None:
        code = writer.process.wait()
        del self._writers[writer.pidfd]
        os.close(writer.pidfd)
        with writer.errors as errors:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
        if code == 0:
            writer.order.on_end("")
        elif code == -signal.SIGKILL:
            writer.order.on_end(f"it was killed, or took longer than {writer.order.within_s:.0f} s")
        else:
            writer.order.on_end(lines[-1] if lines else f"its writer ended with code {code}")
        self._go_on()
