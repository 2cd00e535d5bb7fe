"""``unified up`` and ``unified down``: a cluster that stays, found by whatever submits or looks, and by nobody else."""

import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import unified
from unified.cli.main import main
from unified.client.connection import MasterConnection
from unified.client.daemons import Marked, marked_processes
from unified.client.embedded import CLUSTER_VARIABLE
from unified.config.clusters import ClusterRecord, kept_cluster, living_clusters
from unified.errors import ClusterError, KeyRefusedError, MasterUnreachableError
from unified.protocol.client_master import JobList, ListJobs
from unified.protocol.records import Stage
from unified.testing import eventually

pytestmark = pytest.mark.processes

SCRIPT = """
import os, time
print("waits", flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
print("goes", flush=True)
"""


class Done(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Done]
Drive = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home, a run folder with a short name, and no cluster left in them."""
    with tempfile.TemporaryDirectory(prefix="u-", dir="/tmp") as run_dir:
        monkeypatch.setenv("UNIFIED_RUN_DIR", run_dir)
        monkeypatch.setenv("UNIFIED_HOME", str(tmp_path / "home"))
        monkeypatch.delenv("UNIFIED_MASTER", raising=False)
        monkeypatch.delenv(CLUSTER_VARIABLE, raising=False)
        monkeypatch.chdir(tmp_path)
        (tmp_path / "waits.py").write_text(SCRIPT)
        (tmp_path / "hello.py").write_text("print('hello')")
        yield Path(run_dir)
        main(["down", "--force"])
        assert processes(tmp_path) == []


def processes(tmp_path: Path) -> list[str]:
    homes = (tmp_path / "home" / "embedded").iterdir()
    return [str(process) for home in homes for process in marked_processes(f"{CLUSTER_VARIABLE}={home.name}")]


def up(*words: str) -> Done:
    """A process of its own, which has ended when the cluster is used."""
    done = subprocess.run(
        [sys.executable, "-m", "unified", "up", *words], capture_output=True, text=True, timeout=100, check=False
    )
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*words: str) -> Done:
        capsys.readouterr()
        return Done(main(words), *capsys.readouterr())

    return run


def kept() -> ClusterRecord:
    found = kept_cluster()
    assert found is not None
    return found


def test_it_stays_is_found_outlives_submitters_and_ends_in_order(
    tmp_path: Path, place: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = up("--devices", "2")
    assert done.code == 0, done.err
    address = kept().address
    assert done.out.startswith(f"{address}  is up: 1 node of 2 devices; ends after 1 h 0 min without a job; logs: ")
    assert done.err == ""
    assert os.getsid(kept().pid) == kept().pid, "a signal of the terminal would reach it"

    again = command("up")
    assert (again.code, again.err) == (0, "")
    assert again.out.startswith(f"{address}  is up already: 1 node of 2 devices")
    other = command("up", "--devices", "3", "--nodes", "1")
    assert other.code == 0
    assert "started with other --devices;" in other.err
    with monkeypatch.context() as shell:
        shell.setenv("UNIFIED_RUN_DIR", str(tmp_path / "run"))  # as another TMPDIR does
        assert command("up").out == again.out
        assert command("nodes").code == 0

    submitter = [sys.executable, "-m", "unified", "run", "--detach", "--name", "long", "waits.py"]
    job = subprocess.run(submitter, capture_output=True, text=True, timeout=100, check=True).stdout.strip()
    with unified.connect() as client:
        assert client.address == address
        assert [line.job_id for line in client.jobs()] == [job]
        refused = command("down")
        assert refused.code == 1
        assert f"jobs of this cluster have not ended: {job}." in refused.err
        (tmp_path / "go").touch()
        assert client.job(job).wait(100) == 0
    assert command("logs", job).out.splitlines() == ["[ELASTIC-0] waits", "[ELASTIC-0] goes"]
    assert command("jobs").code == 0

    assert command("down").out == f"{address}  is down\n"
    assert processes(tmp_path) == []
    assert list(place.iterdir()) == []
    assert command("down") == Done(0, "no cluster is up\n", "")
    assert command("jobs").code == 2


def test_nobody_without_its_key_may_use_it(place: Path) -> None:
    assert up().code == 0
    key = Path(kept().key_file)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
    # A master that hangs up before the client has read why is not told from a program that is no master.
    refusals = pytest.raises((KeyRefusedError, MasterUnreachableError), match=r"(wants|with) a cluster key")
    with MasterConnection(kept().address) as stranger, refusals:
        stranger.ask(ListJobs(), JobList)
    with unified.connect(kept().address) as client:  # by its address alone
        assert client.jobs() == []


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["keeper", "master"])
def test_a_daemon_that_is_killed_leaves_nothing_behind(
    tmp_path: Path, place: Path, command: Command, victim: str
) -> None:
    assert up("--devices", "1").code == 0
    assert command("run", "--detach", "--name", "long", "waits.py").code == 0
    with unified.connect() as client:
        handle = client.job("long")
        eventually(lambda: handle.status().stage == Stage.RUNNING, timeout=100, message="the job does not run")
        if victim == "master":  # it comes back, and the job goes on
            (master,) = [each for each in marked_in(tmp_path) if "unified_master" in each.command]
            os.kill(master.pid, signal.SIGKILL)
            (tmp_path / "go").touch()
            assert handle.wait(100) == 0
            return
        before = kept()
        os.kill(before.pid, signal.SIGKILL)
        with pytest.raises(ClusterError, match=r"has ended with its jobs; `unified logs JOB` shows their output"):
            handle.wait(100)
    eventually(lambda: not processes(tmp_path), timeout=100, message="daemons outlived their keeper")
    assert living_clusters() == []
    assert command("down").out == "no cluster is up\n"
    assert up("--devices", "1").code == 0
    assert kept() != before
    assert len(list(place.iterdir())) == 1


def marked_in(tmp_path: Path) -> list[Marked]:
    (home,) = (tmp_path / "home" / "embedded").iterdir()
    return marked_processes(f"{CLUSTER_VARIABLE}={home.name}")


def test_two_that_start_at_once_are_one_and_it_ends_when_it_has_been_idle(tmp_path: Path, place: Path) -> None:
    words = [sys.executable, "-m", "unified", "up", "--idle", "2", "--nodes", "2", "--devices", "1"]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [each.communicate(timeout=100)[0] for each in both]
    assert [each.returncode for each in both] == [0, 0]
    assert len({text.split()[0] for text in said}) == 1
    assert all("up" in text and "2 nodes of 1 device;" in text for text in said)
    assert len(list((tmp_path / "home" / "embedded").iterdir())) == 1
    eventually(lambda: kept_cluster() is None and not processes(tmp_path), timeout=100, message="it does not end")
    assert "no job for 2 s: the cluster ends" in (tmp_path / "home" / "up.log").read_text()


def test_one_that_cannot_start_says_why(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIFIED_LEASE_S", "often")
    done = up()
    assert done.code == 1
    assert "UNIFIED_LEASE_S='often' is not a number of seconds" in done.err
    assert kept_cluster() is None


@pytest.fixture
def drive() -> Iterator[Drive]:
    """Starts a driver of this name; one that still runs at the end of the test is ended in order."""
    with contextlib.ExitStack() as drivers:

        def start(name: str) -> "subprocess.Popen[str]":
            words = [sys.executable, "-m", "unified", "run", "--name", name, "waits.py"]
            driver = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            drivers.enter_context(driver)
            drivers.callback(driver.terminate)
            return driver

        yield start


def test_the_cluster_of_a_running_driver_is_found_and_what_it_leaves_is_read(
    tmp_path: Path, place: Path, command: Command, drive: Drive
) -> None:
    drivers = [drive("first")]
    await_output(command, "first", living=1)
    assert re.match(r"job first-1-[0-9a-f]{10} is RUNNING", command("status", "first").out)
    drivers.append(drive("second"))
    eventually(lambda: len(living_clusters()) == 2, timeout=100, message="the second driver has no cluster")
    refused = command("jobs")
    assert refused.code == 2
    for record in living_clusters():
        assert f"--master {record.address}  (its driver has pid {record.pid})" in refused.err
        assert command("jobs", "--master", record.address).code == 0
    (tmp_path / "go").touch()
    for driver in drivers:
        out, _ = driver.communicate(timeout=100)
        assert out == "waits\ngoes\n"
    for name in ("first", "first-1", "second"):
        left = command("logs", name)
        assert left.out.splitlines() == ["[ELASTIC-0] waits", "[ELASTIC-0] goes"]
        assert "ran in a cluster that has ended; it left this in " in left.err
        ended = command("status", name)
        assert (ended.code, ended.out.startswith("job ")) == (0, True), ended.err
        assert "finished after" in ended.out
        assert json.loads(command("status", name, "--json").out)["exit_code"] == 0
    assert command("logs", "first", "--tail", "1", "--rank", "0").out == "[ELASTIC-0] goes\n"
    told = json.loads(command("logs", "first", "--tail", "1", "--rank", "0", "--grep", "goe", "--json").out)
    assert (told["role"], told["rank"], told["incarnation"], told["line"]) == ("ELASTIC", 0, 0, "goes")
    assert command("logs", "first", "--master", "local").out.splitlines() == ["[ELASTIC-0] waits", "[ELASTIC-0] goes"]
    assert command("logs", "third").code == 2


def await_output(command: Command, job: str, *, living: int) -> None:
    eventually(lambda: len(living_clusters()) == living, timeout=100, message="the driver has no cluster")
    eventually(lambda: "waits" in command("logs", job).out, timeout=100, message=f"{job} prints nothing")


SLOW = """
import os, sys, time
while "unified_master" in sys.orig_argv and not os.path.exists(os.environ["GO"]):
    time.sleep(0.02)
"""


SLOW_UP = """
from unified.client import embedded
from unified.client.keeper import start_keeper
embedded.NOTE_S = 0.05
print(start_keeper(1, 1, 60.0).address)
"""


def test_a_slow_start_is_waited_for_and_told(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("GO", str(tmp_path / "go"))
    command = [sys.executable, "-c", SLOW_UP]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as starter:
        assert starter.stderr is not None
        told = [starter.stderr.readline() for _ in range(2)]
        (tmp_path / "go").touch()
        out, err = starter.communicate(timeout=100)
    assert starter.returncode == 0, err
    assert kept().address == out.strip()
    for line in told:
        assert re.match(r"the cluster is not ready after \S+ s: the process \d+, which keeps it, still starts", line)
        assert f"; logs: {tmp_path}/home/up.log. The start goes on while its processes live." in line
