"""What this host has besides accelerators: CPUs, memory, disk, addresses."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import psutil

_MB = 1024 * 1024
_CGROUP = Path("/sys/fs/cgroup")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def cpus(cgroup: Path = _CGROUP) -> float:
    """CPUs that this process may use: its affinity, and a container's quota."""
    count = float(len(os.sched_getaffinity(0)))
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        count = min(count, int(quota) / int(period))
    return count


def memory_mb(cgroup: Path = _CGROUP) -> float:
    """Memory of the host, or of the container if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        limit = _read(cgroup / name)
        if limit.isdigit():
            total = min(total, int(limit))
    return total / _MB


def last_cache_bytes(caches: Path = _CACHES) -> int:
    """Of one core, the cache that is asked last before memory, shared with others or not; 0 if nobody says."""
    sizes = [_read(size).removesuffix("K") for size in caches.glob("index*/size")]
    return max((int(size) * 1024 for size in sizes if size.isdecimal()), default=0)


def disk_mb(folder: Path) -> float:
    """Free space where workers' output goes."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free / _MB


def address_towards(host: str, port: int) -> str:
    """The local address from which packets to `host` leave. Nothing is sent.

    Raises:
        OSError: the name does not resolve, or there is no route.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Name of the network interface that has this address; empty if none has."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
