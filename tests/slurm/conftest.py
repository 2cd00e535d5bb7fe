"""One real SLURM for all tests of this folder, and a folder from which to submit."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.slurm import NoSlurmError, SlurmCluster, install
from unified import process
from unified.testing import eventually

CODE = """
import os, time
from pathlib import Path
from unified import RoleGroup, current_worker, rpc
from unified.api.builder import DLJobBuilder

FOLDER = Path(__file__).parent

def note(*words):
    print(*words, flush=True)
    with (FOLDER / "notes").open("a") as file:
        print(*words, os.environ["SLURMD_NODENAME"], file=file)

def train():
    # Saves at each step; a rank begins where it has saved last, and ends once there is a file 'finish'.
    worker, saved = current_worker(), FOLDER / f"saved-{os.environ['RANK']}"
    step = int(saved.read_text()) if saved.exists() else 0
    left = worker.time_left()
    note("ends", os.environ["RANK"], "never" if left is None else round(time.time() + left))
    note("from", os.environ["RANK"], step)
    while not worker.should_stop and not (FOLDER / "finish").exists():
        step += 1
        saved.with_suffix(".new").write_text(str(step))
        saved.with_suffix(".new").replace(saved)
        time.sleep(0.05)
    note("at", os.environ["RANK"], step)

ARRAYS = []

@rpc()
def keep(array):
    ARRAYS.append(array)

def share():
    # As train, while both ranks hold an array in shared memory.
    if os.environ["RANK"] == "0":
        import numpy
        RoleGroup("ELASTIC").call("keep", numpy.ones(1 << 20)).result(100)
    train()

def two():
    described("job.train").build().submit("first")
    return described("job.train").build().submit("second")

def env():
    note("env", os.environ.get("SLURM_ARRAY_TASK_ID", "-"))

def fail():
    # Rank 0 waits for the others, and would for ever.
    note("fails", os.environ["RANK"], time.time())
    while os.environ["RANK"] == "0" and os.environ["WORLD_SIZE"] != "1":
        time.sleep(0.05)
    raise SystemExit(7)

def described(entry, nodes=1):
    builder = DLJobBuilder().node_num(nodes).device_per_node(1).device_type("CPU")
    return builder.train(entry).nnodes(nodes).nproc_per_node(1).max_restart(3).end()

def alone():
    return described("job.train").build()

def pair():
    return described("job.train", 2).build()

def sharing():
    return described("job.share", 2).build()

def four():
    return described("job.train", 4).build()

def failing():
    return described("job.fail").build()

def failing_pair():
    return described("job.fail", 2).build()

def array():
    return described("job.env").build()

def roles():
    builder = DLJobBuilder().node_num(int(os.environ.get("NODES", 3))).device_per_node(1).device_type("CPU")
    builder = builder.train("job.train").nnodes(1).nproc_per_node(1).end()
    return builder.workload("env", "job.env").total(2).resource(cpu=1).end().build()
"""


class Site:
    """A folder that jobs are submitted from, as a user of the cluster."""

    def __init__(self, folder: Path, slurm: SlurmCluster) -> None:
        self.folder = folder
        self.slurm = slurm
        self.run_dir = Path(tempfile.mkdtemp(prefix="u-"))  # sockets lie there: a path of pytest's is too long
        (folder / "job.py").write_text(CODE)

    def begin(self, *words: str, **more: str) -> subprocess.Popen[str]:
        environment = {
            **self.slurm.env(),
            "UNIFIED_RUN_DIR": str(self.run_dir),
            "UNIFIED_HOME": str(self.folder / "home"),
        }
        return subprocess.Popen(
            words,
            cwd=self.folder,
            env={**environment, **more},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        started = self.begin(*words, **more)
        out, err = started.communicate(timeout=120)
        return subprocess.CompletedProcess(words, started.returncode, out, err)

    def unified(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "unified", *words, **more)

    def submit(self, *words: str, **more: str) -> str:
        """Submit, and return the id that SLURM gave."""
        done = self.unified("slurm", "submit", *words, **more)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def notes(self, kind: str) -> list[list[str]]:
        """Words of what workers have noted, of one kind."""
        file = self.folder / "notes"
        lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return [words[1:] for words in lines if words[0] == kind]

    def output(self, slurm_id: str) -> str:
        return "".join(path.read_text() for path in self.folder.glob(f"*-{slurm_id}.out"))

    def until_ended(self, slurm_id: str, state: str = "COMPLETED 0:0") -> None:
        def ended() -> bool:
            return self.slurm.state_of(slurm_id) not in ("PENDING", "RUNNING") and not self.slurm.run(
                "squeue", "-h", "-j", slurm_id
            )

        eventually(ended, timeout=120, message=f"job {slurm_id} has not ended: {self.output(slurm_id)}")
        assert self.slurm.state_of(slurm_id) == state, self.output(slurm_id)

    def warnings(self, slurm_id: str) -> list[str]:
        """Lines of warnings in all logs of an allocation, of master, agents and workers."""
        files = (self.folder / ".unified" / slurm_id).rglob("*.log")
        return [line for file in files for line in file.read_text().splitlines() if "WARNING" in line]

    def status(self, slurm_id: str, job: str) -> Any:
        done = self.unified("--slurm", slurm_id, "status", job, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def processes(self, slurm_id: str) -> list[int]:
        """What runs in an allocation, or was started there."""
        mark = f"SLURM_JOB_ID={slurm_id}"
        found = [one.pid for one in process.every_process() if one.is_alive and process.has_environment(one.pid, mark)]
        return [pid for pid in found if process.has_environment(pid, f"SLURM_CONF={self.slurm.conf}")]

    def shared_memory(self, slurm_id: str) -> set[str]:
        """Files in shared memory that processes of an allocation have mapped."""
        lines: list[str] = []
        for pid in self.processes(slurm_id):
            with contextlib.suppress(OSError):  # it has ended
                lines += Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")}

    def are_free(self) -> bool:
        """Have all nodes that there are nothing to do?"""
        return {state for state in self.slurm.states().values() if not state.startswith("down")} == {"idle"}

    def orphans(self, slurm_id: str) -> list[str]:
        """Processes, sockets and folders that nobody removed."""
        paths = [path for path in self.run_dir.rglob("*") if path.name != "agents"]
        return [*map(str, self.processes(slurm_id)), *map(str, paths)]


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    try:
        install()
    except NoSlurmError as error:
        pytest.skip(f"SLURM {error}")
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def site(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Site]:
    assert "SLURM_JOB_ID" not in os.environ
    used = Site(tmp_path, slurm)
    yield used
    subprocess.run(["scancel", "--user", str(os.getuid())], env=slurm.env(), timeout=100, check=False)
    eventually(lambda: not slurm.run("squeue", "--noheader"), timeout=100, message="a job was left")
    shutil.rmtree(used.run_dir, ignore_errors=True)
