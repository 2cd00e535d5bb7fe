"""Mounted file systems, as Linux lists them, and which of them other hosts see too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MOUNTS = Path("/proc/self/mountinfo")
NETWORK = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "fhgfs", "gpfs", "lustre", "mmfs", "nfs", "nfs4", "orangefs", "panfs"),
    *("pvfs2", "smb3", "smbfs", "virtiofs", "wekafs", "fuse.ceph-fuse", "fuse.glusterfs", "fuse.juicefs", "fuse.s3fs"),
    *("fuse.sshfs",),
}
"""Types of file systems on which SQLite's write-ahead log, which is shared memory, may corrupt or be refused."""


class Mount(NamedTuple):
    root: str
    """Folder of the file system that is mounted."""
    path: Path
    """Folder that it is mounted on."""
    kind: str
    options: str


def mounts(file: Path = MOUNTS) -> Iterator[Mount]:
    """Yield the mounts, the newest last; nothing if the kernel does not list them."""
    try:
        lines = file.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, path = (_unescaped(each) for each in before.split(" ")[3:5])
        yield Mount(root, Path(path), kind, options)


def file_system(path: Path, file: Path | None = None) -> str:
    """Return the type of the file system that a path is on, such as ``ext4``; empty if the kernel does not say."""
    path = path.resolve()
    around = [mount for mount in mounts(file or MOUNTS) if path.is_relative_to(mount.path)]
    innermost = max(reversed(around), key=lambda mount: len(mount.path.parts), default=None)
    return "" if innermost is None else innermost.kind


def network_file_system(path: Path, file: Path | None = None) -> str:
    """Return the type of the network file system that a path is on, such as ``nfs4``; empty if it is on none."""
    return kind if (kind := file_system(path, file)) in NETWORK else ""


def _unescaped(path: str) -> str:
    """Decode a path as the kernel writes it, with blanks in octal."""
    return path.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
