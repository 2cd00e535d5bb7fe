"""Limits of control groups, from trees of files as kernels show them."""

from pathlib import Path

import pytest

from unified.config.cgroups import Limits, limits

MIB = 1 << 20
UNLIMITED = f"{(1 << 63) - 4096}"  # as version 1 says it


class Host:
    """A process's folder in `/proc`, and the hierarchies that are mounted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.proc = folder / "proc"
        self.proc.mkdir()

    def belongs_to(self, *lines: str) -> None:
        (self.proc / "cgroup").write_text("".join(f"{line}\n" for line in lines))

    def mounts(self, *each: tuple[str, str, str]) -> None:
        """Of each: kind and options, root, and folder below ours."""
        lines = ["22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw"]
        for number, (kind, root, folder) in enumerate(each):
            name, _, options = kind.partition(":")
            mount = str(self._folder / folder).replace(" ", "\\040")
            lines.append(f"{30 + number} 22 0:{number} {root} {mount} rw,nosuid shared:9 - {name} {name} rw,{options}")
        (self.proc / "mountinfo").write_text("\n".join(lines) + "\n")

    def group(self, folder: str, **files: str) -> None:
        (self._folder / folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (self._folder / folder / name.replace("__", ".")).write_text(f"{text}\n")

    @property
    def limits(self) -> Limits:
        return limits(self.proc)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.mark.parametrize(
    ("slice_", "service", "expected"),
    [
        (("150000 100000", f"{256 * MIB}"), ("max 100000", "max"), Limits(1.5, 256 * MIB)),
        (("max 100000", "max"), ("50000 100000", f"{64 * MIB}"), Limits(0.5, 64 * MIB)),
        (("200000 100000", f"{64 * MIB}"), ("300000 100000", f"{256 * MIB}"), Limits(2.0, 64 * MIB)),
        (("max 100000", "max"), ("max 100000", "max"), Limits(None, None)),
    ],
)
def test_of_version_2_the_lowest_on_the_path_wins(
    host: Host, slice_: tuple[str, str], service: tuple[str, str], expected: Limits
) -> None:
    host.belongs_to("0::/system.slice/agent.service/run")
    host.mounts(("cgroup2:nsdelegate", "/", "cg"))
    host.group("cg")
    host.group("cg/system.slice", cpu__max=slice_[0], memory__max=slice_[1])
    host.group("cg/system.slice/agent.service", cpu__max=service[0], memory__max=service[1])
    host.group("cg/system.slice/agent.service/run")
    host.group("cg/other.slice", cpu__max="1000 100000", memory__max="4096")
    assert host.limits == expected


def test_of_version_1_each_hierarchy_is_looked_at_with_its_own_path(host: Host) -> None:
    host.belongs_to("5:memory:/pod/container", "4:cpu,cpuacct:/pod/other", "1:name=systemd:/init", "0::/")
    host.mounts(
        ("cgroup:cpu,cpuacct", "/", "cg/cpu,cpuacct"),
        ("cgroup:memory", "/", "cg/memory"),
        ("cgroup:name=systemd", "/", "cg/systemd"),
    )
    host.group("cg/memory", memory__limit_in_bytes=UNLIMITED)
    host.group("cg/memory/pod", memory__limit_in_bytes=f"{96 * MIB}")
    host.group("cg/memory/pod/container", memory__limit_in_bytes=f"{128 * MIB}")
    host.group("cg/cpu,cpuacct/pod", cpu__cfs_quota_us="250000", cpu__cfs_period_us="100000")
    host.group("cg/cpu,cpuacct/pod/other", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert host.limits == Limits(2.5, 96 * MIB)


def test_both_versions_side_by_side(host: Host) -> None:
    host.belongs_to("3:memory:/a", "0::/b")
    host.mounts(("cgroup:memory", "/", "cg/memory"), ("cgroup2:", "/", "cg/unified"))
    host.group("cg/memory/a", memory__limit_in_bytes=f"{8 * MIB}")
    host.group("cg/unified/b", cpu__max="100000 100000", memory__max=f"{9 * MIB}")
    assert host.limits == Limits(1.0, 8 * MIB)


@pytest.mark.parametrize(
    ("root", "path"),
    [("/", "/"), ("/docker/0a", "/docker/0a"), ("/../..", "/"), ("/", "/../sibling"), ("/docker/0a", "/")],
)
def test_a_container_sees_its_own_group_at_the_mount(host: Host, root: str, path: str) -> None:
    """Whichever name the kernel has for it there."""
    host.belongs_to(f"0::{path}")
    host.mounts(("cgroup2:", root, "with blank"))
    host.group("with blank", cpu__max="20000 100000", memory__max=f"{5 * MIB}")
    assert host.limits == Limits(0.2, 5 * MIB)


def test_a_group_below_what_a_container_has_mounted(host: Host) -> None:
    host.belongs_to("0::/docker/0a/job")
    host.mounts(("cgroup2:", "/docker/0a", "cg"))
    host.group("cg", memory__max=f"{7 * MIB}")
    host.group("cg/job", cpu__max="40000 20000", memory__max="max")
    assert host.limits == Limits(2.0, 7 * MIB)


def test_without_control_groups_nothing_is_limited(host: Host) -> None:
    assert host.limits == Limits(None, None)
    host.belongs_to("0::/gone")
    host.mounts(("cgroup2:", "/", "cg"))
    assert host.limits == Limits(None, None)
