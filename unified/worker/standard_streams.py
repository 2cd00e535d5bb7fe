"""stdin, stdout and stderr of a worker: pipes to its agent, and for one worker of a job the driver's own stdin."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

from unified.config import settings

if TYPE_CHECKING:
    from unified.protocol.worker_agent import Launch


class _UnbufferedWriter(io.BufferedWriter):
    """Keeps nothing back. (The plain file of ``python -u`` loses the rest of a write that a signal cut short.)"""

    def write(self, data: io._WriteBuffer, /) -> int:  # type: ignore[name-defined]  # typeshed's own name for bytes
        count = super().write(data)
        self.flush()
        return count


def open_output() -> None:
    """Make stdout and stderr as torchrun's workers have them, who run with ``python -u``.

    When a call of `print` returns, all of it has left the process, the beginning of a line as well: it can be seen at
    once, and whatever ends the process does not take it along. No character is an error.
    """
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(descriptor, "w", closefd=False)
        raw.name = f"<{name}>"
        stream = io.TextIOWrapper(
            _UnbufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True, write_through=True
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def take_stdin(launch: Launch) -> None:
    """Let rank 0 of the job's first role read what its driver would, where both are on one host; others read nothing.

    The file behind the driver's stdin is opened again, which the kernel allows for terminals, pipes and files, and
    refuses for sockets, and for other users' processes: the worker then reads nothing either.
    """
    given = launch.spec.stdin
    is_first = launch.kind == "worker" and launch.rank == 0 and launch.role == launch.spec.roles[0].name
    if given is None or not is_first or given.pid_space != settings.pid_space():
        return
    try:
        descriptor = os.open(f"/proc/{given.pid}/fd/0", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return
    os.dup2(descriptor, 0)
    os.close(descriptor)
    stream = open(0, closefd=False)  # noqa: SIM115  # open for life
    for name in ("stdin", "__stdin__"):
        setattr(sys, name, stream)
