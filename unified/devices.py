"""Accelerators of this host, and the devices among them that a visibility variable selects."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

CUDA_VARIABLE = "CUDA_VISIBLE_DEVICES"
VIRTUAL_DEVICES = 8
"""Devices of a node on a host without accelerators: as many as a host for training has."""


class FoundDevice(NamedTuple):
    """A device, with its id in its vendor's visibility variable."""

    id: str
    name: str
    uuid: str = ""
    memory_mb: float = 0.0


def has_accelerator() -> bool:
    """Return whether this host has a GPU or NPU, without loading any library that drives one."""
    return any(Path(device).exists() for device in ("/dev/nvidia0", "/dev/kfd", "/dev/davinci0"))


def visible(devices: Sequence[tuple[str, str]], setting: str | None) -> dict[int, str]:
    """Return the devices that a visibility variable selects, in its order: number → entry of the variable.

    An entry is the id of a device or the beginning of a UUID. As with the vendors, the list ends at the first entry
    that names no device, several devices, or a device that is in the list already.

    Args:
        devices: id and UUID (or an empty text) of each device.
        setting: value of the variable; None selects all devices, by their ids.
    """
    if setting is None:
        return {number: name for number, (name, _) in enumerate(devices)}
    kept: dict[int, str] = {}
    for entry in map(str.strip, setting.split(",")):
        is_named = [entry == name or (entry.isdecimal() and str(int(entry)) == name) for name, _ in devices]
        if not any(is_named):
            is_named = [bool(entry) and uuid.startswith(entry) for _, uuid in devices]
        if is_named.count(True) != 1 or (number := is_named.index(True)) in kept:
            break
        kept[number] = entry
    return kept


def ask_nvml() -> tuple[list[FoundDevice], list[str]]:
    """Return the devices that NVIDIA's driver names, and the problems met; both are empty without a driver."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")  # most hosts have none, and avoid the import below
    except OSError:
        return [], []
    import pynvml  # slow to load

    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        return [], [f"NVML is installed but does not work: {error}"]
    found, problems = list[FoundDevice](), list[str]()
    for index in range(count):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory_mb = pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**20
            name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
            found.append(FoundDevice(str(index), name, uuid, memory_mb))
        except pynvml.NVMLError as error:  # the device has fallen off the bus
            problems.append(f"device {index} does not answer: {error}")
    pynvml.nvmlShutdown()
    return found, problems


def cuda_devices(env: Mapping[str, str] | None = None) -> list[str]:
    """Return the UUIDs of the CUDA devices that this process may use, without loading CUDA; none without a driver."""
    found = ask_nvml()[0] if has_accelerator() else []
    setting = (os.environ if env is None else env).get(CUDA_VARIABLE)
    return [found[number].uuid for number in visible([(each.id, each.uuid) for each in found], setting)]
