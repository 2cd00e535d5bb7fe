"""A folder for temporary files of one process. After a kill, the next run on the node removes the folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "unified-train-"
LOCK = ".lock"
SAFE_AGE_S = 60.0
"""Age of a lock file, in seconds, at which an unlocked folder is an orphan: a process locks its folder at once."""


@contextlib.contextmanager
def scratch_folder(parent: Path | None = None) -> Iterator[Path]:
    """Make a folder, and delete it at the end; delete folders of killed processes.

    Args:
        parent: None: the folder for temporary files, ``TMPDIR``.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    for folder in parent.glob(f"{PREFIX}*"):
        _remove_orphan(folder)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    try:
        with (folder / LOCK).open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_orphan(folder: Path) -> None:
    with contextlib.suppress(OSError):  # another user's, in use, or gone already
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if time.time() - os.fstat(lock).st_mtime >= SAFE_AGE_S:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
