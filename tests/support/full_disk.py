"""Small file systems that a test fills: a tmpfs, which only root may mount."""

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


class SmallDisk:
    def __init__(self, folder: Path) -> None:
        self._filler = folder / "filler"

    def fill(self) -> None:
        """Take all room that is left."""
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass

    def make_room(self) -> None:
        self._filler.unlink()


MountDisk = Callable[[Path], SmallDisk]


@pytest.fixture
def small_disk() -> Iterator[MountDisk]:
    """Mounts a file system of 4 MiB over a folder until the end of the test."""
    folders: list[Path] = []

    def mount(folder: Path) -> SmallDisk:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "tmpfs", str(folder)]
        mounted = subprocess.run(command, capture_output=True, text=True)
        if mounted.returncode != 0:
            pytest.skip(f"mounting needs root: {mounted.stderr.strip()}")
        folders.append(folder)
        return SmallDisk(folder)

    yield mount
    for folder in folders:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
