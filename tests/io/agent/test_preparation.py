"""Folders that jobs need on a node: how far one has come, and what a killed agent leaves of one."""

import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from msgspec import structs

from tests.support.agent_core import FACTS
from unified.config.clusters import lock
from unified.job.spec import JobSpec, ShippedCode
from unified.protocol.records import JobWorkerIncarnation
from unified.testing import eventually
from unified_agent.jobs import preparation
from unified_agent.jobs.preparation import MARK, Need, Preparation, remove_unfinished
from unified_agent.processes import Processes
from unified_agent.spawn import Spawned

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


class NoProcesses:
    """Processes of an agent that has none but those of the test."""

    def __init__(self) -> None:
        self.living: list[JobWorkerIncarnation] = []
        self.on_ends: dict[int, Callable[[int], None]] = {}

    def incarnations(self) -> list[JobWorkerIncarnation]:
        return self.living

    def add_helper(self, pid: int, on_end: Callable[[int], None]) -> None:
        self.on_ends[pid] = on_end

    def release(self, incarnation: JobWorkerIncarnation) -> None:
        """Start nothing."""


Prepare = Callable[[int], tuple[Preparation, NoProcesses]]


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """Factory of preparations for an agent of a user id, each for another incarnation."""
    monkeypatch.setenv("UNIFIED_HOME", str(tmp_path))
    numbers = itertools.count()

    def prepare(uid: int) -> tuple[Preparation, NoProcesses]:
        monkeypatch.setattr(os, "geteuid", lambda: uid)
        processes, facts = NoProcesses(), structs.replace(FACTS, incarnation=f"{next(numbers):016x}")
        return Preparation(cast("Processes", processes), facts, {}, lambda event: None), processes

    return prepare


SPEC = JobSpec(name="job", roles=[], code=ShippedCode(digest=DIGEST, size=1, root="/laptop"))


def test_jobs_share_the_folder_of_their_code_unless_the_agent_is_root(prepare: Prepare, tmp_path: Path) -> None:
    found = {}
    for uid in (1000, 0):
        (one, _), (two, _) = prepare(uid), prepare(uid)
        for agent, job_id in ((one, "job-1"), (one, "job-2"), (two, "job-1")):
            agent.described(job_id, SPEC)
        folders = {one.code_dir("job-1"), one.code_dir("job-2"), two.code_dir("job-1")}
        one.described("job-1", SPEC)
        assert one.code_dir("job-1") in folders, "the master may send the description again"
        found[uid] = {Path(folder) for folder in folders}
    assert found[1000] == {tmp_path / "code" / DIGEST}
    assert len(found[0]) == 3, "ids of jobs may come again, in another cluster with the same home"
    assert tmp_path / "code" / DIGEST not in found[0]
    assert {folder.parent for folder in found[0]} == {tmp_path / "code"}


@pytest.mark.parametrize("uid", [0, 1000])
def test_the_folder_of_one_job_is_removed_when_its_last_process_has_ended(
    prepare: Prepare, tmp_path: Path, uid: int
) -> None:
    agent, processes = prepare(uid)
    folders = []
    for job_id in ("ended", "living"):
        agent.described(job_id, SPEC)
        folders.append(Path(agent.code_dir(job_id)))
        (folders[-1] / "lib").mkdir(parents=True, exist_ok=True)
        folders[-1].with_name(f"{folders[-1].name}.lock").touch()
    processes.living = [JobWorkerIncarnation("ended", "w_1-0_1-0", 0)]
    agent.keep({"living"})
    assert all(folder.exists() for folder in folders), "a worker of a job that the master has forgotten still ends"
    processes.living = []
    agent.keep({"living"})
    assert folders[0].exists() == (uid == 1000)
    assert folders[1].exists()
    eventually(lambda: len(list((tmp_path / "code").iterdir())) == 2, timeout=100, message="a folder and its lock")


def test_code_that_arrives_after_the_end_of_its_job_is_removed(
    prepare: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spawn_nothing(python: str, module: str, arguments: list[str], *, log: Path, env: dict[str, str]) -> Spawned:
        ours, theirs = socket.socketpair()
        theirs.close()
        return Spawned(python, subprocess.Popen(["true"]), ours, tmp_path / "helper.log", time.monotonic())

    monkeypatch.setattr(preparation, "spawn", spawn_nothing)
    agent, processes = prepare(0)
    agent.described("job", SPEC)
    folder = Path(agent.code_dir("job"))
    incarnation = JobWorkerIncarnation("job", "w_1-0_1-0", 0)
    agent.release_when_met(incarnation)
    agent.keep(())
    ((pid, on_end),) = processes.on_ends.items()
    os.waitpid(pid, 0)
    folder.mkdir(parents=True)
    on_end(0)
    eventually(lambda: not list((tmp_path / "code").iterdir()), timeout=100, message="the folder and its lock")
