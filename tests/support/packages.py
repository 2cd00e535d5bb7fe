"""Packages of Debian or Ubuntu that a suite needs: installed where root may, by one process at a time."""

import fcntl
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

INSTALL_S = 600.0


def install(packages: Sequence[str]) -> str:
    """Install packages; return why that cannot be, empty if it was done."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with (Path(tempfile.gettempdir()) / "unified-tests-apt.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # apt itself does not wait for another apt
        for words in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
            done = subprocess.run(
                ["apt-get", "-qq", *words], env=environment, capture_output=True, text=True, timeout=INSTALL_S
            )
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["apt-get said nothing"])[-1]
