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
from unified.snapshot.core.inventory import SnapshotBuffer
from unified.snapshot.storage import write_within_s

MAX_WRITERS = 2


@dataclass(eq=False)
class WriteOrder:
    """A snapshot on its way to storage."""

    buffer: SnapshotBuffer
    descriptor: int
    target: StorageTarget
    name: str

    @property
    def within_s(self) -> float:
        """Time after which its writer is killed."""
        return write_within_s(self.buffer.length)


@dataclass(eq=False)
class StorageWriter:
    """One writer at work."""

    order: WriteOrder
    process: subprocess.Popen[bytes]
    pidfd: int
    errors: IO[bytes]
    deadline: float


class StorageWriters:
    """Writers at work, and orders that wait for one. `on_end` gets each order in the end, and the error, or ""."""

    def __init__(self, on_end: Callable[[WriteOrder, str], None]) -> None:
        self._on_end = on_end
        self._waiting: deque[WriteOrder] = deque()
        self._writers: dict[int, StorageWriter] = {}

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._writers

    @property
    def next_deadline(self) -> float | None:
        """Time of the monotonic clock at which `tick` is due."""
        return min((writer.deadline for writer in self._writers.values()), default=None)

    def watched(self) -> dict[int, StorageWriter]:
        """Return the descriptors to poll, with the writers that have ended when they can be read."""
        return dict(self._writers)

    def write(self, order: WriteOrder) -> None:
        self._waiting.append(order)
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
            self.end(writer)

    def _go_on(self) -> None:
        while self._waiting and len(self._writers) < MAX_WRITERS:
            order = self._waiting.popleft()
            try:
                self._start(order)
            except OSError as error:
                self._on_end(order, f"a process to write it cannot be started: {error.strerror}")

    def _start(self, order: WriteOrder) -> None:
        target = order.target
        with contextlib.ExitStack() as undo:
            errors = undo.enter_context(tempfile.TemporaryFile())
            running = subprocess.Popen(
                [
                    *(sys.executable, "-m", "unified.snapshot.storage", str(order.descriptor)),
                    *(str(order.buffer.length), target.location, target.folder, order.name),
                    *("--parent", str(os.getpid())),
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
        self._writers[pidfd] = StorageWriter(order, running, pidfd, errors, time.monotonic() + order.within_s)

    def end(self, writer: StorageWriter) -> None:
        """Take the result of a writer that has ended."""
        code = writer.process.wait()
        del self._writers[writer.pidfd]
        os.close(writer.pidfd)
        with writer.errors as errors:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
        if code == 0:
            error = ""
        elif code == -signal.SIGKILL:
            error = f"it was killed, or took longer than {writer.order.within_s:.0f} s"
        else:
            error = lines[-1] if lines else f"its writer ended with code {code}"
        self._on_end(writer.order, error)
        self._go_on()
