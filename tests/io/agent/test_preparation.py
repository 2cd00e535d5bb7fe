"""Folders that jobs need on a node: how far one has come, and what a killed agent leaves of one."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from unified.config.clusters import lock
from unified_agent.jobs.preparation import MARK, Need, remove_unfinished

DIGEST = "ab" * 32


@pytest.fixture
def dead_pid() -> int:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


def test_what_killed_programs_were_making_is_removed(tmp_path: Path, dead_pid: int) -> None:
    host, own = socket.gethostname(), os.getpid()
    for name in (f"{host}-{dead_pid}.new", f"{host}-{own}.new", f"other-{dead_pid}.new"):
        folder = tmp_path / f".{DIGEST}.{name}"
        folder.mkdir()
        (folder / "read-only").mkdir(mode=0o555)
    (tmp_path / f".{DIGEST}.{host}-{dead_pid}.part").touch()
    (tmp_path / DIGEST).mkdir()
    remove_unfinished(tmp_path)
    left = {f".{DIGEST}.{host}-{own}.new", f".{DIGEST}.other-{dead_pid}.new", DIGEST}
    assert {path.name for path in tmp_path.iterdir()} == left
    remove_unfinished(tmp_path / "missing")


def test_environments_without_their_mark_are_removed_unless_they_are_being_made(tmp_path: Path) -> None:
    for name in ("whole", "killed", "made"):
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.lock").touch()
    (tmp_path / "whole" / MARK).touch()
    descriptor = lock(tmp_path / "made.lock")
    assert descriptor is not None
    remove_unfinished(tmp_path, MARK)
    os.close(descriptor)
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "whole.lock", "made", "made.lock"}


def test_it_is_told_how_far_it_has_come(tmp_path: Path) -> None:
    packages = Need(DIGEST, tmp_path, "the packages", MARK, "", [], ["einops"])
    assert packages.awaited() == "the packages"
    (tmp_path / f"{DIGEST}.log").write_text("Looking in indexes\nCollecting einops\n")
    assert packages.awaited() == "the packages: Collecting einops"
    code = Need(DIGEST, tmp_path, "the code", "", "", [], [])
    assert code.awaited() == "the code"
    (tmp_path / f".{DIGEST}.host-1.part").write_bytes(bytes(3 << 19))
    assert code.awaited() == "the code: 1.5 MiB received"
