"""Code that travels with its job: sent once, unpacked once a node, read from there alone."""

import hashlib
import io
import os
import signal
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from tests.cluster.conftest import Cluster, Project, lines
from tests.support.full_disk import MountDisk
from tests.support.wheels import wheel
from unified.api.builder import DLJobBuilder
from unified.client.code.archive import CodeArchive, pack
from unified.client.code.transfer import fetch, upload
from unified.client.connection import connect_to
from unified.client.handle import JobHandle
from unified.client.submission import submit_job
from unified.errors import RefusedError, UsageError
from unified.job import requirements
from unified.job.spec import EntryPoint, JobSpec, RoleSpec, ShippedCode
from unified.testing import LocalCluster, eventually

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("without_torch")]
IS_ROOT = os.geteuid() == 0

JOB = """
from unified.api.builder import DLJobBuilder
def build():
    builder = DLJobBuilder().node_num(2).device_per_node(1).device_type("CPU").global_env({"OUT": "%s"})
    return builder.workload("reader", "lib.reading.read").total(2).resource(cpu=0.1, accelerator=1).build()
"""
CODE = """
import os, sys
import lib.names

def read():
    with open(os.path.join(os.environ["OUT"], "out"), "a") as out:
        data, has_job = open("data.txt").read(), os.path.exists("job.py")
        print(os.environ["RANK"], lib.names.NAME, data, has_job, os.getcwd(), __file__, file=out)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "laptop"
    (folder / "lib").mkdir(parents=True)
    (folder / "job.py").write_text(JOB % tmp_path)
    (folder / "lib/__init__.py").touch()
    (folder / "lib/reading.py").write_text(CODE)
    (folder / "lib/names.py").write_text('NAME = "first"')
    (folder / "data.txt").write_text("data")
    return folder


def submit(folder: Path, cluster: LocalCluster, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "unified", "submit", "job.py", "--master", cluster.address, *words],
        cwd=folder,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_job_runs_with_the_code_that_came_with_it(folder: Path, local_cluster: Cluster, tmp_path: Path) -> None:
    cluster = local_cluster(nodes=2, devices=1)
    ended = submit(folder, cluster, "--ship")
    assert ended.returncode == 0, ended.stderr
    assert f"ships 5 files of {folder} (0.0 MiB packed)" in ended.stderr
    again = submit(folder, cluster, "--ship")
    assert again.returncode == 0, again.stderr
    assert "ships" not in again.stderr, "the master has it"
    found = [line.split() for line in lines(tmp_path, "out")]
    assert sorted(words[:4] for words in found) == [[rank, "first", "data", "True"] for rank in "0011"]
    unpacked = {Path(words[4]) for words in found}
    assert {path.parent for path in unpacked} == {cluster.home / "code"}
    assert len(unpacked) == (4 if IS_ROOT else 1), "without permissions, each job has a folder of its own on each node"
    assert [words[5] for words in found] == [f"{words[4]}/lib/reading.py" for words in found]
    (folder / "lib/names.py").write_text('NAME = "second"')
    (folder / "model.ckpt").write_text("not to be sent")
    (folder / ".env").write_text("TOKEN=x")
    changed = submit(folder, cluster, "--ship", "--exclude", "*.ckpt")
    assert changed.returncode == 0, changed.stderr
    assert "ships 5 files" in changed.stderr
    assert "does not ship .env, which may hold secrets" in changed.stderr
    assert [line.split()[1] for line in lines(tmp_path, "out")] == ["first"] * 4 + ["second"] * 2
    eventually(lambda: len(list((cluster.home / "code").glob("[0-9a-f]*/lib"))) <= 2, timeout=100)


WRITING = """
import importlib.util, marshal, os, pathlib, struct, time
import lib.names, lib.reading

def work():
    out = pathlib.Path(os.environ["OUT"])
    if os.environ["WRITES"] == "yes":
        outcome = write()
        (out / "outcome.new").write_text(outcome)
        (out / "outcome.new").rename(out / "outcome")
        while not (out / "others-have-ended").exists():
            time.sleep(0.05)
    else:
        with open(out / "out", "a") as file:
            print(lib.names.NAME, hasattr(lib.reading, "read"), os.path.exists("sitecustomize.py"), file=file)

