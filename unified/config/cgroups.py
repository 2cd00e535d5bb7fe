"""Limits that the control groups of this process set: version 1 and 2, and both side by side.

A process is in one group of each hierarchy, and each group is within others: a slice, a pod, a container. The limits of
all of them hold, so the lowest one counts. Groups outside a container's own cannot be seen from within.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from unified.config.mounts import mounts

_MEMORY = ("memory.max", "memory.limit_in_bytes")
"""Files of the memory limit. If there is no limit, the first has a word and the second a number above any memory."""


class Limits(NamedTuple):
    """The limits of a process; None: there is no limit."""

    cpus: float | None
    memory_bytes: int | None


def limits(proc: Path = Path("/proc/self")) -> Limits:
    """Return the lowest limits on the way from this process's groups to the outermost that can be seen."""
    cpus: list[float] = []
    memory: list[int] = []
    for group in _groups(proc):
        quota, _, period = read_text(group / "cpu.max").partition(" ")
        cpus += _quotient(quota, period)
        cpus += _quotient(read_text(group / "cpu.cfs_quota_us"), read_text(group / "cpu.cfs_period_us"))
        memory += [int(limit) for name in _MEMORY if (limit := read_text(group / name)).isdecimal()]
    return Limits(min(cpus, default=None), min(memory, default=None))


def own_group(proc: Path = Path("/proc/self")) -> Path | None:
    """Return the folder of a process's own group of version 2; None if it cannot be seen."""
    path = _paths(proc).get("", None)
    of_version_2 = (found for found in mounts(proc / "mountinfo") if found[2] == "cgroup2" and path is not None)
    return next((next(_upwards(mount, root, path or "")) for root, mount, _, _ in of_version_2), None)


def oom_counter(proc: Path) -> Path | None:
    """Return the file that has the number of out-of-memory kills (``oom_kill N``) in a process's own control group."""
    files = (group / name for group in _groups(proc) for name in ("memory.events", "memory.oom_control"))
    return next((file for file in files if "oom_kill " in read_text(file)), None)


def _groups(proc: Path) -> Iterator[Path]:
    """Yield the folders of this process's groups, and of all groups that those are in."""
    within = _paths(proc)
    for root, mount, kind, options in mounts(proc / "mountinfo"):
        path: str | None = None
        if kind == "cgroup2":
            path = within.get("")
        elif kind == "cgroup":
            named = options.split(",")
            path = next((within[each] for each in ("cpu", "memory") if each in named and each in within), None)
        if path is not None:
            yield from _upwards(mount, root, path)


def _paths(proc: Path) -> dict[str, str]:
    """Return the path of a process's group by controller; that of version 2 by the empty name."""
    within: dict[str, str] = {}
    for line in read_text(proc / "cgroup").splitlines():  # hierarchy:controllers:path
        _, controllers, group = line.split(":", 2)
        within.update(dict.fromkeys(controllers.split(","), group))
    return within


def _upwards(mount: Path, root: str, path: str) -> Iterator[Path]:
    """Yield the groups from `path` up to the mounted `root`; `root` alone if `path` is outside of it, as in a container
    that has its own groups mounted.
    """
    below = path.removeprefix(root.rstrip("/")).strip("/") if f"{path}/".startswith(f"{root.rstrip('/')}/") else ""
    parts = [] if ".." in below.split("/") else [part for part in below.split("/") if part]
    for depth in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:depth])


def _quotient(quota: str, period: str) -> list[float]:
    """Return `quota` / `period` in a list; the list is empty if there is no limit (``max``, -1, no such file)."""
    if not (quota.isdecimal() and period.isdecimal() and int(quota) and int(period)):
        return []
    return [int(quota) / int(period)]


def read_text(path: Path) -> str:
    """Return the text of a file of the kernel's; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
