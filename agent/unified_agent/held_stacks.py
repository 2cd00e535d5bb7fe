"""Stacks of workers whose interpreter does not answer, read from outside, on one thread per read.

Tried in this order: `faulthandler`, by SIGUSR2, if its file in memory exists (see `unified.worker.stacks`); py-spy, if
it is installed and the kernel lets it attach. A process that a signal has stopped runs no handler.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from pathlib import Path

import msgspec

from unified import process
from unified.core.hangs.stacks import Thread, add_threads, read_faulthandler, read_py_spy
from unified.protocol.stacks import StackReport, StackSource, WorkerStacks
from unified.threads import call_guarded, start_thread
from unified_agent.core.messages import HeldStacksRead, ReadHeldStacks
from unified_agent.logs.search import RunProgram
from unified_agent.measure.profiles import find_program

SIGNAL = signal.SIGUSR2
MEMORY_FILE = "/memfd:unified-stacks"
"""Beginning of the file's link in ``/proc``; `unified.worker.stacks` gives the name."""
POLL_S = 0.01
QUIET_S = 0.1
"""Time without further output after which a dump counts as complete."""
MAX_BYTES = 1 << 20
_STATES = {
    "T": "a signal (SIGSTOP or SIGTSTP) has stopped its process; SIGCONT lets it go on",
    "t": "a debugger has stopped its process",
    "D": "its process is in a system call that cannot be interrupted, such as a read of a file system that hangs",
    "Z": "its process has ended",
}


class HeldStacks:
    """Reads stacks; `take` has the answers. Both are called from the daemon's loop and return at once.

    Args:
        run: runs py-spy, as `Processes.run_program` does.
    """

    def __init__(self, run: RunProgram) -> None:
        self._run_program = run
        self.ready = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable when `take` has something."""
        self._answers: deque[HeldStacksRead] = deque()

    def read(self, order: ReadHeldStacks, pidfd: int) -> None:
        """Start a read; the descriptor of the process is closed here."""
        try:
            start_thread("held-stacks", call_guarded, "stacks-unread", self._run, order, pidfd)
        except RuntimeError as error:
            worker = msgspec.structs.replace(order.worker, note=f"its agent has no thread to read them with: {error}")
            self._answer(order, pidfd, StackReport(workers=[worker]))

    def take(self) -> list[HeldStacksRead]:
        """Return the answers since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.ready)
        return [self._answers.popleft() for _ in range(len(self._answers))]

    def _run(self, order: ReadHeldStacks, pidfd: int) -> None:
        report = StackReport(workers=[order.worker])
        try:
            report = read_held(order.worker, pidfd, order.within_s, self._run_program)
        finally:
            self._answer(order, pidfd, report)

    def _answer(self, order: ReadHeldStacks, pidfd: int, report: StackReport) -> None:
        if pidfd >= 0:
            os.close(pidfd)
        self._answers.append(HeldStacksRead(incarnation=order.incarnation, number=order.number, report=report))
        os.eventfd_write(self.ready, 1)


def read_held(worker: WorkerStacks, pidfd: int, within_s: float, run: RunProgram) -> StackReport:
    """Return the stacks of a worker, and why its interpreter did not answer, as far as that is known."""
    until = time.monotonic() + within_s
    pid = worker.pid
    found = process.facts(pid)
    state = found.state if found is not None else "Z"
    threads: list[Thread] = []
    source: StackSource = "none"
    note = _STATES.get(state, "its interpreter is held by a C function or a system call that has not returned")
    if state not in _STATES and pidfd >= 0:
        threads, source = _by_faulthandler(pid, pidfd, until), "faulthandler"
    if not threads:
        (threads, why), source = _by_py_spy(pid, until, run), "py-spy"
        note += f"; {why}" if why else ""
    return add_threads(msgspec.structs.replace(worker, source=source if threads else "none", note=note), threads)


def _by_faulthandler(pid: int, pidfd: int, until: float) -> list[Thread]:
    """Let the handler write, and read its dump; empty if there is no handler, or it did not write in time."""
    is_ready = process.is_handled(pid, SIGNAL) and not process.is_blocked(pid, SIGNAL)
    if not is_ready or (path := _memory_file(pid)) is None:
        return []
    try:
        with open(path, "r+b", buffering=0) as file:
            file.truncate(0)
            signal.pidfd_send_signal(pidfd, SIGNAL)
            text = _read_whole(file.fileno(), until)
    except OSError:
        return []
    return read_faulthandler(text.decode(errors="replace"))


def _memory_file(pid: int) -> Path | None:
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(path).startswith(MEMORY_FILE):
                    return path
    return None


def _read_whole(file: int, until: float) -> bytes:
    """Return the dump once it grows no more."""
    size, grew_at = 0, time.monotonic()
    while (now := time.monotonic()) < until and not (size and now - grew_at > QUIET_S):
        if (found := os.fstat(file).st_size) > size:
            size, grew_at = found, now
        time.sleep(POLL_S)
    return os.pread(file, MAX_BYTES, 0)


def _by_py_spy(pid: int, until: float, run: RunProgram) -> tuple[list[Thread], str]:
    """Return the threads, or none and the reason."""
    if (program := find_program("py-spy")) is None:
        return [], "py-spy, which could look from outside, is not installed on its node"
    command = [program, "dump", "--json", "--nonblocking", "--pid", str(pid)]
    try:
        out, err = run(command, max(0.1, until - time.monotonic()), [])
        if out:
            return read_py_spy(out, pid), ""
        return [], f"py-spy cannot read the process: {err.decode(errors='replace').splitlines()[:1]}"
    except subprocess.TimeoutExpired:
        return [], "py-spy did not answer in time"
    except (OSError, ValueError) as error:
        return [], f"py-spy cannot read the process: {error}"
