"""Small file systems that a test fills: a tmpfs, which only root may mount."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest


class SmallDisk:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._filler = folder / "filler"

    def fill(self, leave: int = 0) -> None:
        """Take all room that is left but so many bytes."""
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while self.free > leave:
                file.write(bytes(4096))

    def make_room(self) -> None:
        self._filler.unlink()

    @property
    def free(self) -> int:
        """Bytes that are left."""
        found = os.statvfs(self._folder)
        return found.f_bavail * found.f_frsize


class MountDisk(Protocol):
    def __call__(self, folder: Path, mebibytes: int = 4) -> SmallDisk: ...


@pytest.fixture
def small_disk() -> Iterator[MountDisk]:
    """Mounts a small file system over a folder until the end of the test."""
    folders: list[Path] = []

    def mount(folder: Path, mebibytes: int = 4) -> SmallDisk:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m,mode=700", "tmpfs", str(folder)]
        mounted = subprocess.run(command, capture_output=True, text=True)
        if mounted.returncode != 0:
            pytest.skip(f"mounting needs root: {mounted.stderr.strip()}")
        folders.append(folder)
        return SmallDisk(folder)

    yield mount
    for folder in folders:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
