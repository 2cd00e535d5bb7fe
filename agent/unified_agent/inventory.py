"""What this host has besides accelerators: CPUs, memory, disk, addresses."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import psutil

from unified_agent.cgroups import Limits, limits

_MB = 1024 * 1024
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def cpus(allowed: Limits | None = None) -> float:
    """CPUs that this process may use: its affinity, and the quotas of the control groups that it is in.

    Args:
        allowed: by its control groups; None: what they say now.
    """
    quota = (allowed or limits()).cpus
    count = float(len(os.sched_getaffinity(0)))
    return count if quota is None else min(count, quota)


def memory_mb(allowed: Limits | None = None) -> float:
    """MiB of memory of the host, or what the control groups of this process allow it if that is less.

    Args:
        allowed: by its control groups; None: what they say now.
    """
    most = (allowed or limits()).memory_bytes
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return (total if most is None else min(total, most)) / _MB


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
