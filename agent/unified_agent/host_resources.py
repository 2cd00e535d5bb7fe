"""Resources of this host: its accelerators, CPUs, memory, disk and addresses.

One function per vendor finds accelerators; the first that finds any wins. Nothing here loads torch or touches a device:
NVIDIA is asked through NVML, AMD and Ascend through the kernel's files. The agent offers only the accelerators that it
was given itself (by a SLURM step's ``CUDA_VISIBLE_DEVICES``).
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from unified.config.cgroups import Limits, limits, read_text
from unified.devices import CUDA_VARIABLE, FoundDevice, ask_nvml, visible
from unified.protocol.records import Device

log = logging.getLogger("unified_agent")
_MB = 1024 * 1024
_VRAM_HEAPS = ("1", "2")


def find_nvidia(env: Mapping[str, str]) -> list[FoundDevice]:
    """Return the devices of NVIDIA, with a warning for each that has fallen off the bus."""
    found, problems = ask_nvml()
    for problem in problems:
        log.warning("event=device-left-out %s", problem)
    return restrict(found, env.get(CUDA_VARIABLE))


def find_amd(env: Mapping[str, str], topology: Path = Path("/sys/class/kfd/kfd/topology/nodes")) -> list[FoundDevice]:
    """Return the devices of AMD, through the kernel's KFD topology."""
    found: list[FoundDevice] = []
    for node in sorted(topology.glob("[0-9]*"), key=lambda path: int(path.name)):
        properties = _properties(node / "properties")
        if int(properties.get("simd_count", "0")) == 0:
            continue  # a CPU
        unique = int(properties.get("unique_id", "0"))
        name = properties.get("gfx_target_version", "AMD GPU")
        uuid = f"GPU-{unique:016x}" if unique else ""
        found.append(FoundDevice(str(len(found)), f"gfx {name}", uuid, _vram_mb(node)))
    hip, rocr = env.get("HIP_VISIBLE_DEVICES"), env.get("ROCR_VISIBLE_DEVICES")
    kept = restrict(found, rocr)
    if rocr is not None:  # HIP numbers the devices that ROCR leaves, from 0
        kept = [device._replace(id=str(index)) for index, device in enumerate(kept)]
    return restrict(kept, hip)


def find_ascend(env: Mapping[str, str], folder: Path = Path("/dev")) -> list[FoundDevice]:
    """Return the devices of Huawei Ascend, by their files."""
    matches = (re.fullmatch(r"davinci(\d+)", path.name) for path in folder.glob("davinci*"))
    found = [FoundDevice(str(number), "Ascend NPU") for number in sorted(int(match[1]) for match in matches if match)]
    return restrict(found, env.get("ASCEND_RT_VISIBLE_DEVICES"))


Finders = Mapping[str, Callable[[Mapping[str, str]], list[FoundDevice]]]
"""Functions by kind of device; each returns its devices in the order of the vendor's visibility variable."""
FINDERS: Finders = {"cuda": find_nvidia, "rocm": find_amd, "npu": find_ascend}


def restrict(found: list[FoundDevice], setting: str | None) -> list[FoundDevice]:
    """Return the devices that a visibility variable lists, in its order and with its names; None: all devices."""
    kept = visible([(device.id, device.uuid) for device in found], setting)
    return [found[number]._replace(id=entry) for number, entry in kept.items()]


def find_devices(
    env: Mapping[str, str], num_virtual: int | None = None, finders: Finders = FINDERS
) -> tuple[list[Device], list[str]]:
    """Return the node's devices, and the name of each in a visibility variable.

    Args:
        num_virtual: offer this many virtual devices in place of real accelerators.
    """
    if num_virtual is not None:
        return [Device(index=index, kind="virtual", name="virtual") for index in range(num_virtual)], []
    for kind, find in finders.items():
        if found := find(env):
            devices = [
                Device(index=index, kind=kind, name=one.name, uuid=one.uuid, memory_mb=one.memory_mb)
                for index, one in enumerate(found)
            ]
            return devices, [one.id for one in found]
    return [], []


def _properties(path: Path) -> dict[str, str]:
    pairs = (line.split(None, 1) for line in read_text(path).splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def _vram_mb(node: Path) -> float:
    banks = (_properties(bank / "properties") for bank in node.glob("mem_banks/[0-9]*"))
    return sum(int(bank.get("size_in_bytes", "0")) for bank in banks if bank.get("heap_type") in _VRAM_HEAPS) / _MB


def cpus(allowed: Limits | None = None) -> float:
    """Return the CPUs that this process may use: the least of its affinity and its control groups' quotas."""
    quota = (allowed or limits()).cpus
    count = float(len(os.sched_getaffinity(0)))
    return count if quota is None else min(count, quota)


def memory_mb(allowed: Limits | None = None) -> float:
    """Return the MiB of memory of the host, or what the control groups of this process allow if that is less."""
    most = (allowed or limits()).memory_bytes
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return (total if most is None else min(total, most)) / _MB


def disk_mb(folder: Path) -> float:
    """Return the MiB of free space where workers' output goes."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free / _MB


def interface_of(address: str) -> str:
    """Return the name of the network interface that has this address; empty if none has."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return ""
