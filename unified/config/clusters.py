"""Clusters of this user on this host, by their records in the run folder: those of drivers, and that of ``unified up``.

A record is believed only while the lock beside it is held; any end of the holder's process frees the lock. The folder
must not be writable for other users. A link in the user's state leads to the record of ``unified up``, for shells that
have another run folder, because of another ``TMPDIR`` or ``XDG_RUNTIME_DIR``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from pathlib import Path

import msgspec

from unified import process
from unified.config import settings

LOCK_NAME = "owner.lock"
"""File in the run folder of a cluster, locked while the cluster runs, in any pid namespace."""
RECORD_NAME = "cluster.json"
KEY_NAME = "cluster.key"


class ClusterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A running cluster whose daemons are children of one process."""

    address: str
    """``tcp://127.0.0.1:PORT`` of its master."""
    home: str
    """Folder of its logs and state."""
    pid: int
    """Process that the cluster ends with."""
    space: str
    """Host, network namespace and pid namespace in which address and pid are valid."""
    nodes: int
    devices: int | None
    """Virtual devices of each node; None: the devices of the host."""
    idle_s: float | None = None
    """Seconds without a job after which it ends, 0: never. None: it belongs to a driver."""
    key_file: str = ""
    """File of the cluster's own key; empty: none."""


def space() -> str:
    """Return an id, the same for all processes that can reach each other at loopback and by pid."""
    return f"{settings.host_id()} {settings.pid_space()}"


def write_record(run_dir: Path, record: ClusterRecord) -> None:
    """Make a cluster known, in one step."""
    draft = run_dir / f"{RECORD_NAME}.new"
    draft.write_bytes(msgspec.json.encode(record))
    draft.replace(run_dir / RECORD_NAME)
    if record.idle_s is not None and (link := _link_to_kept()) is not None:
        with contextlib.suppress(OSError):  # a home that cannot be written: only the run folder leads to the cluster
            settings.make_folder(link.parent)
            draft = link.with_name(f"{link.name}.{os.getpid()}")
            draft.symlink_to(run_dir.absolute())
            draft.replace(link)


def _link_to_kept() -> Path | None:
    """Return the path of the link to the run folder of ``unified up``; hosts that share a home have one each."""
    state = settings.user_state()
    return None if state is None else state / f"up-{os.uname().nodename}"


def lock(path: Path, flags: int = os.O_RDWR | os.O_CREAT, kind: int = fcntl.LOCK_EX) -> int | None:
    """Return a descriptor that holds the lock on a file or folder; None: somebody else holds it."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return descriptor


def sweep(run_root: Path) -> None:
    """Remove run folders of clusters whose process was killed."""
    for lock_file in run_root.glob(f"e*-*/{LOCK_NAME}"):
        with contextlib.suppress(OSError):  # its own process removes it now
            descriptor = lock(lock_file)
            if descriptor is not None:
                shutil.rmtree(lock_file.parent, ignore_errors=True)
                os.close(descriptor)


def kept_cluster() -> ClusterRecord | None:
    """Return the cluster that ``unified up`` started, if it runs."""
    return next((record for record in living_clusters() if record.idle_s is not None), None)


def living_clusters() -> list[ClusterRecord]:
    """Return the clusters of this user that run on this host now."""
    folders, found = {*settings.run_root().absolute().glob("e*-*")}, []
    if (link := _link_to_kept()) is not None:
        with contextlib.suppress(OSError):
            folders.add(link.readlink())
    for folder in sorted(folders):
        path = folder / RECORD_NAME
        with contextlib.suppress(OSError, msgspec.DecodeError):  # the cluster ends now, or the record is damaged
            root = folder.parent.lstat()
            if not stat.S_ISDIR(root.st_mode) or root.st_uid != os.getuid() or root.st_mode & 0o022:
                continue  # somebody else's records could lead to their own master
            record = msgspec.json.decode(path.read_bytes(), type=ClusterRecord)
            free = lock(path.with_name(LOCK_NAME), os.O_RDONLY, fcntl.LOCK_SH)
            if free is not None:
                os.close(free)
            elif record.space == space() and process.is_alive(record.pid):
                found.append(record)
    return found
