"""Finding accelerators on a machine that has none: an NVML of our own, and folders that look like /sys and /dev."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from unified.devices import FoundDevice
from unified_agent.host_resources import find_amd, find_ascend, find_devices, restrict

ASK = (
    "import json, os, msgspec; from unified_agent.host_resources import find_devices\n"
    "devices, ids = find_devices(os.environ)\n"
    "print(json.dumps([[d.index, d.kind, d.name, d.uuid, d.memory_mb, i] for d, i in zip(devices, ids)]))"
)


def ask(folder: Path, **env: str) -> list[list[object]]:
    full = {**os.environ, "LD_LIBRARY_PATH": str(folder), **env}
    done = subprocess.run([sys.executable, "-c", ASK], env=full, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert isinstance(found, list)
    return found


def test_nvidia_devices_are_found(fake_nvml: Path) -> None:
    assert ask(fake_nvml) == [
        [index, "cuda", f"Fake {index}", f"GPU-{index}abc", 80 * 1024.0, str(index)] for index in range(3)
    ]


def test_a_device_that_fell_off_the_bus_is_left_out(fake_nvml: Path) -> None:
    assert [(row[0], row[5]) for row in ask(fake_nvml, FAKE_LOST="1")] == [(0, "0"), (1, "2")]


def test_what_the_agent_was_given_limits_what_it_offers(fake_nvml: Path) -> None:
    found = ask(fake_nvml, CUDA_VISIBLE_DEVICES="2,GPU-0")
    assert [(row[0], row[2], row[5]) for row in found] == [(0, "Fake 2", "2"), (1, "Fake 0", "GPU-0")]
    assert ask(fake_nvml, CUDA_VISIBLE_DEVICES="") == []


def test_an_nvml_that_does_not_work_means_no_devices(fake_nvml: Path) -> None:
    assert ask(fake_nvml, FAKE_BROKEN="1") == []


def topology(root: Path) -> Path:
    for number, simds in enumerate([0, 256, 256]):
        node = root / str(number)
        bank = node / "mem_banks/0"
        bank.mkdir(parents=True)
        lines = f"simd_count {simds}\nunique_id {number * 17}\ngfx_target_version 90402\n"
        (node / "properties").write_text(lines)
        (bank / "properties").write_text("heap_type 1\nsize_in_bytes 68702699520\n")
    return root


def test_amd_devices_are_found(tmp_path: Path) -> None:
    found = find_amd({}, topology(tmp_path))
    assert [(one.id, one.uuid, one.memory_mb) for one in found] == [
        ("0", "GPU-0000000000000011", 65520.0),
        ("1", "GPU-0000000000000022", 65520.0),
    ]


@pytest.mark.parametrize(
    ("env", "ids", "uuids"),
    [
        ({"HIP_VISIBLE_DEVICES": "1"}, ["1"], ["22"]),
        ({"ROCR_VISIBLE_DEVICES": "1"}, ["0"], ["22"]),
        ({"ROCR_VISIBLE_DEVICES": "1,0", "HIP_VISIBLE_DEVICES": "1"}, ["1"], ["11"]),
    ],
)
def test_rocr_renumbers_what_hip_counts(tmp_path: Path, env: dict[str, str], ids: list[str], uuids: list[str]) -> None:
    found = find_amd(env, topology(tmp_path))
    assert [one.id for one in found] == ids
    assert [one.uuid[-2:] for one in found] == uuids


def test_ascend_devices_are_found(tmp_path: Path) -> None:
    for name in ("davinci10", "davinci2", "davinci_manager", "davinci0"):
        (tmp_path / name).touch()
    assert [one.id for one in find_ascend({}, tmp_path)] == ["0", "2", "10"]
    assert [one.id for one in find_ascend({"ASCEND_RT_VISIBLE_DEVICES": "10,0"}, tmp_path)] == ["10", "0"]


def test_virtual_devices_stand_in_alone(tmp_path: Path) -> None:
    devices, ids = find_devices({}, 2, {"rocm": partial(find_amd, topology=topology(tmp_path))})
    assert [(device.index, device.kind) for device in devices] == [(0, "virtual"), (1, "virtual")]
    assert ids == []
    assert find_devices({}, 0) == ([], [])


def test_a_host_without_any_has_none(tmp_path: Path) -> None:
    finders = {"rocm": partial(find_amd, topology=tmp_path), "npu": partial(find_ascend, folder=tmp_path)}
    assert find_devices({}, None, finders) == ([], [])


@pytest.mark.parametrize(
    ("visible", "ids"),
    [
        (None, ["0", "1"]),
        ("", []),
        ("1", ["1"]),
        ("1,0", ["1", "0"]),
        ("0,-1,1", ["0"]),
        ("1,1", ["1"]),
        ("GPU-b", ["GPU-b"]),
    ],
)
def test_a_visibility_list_ends_at_the_first_entry_that_is_none(visible: str | None, ids: list[str]) -> None:
    found = [FoundDevice("0", "x", "GPU-aa"), FoundDevice("1", "x", "GPU-bb")]
    assert [one.id for one in restrict(found, visible)] == ids
