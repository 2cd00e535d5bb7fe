"""A process that the agent starts beside workers, with a channel to it and a log that says why it ended.

Zygotes and the snapshot server are helper processes: Python modules that get the number of a socket, and that end when
the agent closes its end of the socket, or dies.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time

from unified_agent.child_channel import ChildChannel
from unified_agent.logs.logfile import last_lines
from unified_agent.spawn import Spawned


class HelperProcess:
    """A running helper; `Processes` reaps it."""

    def __init__(self, spawned: Spawned) -> None:
        self.began_at = spawned.began_at
        self._log = spawned.log
        self._process = spawned.process
        self.pid = self._process.pid
        self.channel = ChildChannel(spawned.socket)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.began_at

    def reaped(self, code: int) -> None:
        """Note the exit code, so that `subprocess` does not wait for the process again."""
        self._process.returncode = code

    def last_words(self) -> str:
        """Return the last line of its own output: why it could not start, or ended."""
        lines = last_lines(self._log).strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def remove_log(self) -> None:
        """Remove the log of a helper that ended in order: nobody needs it."""
        with contextlib.suppress(OSError):
            self._log.unlink()

    def close(self) -> None:
        """Close the channel: at end of file the helper ends what it has started, and leaves."""
        self.channel.close()

    def await_end(self, deadline: float) -> None:
        """Wait for its end and reap it; kill it after the deadline (monotonic clock)."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            pidfd = os.pidfd_open(self.pid)
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                poll.poll()
            os.close(pidfd)
            _, status = os.waitpid(self.pid, 0)
            self.reaped(os.waitstatus_to_exitcode(status))
