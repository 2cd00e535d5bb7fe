"""Accelerators of this host, and those of them that a visibility variable leaves."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

CUDA_VARIABLE = "CUDA_VISIBLE_DEVICES"


def has_accelerator() -> bool:
    """Return whether this host has a GPU or NPU, without loading any library that drives one."""
    return any(Path(device).exists() for device in ("/dev/nvidia0", "/dev/kfd", "/dev/davinci0"))


def visible(devices: Sequence[tuple[str, str]], setting: str | None) -> dict[int, str]:
    """Return the numbers of the devices that a visibility variable leaves, in its order, each with its entry there.

    An entry is the id of a device or the beginning of a UUID, and the list ends at the first that names no device, more
    than one, or one that is in it already: as the vendors do it.

    Args:
        devices: id and UUID (or nothing) of each.
        setting: value of the variable; None leaves all devices.
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


def cuda_devices(env: Mapping[str, str] | None = None) -> list[str]:
    """Return the UUIDs of the CUDA devices that this process may use, without waking CUDA; none without a driver."""
    if not has_accelerator():
        return []
    import pynvml  # slow to load, and of no use elsewhere

    env = os.environ if env is None else env
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        uuids = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        return [
            uuids[number]
            for number in visible([(str(i), uuid) for i, uuid in enumerate(uuids)], env.get(CUDA_VARIABLE))
        ]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()
