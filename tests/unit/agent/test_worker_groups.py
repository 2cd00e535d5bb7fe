"""A control group for each worker, in a made-up tree: folders and plain files, since a kernel without the memory
controller runs these tests, too. What the kernel does with the files is not shown here; tests/systemd has a real tree.
"""

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.agent_core import W0, W1
from unified.config import cgroups
from unified_agent.worker_groups import WorkerGroups


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The group of an agent, this process, which was delegated to it with all controllers."""
    own = tmp_path / "unified-agent.service"
    own.mkdir()
    (own / "cgroup.procs").write_text(f"{os.getpid()}\n")
    (own / "cgroup.controllers").write_text("cpu memory pids\n")
    return own


class Kernel:
    """A part in place of the kernel's: a new group has files, and a group without processes goes with its files."""

    def __init__(self, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.busy: set[Path] = set()
        mkdir = Path.mkdir

        def make(folder: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
            mkdir(folder, mode, parents, exist_ok)
            if folder.parent == own:
                (folder / "memory.max").write_text("max")

        def remove(folder: Path) -> None:
            if folder in self.busy:
                raise OSError(errno.EBUSY, "Device or resource busy")
            shutil.rmtree(folder)

        monkeypatch.setattr(Path, "mkdir", make)
        monkeypatch.setattr(Path, "rmdir", remove)


def test_a_worker_has_its_memory_and_what_it_leaves_is_killed(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(own, monkeypatch)
    groups = WorkerGroups(own)
    assert (own / "agent/cgroup.procs").read_text() == str(os.getpid()), "first, or the next line is an error"
    assert (own / "cgroup.subtree_control").read_text() == "+memory"
    groups.add(W0, 4242, 512.0)
    groups.add(W1, 4243, 0.0)
    first, second = own / "worker-1", own / "worker-2"
    assert ((first / "memory.max").read_text(), (first / "cgroup.procs").read_text()) == (str(512 * 2**20), "4242")
    assert ((second / "memory.max").read_text(), (second / "cgroup.procs").read_text()) == ("max", "4243")
    kernel.busy.add(first)
    groups.end(W0)
    assert (first / "cgroup.kill").read_text() == "1"
    assert not (second / "cgroup.kill").exists()
    assert groups.due_at, "what was killed had not all ended"
    kernel.busy.clear()
    groups.remove_empty()
    assert (first.exists(), second.exists()) == (False, True)
    groups.end(W1)
    assert not second.exists()


def test_nothing_is_done_where_the_group_is_not_the_agents(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    groups = WorkerGroups(None)
    groups.add(W0, 4242, 512.0)
    groups.end(W0)
    assert not caplog.records
    assert sorted(file.name for file in own.iterdir()) == ["cgroup.controllers", "cgroup.procs"]


@pytest.mark.parametrize("spoil", ["no such group", "another process", "read-only"])
def test_a_group_that_cannot_be_divided_is_a_warning(spoil: str, own: Path, caplog: pytest.LogCaptureFixture) -> None:
    if spoil == "no such group":
        shutil.rmtree(own)
    elif spoil == "another process":
        (own / "cgroup.procs").write_text("1\n")
    else:
        (own / "agent").write_text("a file where the folder belongs")
    groups = WorkerGroups(own)
    assert "cannot be divided among workers" in caplog.text
    groups.add(W0, 4242, 512.0)
    assert not list(own.glob("worker-*"))


def test_without_the_memory_controller_there_is_a_group_all_the_same(own: Path) -> None:
    (own / "cgroup.controllers").write_text("pids\n")
    groups = WorkerGroups(own)
    groups.add(W0, 4242, 512.0)
    assert not (own / "cgroup.subtree_control").exists()
    assert [file.name for file in (own / "worker-1").iterdir()] == ["cgroup.procs"]


def test_a_group_that_cannot_be_made_is_a_warning_and_no_end(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    groups = WorkerGroups(own)
    (own / "worker-1").mkdir()
    groups.add(W0, 4242, 512.0)
    assert "no-worker-group" in caplog.text
    groups.end(W0)


@pytest.mark.parametrize(
    ("lines", "mount", "group"),
    [
        ("0::/system.slice/a.service", "/", "system.slice/a.service"),
        ("1:cpu:/x\n0::/system.slice/a.service", "/", "system.slice/a.service"),
        ("0::/", "/", "."),
        ("0::/pod/a", "/pod", "a"),
        ("1:cpu:/x", "/", None),
    ],
    ids=["systemd", "beside version 1", "a container's own", "a container that sees the host's", "version 1 alone"],
)
def test_the_group_of_version_2_that_a_process_is_in(lines: str, mount: str, group: str | None, tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text(f"{lines}\n")
    (tmp_path / "mountinfo").write_text(
        f"30 24 0:26 / {tmp_path}/v1 rw - cgroup cgroup rw,cpu\n"
        f"31 24 0:27 {mount} {tmp_path}/v2 rw - cgroup2 cgroup2 rw\n"
    )
    assert cgroups.own_group(tmp_path) == (None if group is None else tmp_path / "v2" / group)


def test_workers_of_an_agent_that_is_spared_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real process; that this one is spared is made up, as not every root may have it so."""
    monkeypatch.setattr(cgroups, "read_text", lambda path: "-500")
    with subprocess.Popen(["sleep", "600"]) as worker:
        score = Path(f"/proc/{worker.pid}/oom_score_adj")
        score.write_text("300")
        WorkerGroups(None).add(W0, worker.pid, 512.0)
        assert score.read_text() == "0\n"
        worker.kill()
