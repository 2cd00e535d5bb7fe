"""Judgement of facts about a host: thresholds, and what is said."""

import re
from pathlib import Path

import pytest

from unified.doctor import judgement
from unified.doctor.host import unknown_variables
from unified.doctor.judgement import ENOUGH_DISK, GIB, LEAST_DISK, LEAST_SHM, Finding, Severity

ROOT = Path(__file__).parents[3]
FINE, NOTE, WRONG = Severity.FINE, Severity.NOTE, Severity.WRONG


def said(finding: Finding) -> str:
    return f"{finding.what} {finding.advice}"


@pytest.mark.parametrize(
    ("addresses", "seconds", "error", "severity", "text"),
    [
        (["10.0.0.5"], 0.1, "", FINE, "n1 is 10.0.0.5"),
        (["10.0.0.5"], 5.0, "", WRONG, "the lookup of n1 took 5.0 s"),
        ([], 12.0, "Temporary failure", WRONG, "took 12.0 s and failed: Temporary failure"),
        ([], 0.1, "Name or service not known", WRONG, "Add n1 to DNS"),
        (["127.0.1.1", "::1"], 0.1, "", NOTE, "n1 is 127.0.1.1, ::1: loopback"),
        (["127.0.1.1", "10.0.0.5"], 0.1, "", FINE, "n1 is 127.0.1.1, 10.0.0.5"),
    ],
)
def test_own_name(addresses: list[str], seconds: float, error: str, severity: Severity, text: str) -> None:
    finding = judgement.name_lookup("n1", addresses, seconds, error, is_own=True)
    assert (finding.severity, text in said(finding)) == (severity, True), finding


def test_a_masters_name_may_be_loopback() -> None:
    assert judgement.name_lookup("localhost", ["127.0.0.1"], 0.0, "").severity == FINE


@pytest.mark.parametrize(
    ("kind", "is_writable", "total", "free", "num_inodes", "severity"),
    [
        ("tmpfs", True, LEAST_SHM, LEAST_SHM, 9, FINE),
        ("", True, LEAST_SHM, LEAST_SHM, 9, FINE),
        ("tmpfs", True, LEAST_SHM - 1, LEAST_SHM - 1, 9, WRONG),
        ("tmpfs", False, LEAST_SHM, LEAST_SHM, 9, WRONG),
        ("overlay", True, LEAST_SHM, LEAST_SHM, 9, WRONG),
        ("tmpfs", True, 10 * GIB, GIB - 1, 9, NOTE),
        ("tmpfs", True, 10 * GIB, GIB, 0, NOTE),
    ],
)
def test_shared_memory(
    kind: str, is_writable: bool, total: int, free: int, num_inodes: int, severity: Severity
) -> None:
    assert judgement.shared_memory("/dev/shm", kind, is_writable, total, free, num_inodes).severity == severity


@pytest.mark.parametrize(
    ("kind", "is_writable", "free", "num_inodes", "severity", "text"),
    [
        ("ext4", True, ENOUGH_DISK, 9, FINE, "/state: 2.0 GiB of 9.0 GiB free, ext4"),
        ("ext4", True, ENOUGH_DISK - 1, 9, NOTE, "Workers' output may fill it"),
        ("ext4", True, LEAST_DISK - 1, 9, WRONG, "Make room"),
        ("ext4", True, ENOUGH_DISK, 0, WRONG, "no inode left"),
        ("ext4", False, ENOUGH_DISK, 9, WRONG, "cannot be written"),
        ("nfs4", True, ENOUGH_DISK, 9, NOTE, "rollback journal"),
        ("lustre", True, 0, 9, WRONG, "Make room"),
    ],
)
def test_folder(kind: str, is_writable: bool, free: int, num_inodes: int, severity: Severity, text: str) -> None:
    finding = judgement.folder("/state", kind, is_writable, 9 * GIB, free, num_inodes)
    assert (finding.severity, text in said(finding)) == (severity, True), finding


