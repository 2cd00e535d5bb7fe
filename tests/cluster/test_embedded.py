"""Submitting without a master: an embedded cluster comes, runs the job, and goes, whatever happens to its driver."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from unified.client.daemons import marked_processes
from unified.client.embedded import CLUSTER_VARIABLE
from unified.testing import Belongings, eventually, left_behind

pytestmark = pytest.mark.processes

JOB = """
import os
import signal
import time
from unified import DLJobBuilder

def hello():
    print("hello", flush=True)

def share():
    print(os.environ["OMP_NUM_THREADS"], flush=True)

def fail():
    raise ValueError("bad luck")

def pause():
    print("up", flush=True)
    try:
        while True:
            signal.pause()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        raise

def leave():
    hello()
    os._exit(0)

def meet():
    from pathlib import Path

    print("up", flush=True)
    while not Path("go").exists():
        time.sleep(0.01)

def job_of(function):
    return DLJobBuilder().device_type("CPU").device_per_node(2).workload("worker", f"jobs_of_test.{function}").total(2)

good, bad, endless = job_of("hello"), job_of("fail"), job_of("pause")
meeting, leaving = job_of("meet"), job_of("leave")
busy, huge = job_of("share").resource(cpu=5000), job_of("hello").resource(memory=10**9)
"""
EARLY = """
import os
from jobs_of_test import good as job

while not any(open(f"/proc/self/task/{thread}/children").read() for thread in os.listdir("/proc/self/task")):
    pass  # for ever, if the cluster began only after this file