def write():
    names, reading = pathlib.Path(lib.names.__file__), pathlib.Path(lib.reading.__file__)
    found = reading.stat()
    header = importlib.util.MAGIC_NUMBER + struct.pack("<LLL", 0, int(found.st_mtime), found.st_size)
    cached = pathlib.Path(importlib.util.cache_from_source(reading))
    try:
        names.write_text('NAME = "of another job"')
        pathlib.Path("sitecustomize.py").write_text("")
        cached.parent.mkdir(exist_ok=True)
        cached.write_bytes(header + marshal.dumps(compile("", str(reading), "exec")))
    except PermissionError:
        return "denied"
    return "written"
"""


def test_a_job_runs_nothing_that_another_job_wrote_into_the_same_code(
    folder: Path, local_cluster: Cluster, tmp_path: Path
) -> None:
    """The other job still runs. Root may write where permissions say that nobody may."""
    (folder / "writing.py").write_text(WRITING)
    cluster = local_cluster(nodes=1, devices=2)

    def begin(writes: str) -> JobHandle:
        builder = DLJobBuilder().node_num(1).device_per_node(1).device_type("CPU")
        builder.global_env({"OUT": str(tmp_path), "WRITES": writes})
        job = builder.workload("worker", "writing.work").total(1).resource(cpu=0.1, accelerator=1).build()
        return cluster.submit(job, ship=str(folder))

    def unpacked() -> int:
        return len(list((cluster.home / "code").glob("[0-9a-f]*/lib")))

    first = begin("yes")
    eventually(lambda: (tmp_path / "outcome").exists() or first.status().end is not None, timeout=100)
    assert (tmp_path / "outcome").read_text() == ("written" if IS_ROOT else "denied")
    assert begin("no").wait(100) == 0
    assert begin("no").wait(100) == 0
    (tmp_path / "others-have-ended").touch()
    assert first.wait(100) == 0
    assert begin("no").wait(100) == 0
    assert lines(tmp_path, "out") == ["first True False"] * 3
    eventually(lambda: unpacked() <= 1, timeout=100, message="the folders of jobs that have ended are removed")
    cluster.stop()
    assert unpacked() == (0 if IS_ROOT else 1)


def test_an_archive_that_cannot_be_unpacked_fails_the_job_with_a_sentence(
    folder: Path, local_cluster: Cluster, tmp_path: Path
) -> None:
    cluster = local_cluster(nodes=2, devices=1)
    with pack(True, folder=str(folder)) as archive, connect_to(cluster.address) as connection:
        assert upload(connection, archive) == archive.code.size
        assert upload(connection, archive) == 0
        with pytest.raises(RefusedError, match="has no code 000000000000"):
            fetch(connection, "0" * 64, tmp_path / "cache/code")
        assert not [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"]
    (cluster.home / "code").write_text("a file where the folder has to be")
    ended = submit(folder, cluster, "--ship")
    assert ended.returncode == 1
    assert "the job's code cannot be put into" in ended.stderr
    (cluster.home / "code").unlink()
    eventually(lambda: submit(folder, cluster, "--ship").returncode == 0, timeout=100)


REQUIRING = """
import os, sys
import msgspec
import of_this_job

def work():
    with open(os.path.join(os.environ["OUT"], "out"), "a") as out:
        print(of_this_job.VERSION, sys.prefix, msgspec.__file__, file=out)