@pytest.mark.parametrize(
    ("limit", "rdma", "is_privileged", "severity"),
    [
        (65536, [], False, FINE),
        (65536, ["mlx5_0"], False, WRONG),
        (65536, ["mlx5_0"], True, FINE),
        (-1, ["mlx5_0"], False, FINE),
    ],
)
def test_locked_memory(limit: int, rdma: list[str], is_privileged: bool, severity: Severity) -> None:
    assert judgement.locked_memory(limit, rdma, is_privileged=is_privileged).severity == severity


@pytest.mark.parametrize(
    ("toolkit", "is_available", "num_gpus", "severity", "text"),
    [
        ("12.8", True, 8, FINE, "torch 2.9"),
        ("", False, 0, FINE, "torch 2.9"),
        ("12.8", False, 0, FINE, "torch 2.9"),
        ("", False, 8, WRONG, "is a build for CPUs, and there are 8 GPUs"),
        ("12.8", False, 8, WRONG, "an older CUDA than 12.8. found version 11040"),
    ],
)
def test_torch(toolkit: str, is_available: bool, num_gpus: int, severity: Severity, text: str) -> None:
    finding = judgement.torch("2.9", toolkit, is_available, num_gpus, "found version 11040")
    assert (finding.severity, text in said(finding)) == (severity, True), finding


@pytest.mark.parametrize(
    ("ahead_s", "error_s", "severity", "text"),
    [
        (0.9, 0.0, FINE, "0.9 s ahead of the master's"),
        (-1.5, 0.1, NOTE, "1.5 s behind the master's"),
        (1.5, 1.0, FINE, ""),
        (-60.0, 0.1, WRONG, "60.0 s behind"),
        (60.0, 55.0, NOTE, ""),
    ],
)
def test_clock(ahead_s: float, error_s: float, severity: Severity, text: str) -> None:
    finding = judgement.clock(ahead_s, error_s)
    assert (finding.severity, text in said(finding)) == (severity, True), finding


@pytest.mark.parametrize(
    ("own", "others", "severity"),
    [
        ("127.0.0.1", [], FINE),
        ("127.0.0.1", ["127.0.0.2", "::1", "localhost"], FINE),
        ("127.0.1.1", ["10.0.0.6"], WRONG),
        ("127.0.1.1", ["node-6.cluster"], WRONG),
        ("10.0.0.5", ["10.0.0.6"], FINE),
        ("fe80::1%eth0", ["10.0.0.6"], FINE),
    ],
)
def test_own_address(own: str, others: list[str], severity: Severity) -> None:
    assert judgement.own_address(own, others).severity == severity


def test_ports() -> None:
    assert judgement.ports({}, 3, 5).what == "the relay and 3 of 5 nodes on other hosts are reached"
    finding = judgement.ports({"node n2": "No route to host"}, 3, 5)
    assert (finding.severity, "1 are not reached" in finding.what) == (WRONG, True)
    assert finding.what.endswith("node n2 (No route to host)")


def test_each_variable_of_the_product_is_known() -> None:
    """A new setting belongs into `OTHER_SETTINGS`, unless a table has it: else users would be told that it is none."""
    trees = [ROOT / "unified", ROOT / "agent", ROOT / "master"]
    texts = [file.read_text() for tree in trees for file in tree.rglob("*.py")]
    names = {name for text in texts for name in re.findall(r"\bUNIFIED_[A-Z0-9_]*[A-Z0-9]\b(?!_)", text)}
    assert len(names) > 30
    assert unknown_variables(dict.fromkeys(names, "x")) == {}


def test_other_variables_are_told_with_the_nearest() -> None:
    env = {"UNIFIED_JOB_MAX_RESTRAT": "3", "UNIFIED_CHECKPOINT_KEEP_LAST": "1", "UNIFIED": "1", "DLROVER_X": "1"}
    assert unknown_variables(env) == {
        "UNIFIED_CHECKPOINT_KEEP_LAST": " Did you mean 'UNIFIED_CHECKPOINT_KEEP_LAST_N'?",
        "UNIFIED_JOB_MAX_RESTRAT": " Did you mean 'UNIFIED_JOB_MAX_RESTART'?",
    }