"""


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short, because the path of a Unix socket is: pytest's own folders are too long for one."""
    with tempfile.TemporaryDirectory(prefix="u-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def driver_env(tmp_path: Path, run_dir: Path) -> Iterator[dict[str, str]]:
    """For a driver whose cluster is gone at the end of the test."""
    (tmp_path / "jobs_of_test.py").write_text(JOB)
    own = {"UNIFIED_HOME": str(tmp_path / "home"), "UNIFIED_RUN_DIR": str(run_dir)}
    env = {**os.environ, **own, "UNIFIED_FAILOVER_EXEC_STRATEGY": "0"}
    env.pop("UNIFIED_MASTER", None)
    yield env
    assert cluster_processes(tmp_path) == []


def submit(tmp_path: Path, env: dict[str, str], what: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "unified", "submit", f"jobs_of_test.py:{what}"],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(tmp_path: Path, env: dict[str, str], what: str) -> tuple[int, str, str]:
    """Exit code and output of a driver that comes to its end by itself."""
    with submit(tmp_path, env, what) as driver:
        out, err = driver.communicate(timeout=100)
    return driver.returncode, out, err


def cluster_processes(tmp_path: Path) -> list[str]:
    homes = (tmp_path / "home" / "embedded").iterdir()
    return [str(process) for home in homes for process in marked_processes(f"{CLUSTER_VARIABLE}={home.name}")]


@pytest.mark.smoke
@pytest.mark.parametrize("what", ["good", pytest.param("leaving", marks=pytest.mark.slow)])
def test_a_job_file_runs_to_its_end_and_nothing_is_left(
    tmp_path: Path, run_dir: Path, driver_env: dict[str, str], what: str
) -> None:
    before = Belongings()
    code, out, err = finished(tmp_path, driver_env, what)
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[worker-0] hello", "[worker-1] hello"]
    assert " finished after " in err.splitlines()[-1]
    assert list(run_dir.iterdir()) == []
    assert left_behind(before) == []


@pytest.mark.slow
def test_workers_share_the_cpus_of_the_host_however_many_they_ask_for(
    tmp_path: Path, driver_env: dict[str, str]
) -> None:
    driver_env.pop("OMP_NUM_THREADS", None)
    code, out, err = finished(tmp_path, driver_env, "busy")
    assert code == 0, err
    share = max(1, len(os.sched_getaffinity(0)) // 2)  # a container may allow less still
    assert {line.split()[0] for line in out.splitlines()} == {"[worker-0]", "[worker-1]"}
    assert all(1 <= int(line.split()[1]) <= share for line in out.splitlines())


def test_a_job_that_can_never_fit_is_refused_at_once(tmp_path: Path, driver_env: dict[str, str]) -> None:
    """Nobody will bring more memory into a cluster that is there for this job alone."""
    code, _, err = finished(tmp_path, driver_env, "huge")
    assert code != 0
    assert "no node of this cluster has 1e+09 MB of memory" in err, err


def test_a_failed_job_says_why_on_one_screen_and_keeps_its_story(tmp_path: Path, driver_env: dict[str, str]) -> None:
    code, _, err = finished(tmp_path, driver_env, "bad")
    assert code == 1
    lines = err.splitlines()
    assert "`unified up` keeps one" in lines[0], "the first line, also in a pipe"
    report = lines[next(index for index, line in enumerate(lines) if "failed with exit code 1" in line) :]
    assert len(report) <= 30
    assert "  failure  ValueError: bad luck" in report
    assert err.count("Traceback (most recent call last)") == 1, "of two workers, and in the report"
    story = Path(report[-1].split()[-1])
    assert "bad luck" in story.read_text()


def test_a_killed_driver_takes_its_cluster_with_it(tmp_path: Path, driver_env: dict[str, str]) -> None:
    with submit(tmp_path, driver_env, "endless") as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline().endswith("up\n")
        assert len(cluster_processes(tmp_path)) >= 5  # master, agent, zygote, two workers
        driver.kill()
    assert driver.returncode == -signal.SIGKILL
    eventually(lambda: not cluster_processes(tmp_path), timeout=100, message="the cluster outlived its driver")


@pytest.mark.parametrize("number", [0, 1, *(pytest.param(number, marks=pytest.mark.slow) for number in range(2, 12))])
def test_a_driver_that_is_killed_while_its_cluster_starts_leaves_nothing(
    tmp_path: Path, run_dir: Path, driver_env: dict[str, str], number: int
) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-m", "unified", "submit", "jobs_of_test.py:endless"],
        cwd=tmp_path,
        env=driver_env,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    eventually((tmp_path / "home" / "embedded").is_dir, timeout=100, message="no cluster was begun")
    time.sleep(random.Random(number).uniform(0.0, 2.0))  # any moment will do
    driver.kill()
    driver.wait()
    eventually(lambda: not cluster_processes(tmp_path), timeout=100, message="the cluster outlived its driver")


def test_submit_begins_its_cluster_before_it_imports_the_file(
    tmp_path: Path, run_dir: Path, driver_env: dict[str, str]
) -> None:
    (tmp_path / "early_of_test.py").write_text(EARLY)
    command = [sys.executable, "-m", "unified", "submit", "early_of_test.py"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=driver_env, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["[worker-0] hello", "[worker-1] hello"]
    assert len(list((tmp_path / "home" / "embedded").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 0])
def test_a_master_that_dies_comes_back_with_its_state_and_the_job_goes_on(
    tmp_path: Path, run_dir: Path, driver_env: dict[str, str], limit: int
) -> None:
    driver_env["UNIFIED_MASTER_MAX_RESTART"] = str(limit)
    with submit(tmp_path, driver_env, "meeting") as driver:
        assert driver.stdout is not None
        for _ in range(2):  # each worker; what `readline` has buffered, `communicate` would not see
            assert driver.stdout.readline().endswith("up\n")
        (home,) = (tmp_path / "home" / "embedded").iterdir()
        (master,) = [
            process.pid
            for process in marked_processes(f"{CLUSTER_VARIABLE}={home.name}")
            if " -m unified_master " in f" {process.command} "
        ]
        os.kill(master, signal.SIGKILL)
        if limit:
            (tmp_path / "go").touch()
        out, said = driver.communicate(timeout=100)
    if limit:
        assert driver.returncode == 0, said
        assert " finished after " in said.splitlines()[-1]
        assert "up\n" not in out, "a worker was started again"
    else:
        assert driver.returncode == 1
        assert "the embedded master was killed by SIGKILL" in said
    assert list(run_dir.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_ctrl_c_and_sigterm_end_an_embedded_cluster_and_all_in_it(
    tmp_path: Path, run_dir: Path, driver_env: dict[str, str], number: signal.Signals, code: int
) -> None:
    with submit(tmp_path, driver_env, "endless") as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline().endswith("up\n")
        driver.send_signal(number)
        out, said = driver.communicate(timeout=100)
    assert driver.returncode == code
    assert out.count("interrupted\n") == (2 if number == signal.SIGINT else 0)
    assert "was stopped" in said.splitlines()[-1]
    assert "Traceback" not in said
    assert list(run_dir.iterdir()) == []


@pytest.mark.slow
def test_nobody_is_advised_to_start_an_agent_of_an_embedded_cluster(
    tmp_path: Path, run_dir: Path, driver_env: dict[str, str]
) -> None:
    """The cluster starts a killed agent again by itself; SIGTERM to all of its processes ends the job."""
    del driver_env["UNIFIED_FAILOVER_EXEC_STRATEGY"]
    with submit(tmp_path, driver_env, "endless") as driver:
        assert driver.stdout is not None
        for _ in range(2):  # each worker
            assert driver.stdout.readline().endswith("up\n")
        (home,) = (tmp_path / "home" / "embedded").iterdir()
        marked = marked_processes(f"{CLUSTER_VARIABLE}={home.name}")
        (agent,) = [process.pid for process in marked if " -m unified_agent " in f" {process.command} "]
        os.kill(agent, signal.SIGKILL)
        for _ in range(2):
            assert driver.stdout.readline().endswith("up\n")
        for process in marked_processes(f"{CLUSTER_VARIABLE}={home.name}"):
            with contextlib.suppress(ProcessLookupError):  # it has ended with another one
                os.kill(process.pid, signal.SIGTERM)
        driver.terminate()
        _, said = driver.communicate(timeout=100)
    said += "".join(log.read_text() for log in home.glob("*.log"))
    assert [line for line in said.splitlines() if "start an agent" in line or "start the agent" in line] == []