"""


def requiring(tmp_path: Path, cluster: LocalCluster, requirements: Any) -> JobHandle:
    builder: Any = DLJobBuilder().node_num(2).device_per_node(1).device_type("CPU").global_env({"OUT": str(tmp_path)})
    job = builder.workload("worker", "requiring.work").total(2).resource(cpu=0.1, accelerator=1).build()
    return cluster.submit(job, requirements=requirements)


@pytest.mark.slow
def test_packages_that_a_job_requires_are_installed_once(
    local_cluster: Cluster, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real pip, without an index: from a folder of wheels."""
    for version in ("1.0", "2.0"):
        wheel(tmp_path / "wheels", "of_this_job", version)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    project(requiring=REQUIRING)
    (tmp_path / "project/requirements.txt").write_text("# of this job\nof_this_job>=1\n")
    cluster = local_cluster(nodes=2, devices=1)
    first = requiring(tmp_path, cluster, ["of_this_job==1.0"])
    eventually(lambda: any("packages that its job requires" in w.reason for w in first.status().workers), timeout=100)
    assert first.wait(120) == 0, first.status().reason
    assert requiring(tmp_path, cluster, ["of_this_job==1.0"]).wait(120) == 0
    (environment,) = (path for path in (cluster.home / "environments").iterdir() if path.is_dir())
    assert requiring(tmp_path, cluster, str(tmp_path / "project/requirements.txt")).wait(120) == 0
    found = [line.split() for line in lines(tmp_path, "out")]
    assert [version for version, _, _ in found] == ["1.0"] * 4 + ["2.0"] * 2
    assert {prefix for _, prefix, _ in found[:4]} == {str(environment)}
    assert {file for _, _, file in found} == {msgspec.__file__}, "the agent's own packages are below"
    failing = requiring(tmp_path, cluster, ["no_such_package==3"])
    assert failing.wait(120) == 1
    end = failing.status().end
    assert end is not None
    assert end.failure.category == "setup"
    assert (
        "what the job requires cannot be installed: No matching distribution found for no_such_package==3 (on node"
        in (end.failure.summary)
    )
    assert len(list((cluster.home / "environments").glob("*/complete"))) == 2


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("nowhere.txt", "cannot be read"),
        (["-r other.txt"], "refers to a file that nodes do not have"),
        (["./folder"], "refers to a file that nodes do not have"),
        ("folder/uv.lock", "uv"),
    ],
)
def test_requirements_that_cannot_be_read(given: Any, error: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=error):
        requirements.read(given, str(tmp_path))


@pytest.mark.slow
def test_an_agent_that_is_killed_while_it_unpacks_leaves_nothing(
    folder: Path, local_cluster: Cluster, tmp_path: Path
) -> None:
    (folder / "large.bin").write_bytes(os.urandom(96 << 20))
    cluster = local_cluster(nodes=2, devices=1, restart_agents=1)
    unfinished = cluster.home / "code"
    killed: list[str] = []

    def kill() -> None:
        path, *_ = eventually(lambda: list(unfinished.glob(".*.new")), timeout=100)
        maker = int(path.stem.rpartition("-")[2])
        os.kill(psutil.Process(maker).ppid(), signal.SIGKILL)
        killed.append(path.name)

    killer = threading.Thread(target=kill)
    killer.start()
    ended = submit(folder, cluster, "--ship")
    killer.join()
    assert ended.returncode == 0, ended.stderr
    assert len(lines(tmp_path, "out")) == 2
    assert not (unfinished / killed[0]).exists()
    eventually(lambda: not list(unfinished.glob(".*")), timeout=100)
    assert len([path for path in unfinished.iterdir() if path.is_dir()]) == (2 if IS_ROOT else 1)


