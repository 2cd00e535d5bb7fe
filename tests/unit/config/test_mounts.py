"""Which file system a path is on, by the kernel's list of mounts."""

from pathlib import Path

import pytest

from unified.config.mounts import MOUNTS, mounts, network_file_system

LISTED = """\
22 1 0:2 / / rw,relatime shared:1 - ext4 /dev/sda rw
30 22 0:40 / /home rw,relatime shared:2 master:1 - nfs4 nas:/home rw,vers=4.2
31 30 0:41 / /home/scratch rw - xfs /dev/sdb rw
32 22 0:42 / /with\\040blank rw - fuse.sshfs host:/ rw
33 22 0:43 / /twice rw - lustre mds:/l rw
34 22 0:44 / /twice rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib/unified", ""),
        ("/home/ann/.local/state/unified", "nfs4"),
        ("/homes", ""),
        ("/home/scratch/unified", ""),
        ("/with blank/state", "fuse.sshfs"),
        ("/twice/state", ""),
    ],
)
def test_the_innermost_and_newest_mount_counts(tmp_path: Path, path: str, kind: str) -> None:
    file = tmp_path / "mountinfo"
    file.write_text(LISTED)
    assert network_file_system(Path(path), file) == kind


def test_without_the_list_nothing_is_known(tmp_path: Path) -> None:
    assert list(mounts(tmp_path / "missing")) == []
    assert network_file_system(tmp_path, tmp_path / "missing") == ""


def test_the_kernel_s_own_list_can_be_read() -> None:
    assert any(mount.path == Path("/") for mount in mounts(MOUNTS))
