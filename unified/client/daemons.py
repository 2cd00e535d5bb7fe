"""Daemons as child processes: started, watched by pidfd, ended within a time."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from unified.config import settings
from unified.process import describe_end, every_process, has_environment, kill_until_none

LAST_LINES = 5


class Daemon:
    """One ``python -m`` child in a session of its own, so that Ctrl-C at the terminal does not reach it.

    Args:
        log_file: its stdout and stderr are appended there.
        has_input: it waits for what `tell` writes to its stdin.
    """

    def __init__(
        self, module: str, arguments: Sequence[str], log_file: Path, env: Mapping[str, str], *, has_input: bool = False
    ) -> None:
        self.log_file = log_file
        with open(log_file, "ab", opener=settings.for_user_alone) as log:
            # -P: do not import a user's own select.py from the working directory
            self._process = subprocess.Popen(
                [settings.python(), "-P", "-m", module, *arguments],
                stdin=subprocess.PIPE if has_input else subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(env),
                start_new_session=True,
            )
        self.pid = self._process.pid

    @property
    def is_ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; False if it still runs."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def tell(self, line: bytes) -> None:
        """Write a line to its stdin, if that is an open pipe, and close it."""
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `is_ended` shows
            if self._process.stdin is not None and not self._process.stdin.closed:
                with self._process.stdin as stdin:
                    stdin.write(line)

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if not self.is_ended:
            self._process.send_signal(number)

    def last_words(self) -> str:
        """Return how it ended, for a sentence that begins with its name, and the last lines of its log."""
        lines = last_lines(self.log_file)
        code = self._process.returncode or 0
        how = f"was {describe_end(code)}" if code < 0 else describe_end(code)
        said = f" ends with:{lines}" if lines else " is empty."
        return f"{how}; its log {self.log_file}{said}"

    @staticmethod
    def wait_any(daemons: Sequence[Daemon], wake: int) -> None:
        """Wait until one of them has ended, or `wake` (an eventfd) is readable."""
        poller = select.poll()
        poller.register(wake, select.POLLIN)
        descriptors: list[int] = []
        try:
            for daemon in daemons:
                if daemon.is_ended:
                    return
                descriptors.append(os.pidfd_open(daemon.pid))
                poller.register(descriptors[-1], select.POLLIN)
            poller.poll()
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    @staticmethod
    def end_all(daemons: Sequence[Daemon], timeout_s: float) -> None:
        """Send SIGTERM to all, and SIGKILL to those that are left after `timeout_s`; reap all."""
        deadline = time.monotonic() + timeout_s
        if timeout_s > 0:
            for daemon in daemons:
                daemon.signal(signal.SIGTERM)
        for daemon in daemons:
            if not daemon.wait(max(0.0, deadline - time.monotonic())):
                daemon.signal(signal.SIGKILL)
        for daemon in daemons:
            daemon.wait(10.0)
            daemon.tell(b"")


def last_lines(log_file: Path) -> str:
    """Return the last lines of a log, each on a line of its own behind four blanks; empty if there is none."""
    try:
        with log_file.open("rb") as log:
            log.seek(max(0, log_file.stat().st_size - 4096))
            lines = log.read().decode(errors="replace").splitlines()[-LAST_LINES:]
    except OSError:
        lines = []
    return "".join(f"\n    {line}" for line in lines)


class Marked(NamedTuple):
    """A process whose environment has a certain setting."""

    pid: int
    command: str

    def __str__(self) -> str:
        return f"{self.pid} ({self.command})"


def marked_processes(setting: str) -> list[Marked]:
    """Return the processes, without zombies, that were started with ``NAME=value`` in their environment."""
    return [
        Marked(process.pid, _command(process.pid))
        for process in every_process()
        if process.is_alive and has_environment(process.pid, setting)
    ]


def kill_marked(setting: str, grace_s: float) -> list[Marked]:
    """Wait for marked processes to end by themselves; then kill the others, and return those killed."""
    deadline = time.monotonic() + grace_s
    while left := marked_processes(setting):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    if left:
        kill_until_none(lambda: [process.pid for process in marked_processes(setting)])
    return left


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:120]
    except OSError:
        return ""