def hostile(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> CodeArchive:
    """Return an archive with one member that no `pack` would write."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as packed:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, target
        packed.addfile(member)
    code = ShippedCode(digest=hashlib.sha256(data.getvalue()).hexdigest(), size=data.tell(), root="/laptop")
    return CodeArchive(code, data, 1)


@pytest.mark.slow
def test_hostile_archives_fail_the_job_with_a_sentence_and_leave_nothing(
    local_cluster: Cluster, project: Project, tmp_path: Path
) -> None:
    project(of_nodes="def work(): pass")
    cluster = local_cluster(nodes=1, devices=1)
    entry = EntryPoint(kind="attribute", target="of_nodes", attribute="work")
    spec = JobSpec(name="hostile", roles=[RoleSpec(name="w", kind="simple", entry_point=entry)])
    for archive, why in [
        (hostile("../escaped"), "outside"),
        (hostile("link", tarfile.SYMTYPE, "../../escaped"), "outside"),
        (hostile("device", tarfile.CHRTYPE), "special file"),
    ]:
        with archive, submit_job(spec, master=cluster.address, archive=archive) as handle:
            assert handle.wait(100) == 1
            end = handle.status().end
        assert end is not None
        assert end.failure.category == "setup"
        assert end.failure.summary.startswith("the archive of the job's code is refused: ")
        assert why in end.failure.summary
    assert [path.name for path in (cluster.home / "code").iterdir() if path.suffix != ".lock"] == []
    assert not list(tmp_path.rglob("escaped"))


@pytest.mark.slow
def test_a_full_disk_of_a_node_fails_the_job_with_a_sentence_and_keeps_nothing(
    folder: Path, local_cluster: Cluster, small_disk: MountDisk
) -> None:
    (folder / "large.bin").write_bytes(os.urandom(12 << 20))
    cluster = local_cluster(nodes=2, devices=1)
    small_disk(cluster.home / "code")
    ended = submit(folder, cluster, "--ship")
    assert ended.returncode == 1
    assert f"the job's code cannot be put into {cluster.home / 'code'}: No space left on device" in ended.stderr
    assert [path.name for path in (cluster.home / "code").iterdir() if path.suffix != ".lock"] == []


@pytest.mark.slow
def test_too_large_a_folder_is_refused_by_the_command(
    folder: Path, local_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "large.bin").write_bytes(bytes(2 << 20))
    cluster = local_cluster(nodes=2, devices=1)
    monkeypatch.setenv("UNIFIED_SHIP_LIMIT", "1")
    ended = submit(folder, cluster, "--ship")
    assert ended.returncode == 2
    assert "UNIFIED_SHIP_LIMIT allows 1.0 MiB. The largest are large.bin (2.0 MiB)" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert cluster.jobs == []


@pytest.mark.slow
def test_a_script_travels_with_its_folder(folder: Path, local_cluster: Cluster, tmp_path: Path) -> None:
    cluster = local_cluster(nodes=1, devices=2)
    (folder / "train.py").write_text(
        "import os\nimport lib.names\n"
        "print('in', lib.names.NAME, os.path.exists('data.txt'), os.getcwd(), flush=True)\n"
    )
    words = ["run", "--master", cluster.address, "--ship", "--exclude", "data.txt", "--nproc-per-node=2", "train.py"]
    ran = subprocess.run(
        [sys.executable, "-m", "unified", *words], cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )
    assert ran.returncode == 0, ran.stderr
    first, second = (line.partition("in ")[2].split() for line in ran.stdout.splitlines())
    assert first == second
    assert first[:2] == ["first", "False"]
    assert Path(first[2]).parent == cluster.home / "code"


@pytest.mark.slow
@pytest.mark.parametrize("ship", ["laptop", ["lib", "data.txt"]], ids=["folder", "paths"])
def test_another_folder_or_some_paths_travel(
    ship: str | list[str], folder: Path, local_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = local_cluster(nodes=1, devices=1)
    monkeypatch.chdir(tmp_path if ship == "laptop" else folder)
    builder = DLJobBuilder().node_num(1).device_per_node(1).device_type("CPU").global_env({"OUT": str(tmp_path)})
    job = builder.workload("reader", "lib.reading.read").total(1).resource(cpu=0.1, accelerator=1).build()
    assert job.submit("ships", master=cluster.address, ship=ship) == 0
    (found,) = lines(tmp_path, "out")
    *words, unpacked, file = found.split()
    assert words == ["0", "first", "data", str(ship == "laptop")]
    assert (Path(unpacked).parent, Path(file)) == (cluster.home / "code", Path(unpacked, "lib/reading.py"))


UV = """#!/bin/sh
if [ "$*" != "export --frozen --no-emit-project --no-dev --quiet --project $LOCKED" ]; then
  echo "not these: $*" >&2
  exit 2
fi
echo "# of uv"
echo "einops==0.8.1"
"""


def test_a_lock_file_is_read_by_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that stands in for uv, which is not installed here."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/uv").write_text(UV)
    (tmp_path / "bin/uv").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("LOCKED", str(tmp_path))
    assert requirements.read("uv.lock", str(tmp_path)) == ["einops==0.8.1"]
    monkeypatch.setenv("LOCKED", "another")
    with pytest.raises(UsageError, match=r"uv does not take .*uv.lock: \['not these: export"):
        requirements.read("uv.lock", str(tmp_path))
