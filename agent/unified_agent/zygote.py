"""The agent's handle on one zygote: a child that has everything imported, and forks workers for it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from unified.protocol.agent_zygote import Fork, ZygoteToAgent, zygote_to_agent
from unified_agent.link import Link

MARKER_NODE = "UNIFIED_AGENT_NODE"
MARKER_LIFE = "UNIFIED_AGENT_LIFE"
"""In the environment of everything an agent starts, so that its next life knows what its last one left."""

_LAST_WORDS_BYTES = 4096


class Zygote:
    """One running zygote process. Made and forgotten by `Processes`, which also reaps it."""

    def __init__(self, python: str, entry: str, run_dir: Path, env: Mapping[str, str], number: int) -> None:
        """Start it. Raises OSError where the interpreter cannot be started."""
        self.python = python
        self.is_up = False
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
        self.link = Link(ours)

    def fork(self, order: Fork, descriptors: list[int]) -> None:
        self.link.send(order, descriptors)

    def receive(self) -> list[ZygoteToAgent]:
        """What it has said."""
        return [zygote_to_agent.decode(body) for body in self.link.receive()]

    def reaped(self, code: int) -> None:
        """Its exit was seen; `subprocess` must not look for it again."""
        self._process.returncode = code

    def last_words(self) -> str:
        """The last line of its own output: why it could not start."""
        with contextlib.suppress(OSError):
            lines = self._log.read_bytes()[-_LAST_WORDS_BYTES:].decode(errors="replace").strip().splitlines()
            if lines:
                return lines[-1]
        return "it said nothing"

    def close(self) -> None:
        """End of file: it kills its workers and leaves."""
        self.link.close()
