"""A control group (version 2) per worker, within the agent's group if that may be divided (``Delegate=`` of systemd).

The agent and its helpers move into a group beside the workers' groups, because a group with processes of its own cannot
limit others. A worker's group has the memory that its role asks for; what the worker leaves there is killed at its end.
If the kernel spares the agent when memory runs out, it still does not spare the workers, in any group.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from pathlib import Path

from unified.config import cgroups
from unified.protocol.records import JobWorkerIncarnation

log = logging.getLogger("unified_agent")
AGENT = "agent"
"""Group of the agent, the zygotes and other helpers."""
REMOVE_AGAIN_S = 0.2
_MB = 2**20


class WorkerGroups:
    """Groups of the workers of one agent; without a group to divide, it makes none."""

    def __init__(self, group: Path | None) -> None:
        """Move this process, which has no children yet, into a group within the group to divide.

        Args:
            group: the agent's own group, which nobody else divides; None: it may not be divided.
        """
        self._group: Path | None = None
        self._groups: dict[JobWorkerIncarnation, Path] = {}
        self._left: set[Path] = set()
        """Groups of ended workers, in which killed processes may not have ended yet."""
        self.due_at: float | None = None
        """Time at which `remove_empty` is due, on the monotonic clock."""
        self._count = 0
        self._is_spared = cgroups.read_text(Path("/proc/self/oom_score_adj")).startswith("-")
        if group is None:
            return
        try:
            if str(os.getpid()) not in (group / "cgroup.procs").read_text().split():
                raise FileNotFoundError(errno.ENOENT, "this process is not in it")
            (group / AGENT).mkdir(exist_ok=True)
            (group / AGENT / "cgroup.procs").write_text(str(os.getpid()))
            if "memory" in (group / "cgroup.controllers").read_text().split():
                (group / "cgroup.subtree_control").write_text("+memory")
        except OSError as error:
            text = f"the control group {group} cannot be divided among workers: {error.strerror}; they share it"
            log.warning("event=no-worker-groups reason=%r", text)
            return
        self._group = group

    def add(self, incarnation: JobWorkerIncarnation, pid: int, memory_mb: float) -> None:
        """Move a new worker into a group of its own, with this limit of memory; 0: no limit."""
        if self._is_spared:
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/oom_score_adj").write_text("0")
        if self._group is None:
            return
        self._count += 1
        group = self._group / f"worker-{self._count}"
        try:
            group.mkdir()
            self._groups[incarnation] = group
            limit = group / "memory.max"
            if memory_mb and limit.exists():
                limit.write_text(str(int(memory_mb * _MB)))
            (group / "cgroup.procs").write_text(str(pid))
        except ProcessLookupError:  # it has ended already
            pass
        except OSError as error:
            log.warning("event=no-worker-group incarnation=%s reason=%r", incarnation, f"{group}: {error.strerror}")

    def end(self, incarnation: JobWorkerIncarnation) -> None:
        """Kill what an ended worker left, in any session, and remove its group once the group is empty."""
        if (group := self._groups.pop(incarnation, None)) is not None:
            with contextlib.suppress(OSError):  # a kernel before 5.14 has no such file
                (group / "cgroup.kill").write_text("1")
            self._left.add(group)
        self.remove_empty()

    def remove_empty(self) -> None:
        """Remove the groups of ended workers that have become empty."""
        for group in list(self._left):
            with contextlib.suppress(OSError):
                group.rmdir()
            if not group.exists():
                self._left.remove(group)
        self.due_at = time.monotonic() + REMOVE_AGAIN_S if self._left else None
