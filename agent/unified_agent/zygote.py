"""The agent's handle on one zygote: a child that has everything imported, and forks workers for it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from unified.protocol.agent_zygote import ZygoteToAgent, zygote_to_agent
from unified_agent.child_channel import ChildChannel
from unified_agent.logfile import last_lines

MARKER_NODE = "UNIFIED_AGENT_NODE"
MARKER_INCARNATION = "UNIFIED_AGENT_LIFE"
"""Markers in the environment of everything an agent starts, so that the next agent knows what the last one left."""


class ZygoteHandle:
    """A running zygote process, made and forgotten by `Processes`, which also reaps it."""

    def __init__(self, python: str, entry: str, run_dir: Path, env: Mapping[str, str], number: int) -> None:
        """Start the process. Raises OSError where the interpreter cannot be started."""
        self.python = python
        self.is_up = False
        self.began_at = time.monotonic()
        self._log = run_dir / f"zygote-{number}.log"
        options = ["--parent", str(os.getpid()), "--entry", entry]
        ours, theirs = socket.socketpair()
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [python, "-m", "unified.worker.zygote", str(theirs.fileno()), *options],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=run_dir,
                    env=env,
                    start_new_session=True,  # Ctrl-C in the agent's terminal is the agent's business
                )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        self.channel = ChildChannel(ours)

    def receive(self) -> list[ZygoteToAgent]:
        """Return the messages that have come."""
        return [zygote_to_agent.decode(body) for body in self.channel.receive()]

    def reaped(self, code: int) -> None:
        """Note that its exit was seen; `subprocess` must not look for it again."""
        self._process.returncode = code

    def last_words(self) -> str:
        """Return the last line of its own output: why it could not start."""
        lines = last_lines(self._log).strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def remove_log(self) -> None:
        """Remove the log of a zygote that ended in order, which nobody will want to read."""
        with contextlib.suppress(OSError):
            self._log.unlink()

    def close(self) -> None:
        """Close the channel: at end of file the zygote kills its workers and leaves."""
        self.channel.close()
