"""The units under a real systemd as PID 1 of a host of its own, installed there as an operator would.

The order of tests is any: each leaves both daemons running, with nothing beside them.
"""

from collections.abc import Callable, Iterator

import pytest

from tests.support.deadlines import met
from tests.support.nspawn import ROOT, Host, NoTreeError, booted
from unified.cli.systemd import ROLES
from unified.testing import eventually

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(900)]  # the first run makes the root tree

PROGRAMS = ROOT / "tests/support/programs"
KEY, MASTER = "/etc/unified/cluster.key", "tcp://127.0.0.1:7077"
CLIENT = {"UNIFIED_KEY_FILE": KEY, "UNIFIED_MASTER": MASTER}
CODE = """
import os, subprocess, time
from pathlib import Path
from unified import current_worker

def work():
    worker, folder = current_worker(), Path(os.environ["FOLDER"])
    assert not worker.should_stop  # from now on it is given its time
    left = subprocess.Popen(["env", "-i", "sleep", "600"], start_new_session=True)
    with (folder / "pids").open("a") as file:
        print(os.getpid(), left.pid, file=file)
    while not (folder / "end").exists():
        time.sleep(0.02)
        if worker.should_stop:
            time.sleep(float(os.environ["SAVES_FOR"]))
            (folder / "saved").touch()
            return
"""
JOB = """
import sys
from unified.api.builder import DLJobBuilder
builder = DLJobBuilder().device_per_node(1).device_type("CPU")
builder = builder.global_env({"FOLDER": sys.argv[1], "SAVES_FOR": sys.argv[2]})
builder = builder.workload("w", "work.work").total(1).resource(cpu=0.1, memory=700)
builder.build().submit(sys.argv[3], blocking=False, working_dir="/shared", stop_grace_s=60).close()
"""


@pytest.fixture(scope="module")
def booted_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    try:
        with booted(tmp_path_factory.mktemp("host")) as host:
            yield host
    except NoTreeError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def installed(booted_host: Host) -> Host:
    """The host with a master and an agent, by the commands that `unified systemd install` names."""
    host = booted_host
    said = host.run("unified", "systemd", "install", "--role", "master")
    assert "/unified key new /etc/unified/cluster.key" in said
    host.run("systemd-sysusers")
    host.run("systemd-tmpfiles", "--create", "unified.conf")
    host.run("unified", "key", "new", KEY)
    host.run("unified", "systemd", "install", "--role", "agent", "--master", MASTER)
    light = f"UNIFIED_AGENT_FLAGS='--worker-entry light_worker:main'\nPYTHONPATH={PROGRAMS}\n"  # without torch
    host.write("/etc/unified/agent.env", f"UNIFIED_MASTER={MASTER}\nUNIFIED_VACATE_S=0.5\n{light}")
    assert "unchanged /etc/systemd/system/unified-agent.service" in host.run(
        "unified", "systemd", "install", "--role", "agent"
    )
    host.run("systemctl", "daemon-reload")
    host.run("systemctl", "enable", "--now", "unified-master", "unified-agent")
    (host.shared / "work.py").write_text(CODE)
    (host.shared / "job.py").write_text(JOB)
    return host


@pytest.fixture
def host(installed: Host) -> Host:
    for unit in ("unified-master", "unified-agent"):
        installed.run("systemctl", "start", unit)
        assert installed.show(unit)["ActiveState"] == "active"
    eventually(lambda: "registered at the master" in installed.show("unified-agent")["StatusText"], timeout=met(100))
    return installed


@pytest.fixture
def settings(host: Host) -> Iterator[Callable[..., None]]:
    """Changes lines of a unit's [Service] by a drop-in until the end of the test."""
    changed = []

    def change(unit: str, *lines: str) -> None:
        changed.append(unit)
        host.write(f"/run/systemd/system/{unit}.service.d/test.conf", "\n".join(["[Service]", *lines, ""]))
        host.run("systemctl", "daemon-reload")

    yield change
    for unit in changed:
        host.run("rm", "-r", f"/run/systemd/system/{unit}.service.d")
    host.run("systemctl", "daemon-reload")
    for unit in changed:
        host.run("systemctl", "reset-failed", unit, codes=(0, 1))
        host.run("systemctl", "restart", unit)


class Job:
    """A job of one worker, which leaves a child in a session of its own, and saves for some seconds when it stops."""

    def __init__(self, host: Host, name: str, saves_for_s: float = 0.0) -> None:
        self.host, self.name, self.folder = host, name, host.shared / name
        self.folder.mkdir()
        self.folder.chmod(0o777)
        host.run("python", "/shared/job.py", f"/shared/{name}", str(saves_for_s), name, env=CLIENT)
        eventually(lambda: self.pids, timeout=met(120), message="the worker does not run")

    @property
    def pids(self) -> list[list[int]]:
        """Pids of each incarnation of the worker and of its child."""
        file = self.folder / "pids"
        return [[int(pid) for pid in line.split()] for line in file.read_text().splitlines()] if file.exists() else []

    def are_alive(self, pids: list[int]) -> list[bool]:
        def state(pid: int) -> str:
            return self.host.run("sh", "-c", f"cut -d' ' -f3 /proc/{pid}/stat || true").split("\n")[0]

        return [state(pid) in ("R", "S", "D") for pid in pids]

    def end(self) -> None:
        (self.folder / "end").touch()
        self.host.run("unified", "status", self.name, "--watch", env=CLIENT)  # its exit code is the job's


@pytest.mark.parametrize("unit", ["unified-master", "unified-agent"])
def test_one_that_is_killed_is_started_again(unit: str, host: Host) -> None:
    before = host.show(unit)
    host.signal(before["MainPID"], "KILL")
    eventually(lambda: int(host.show(unit)["NRestarts"]) > int(before["NRestarts"]), timeout=met(100))
    eventually(lambda: host.show(unit)["ActiveState"] == "active", timeout=met(100))
    assert host.show(unit)["MainPID"] != before["MainPID"]
    eventually(lambda: "1 of 1 nodes alive" in host.show("unified-master")["StatusText"], timeout=met(100))


@pytest.mark.parametrize("unit", ["unified-master", "unified-agent"])
def test_one_that_hangs_is_started_again_by_the_watchdog(unit: str, host: Host, settings: Callable[..., None]) -> None:
    settings(unit, "WatchdogSec=4")
    host.run("systemctl", "restart", unit)
    before = host.show(unit)
    host.signal(before["MainPID"], "STOP")
    eventually(lambda: host.show(unit)["MainPID"] not in ("0", before["MainPID"]), timeout=met(100))
    assert "Watchdog timeout (limit 4s)" in host.journal(unit)
    eventually(lambda: host.show(unit)["ActiveState"] == "active", timeout=met(100))


def test_a_stop_waits_for_workers_that_save_longer_than_systemd_would(
    host: Host, settings: Callable[..., None]
) -> None:
    settings("unified-agent", "TimeoutStopSec=2")
    host.run("systemctl", "restart", "unified-agent")
    job = Job(host, "saves", saves_for_s=8)
    pids = job.pids[0]
    host.run("systemctl", "stop", "unified-agent")
    unit = host.show("unified-agent")
    assert (unit["ActiveState"], unit["Result"], unit["ExecMainStatus"]) == ("inactive", "success", "0")
    assert (job.folder / "saved").exists()
    assert job.are_alive(pids) == [False, False], "also not what it left in a session of its own"
    host.run("systemctl", "start", "unified-agent")
    eventually(lambda: len(job.pids) == 2, timeout=met(120), message="it goes on where it can")
    job.end()


def test_a_master_that_is_restarted_finds_its_job_as_it_was(host: Host) -> None:
    job = Job(host, "stays")
    before = host.show("unified-master")["MainPID"]
    host.run("systemctl", "restart", "unified-master")
    host.signal(host.show("unified-master")["MainPID"], "KILL")
    eventually(lambda: "1 jobs of 1 workers; 1 of 1" in host.show("unified-master")["StatusText"], timeout=met(100))
    assert host.show("unified-master")["MainPID"] != before
    eventually(lambda: "1 workers of 1 jobs" in host.show("unified-agent")["StatusText"], timeout=met(100))
    job.end()
    assert len(job.pids) == 1, "its worker was not started again"


def test_a_worker_has_a_control_group_of_its_own(host: Host) -> None:
    job = Job(host, "grouped")
    pids = job.pids[0]
    unit = "/system.slice/unified-agent.service"
    agent = host.show("unified-agent")["MainPID"]
    groups = [host.run("cat", f"/proc/{pid}/cgroup").split("\n0::")[-1].strip() for pid in (*pids, agent)]
    worker, child, of_agent = (group.removeprefix("0::") for group in groups)
    assert worker.startswith(f"{unit}/worker-")
    assert (child, of_agent) == (worker, f"{unit}/agent")
    group = f"/sys/fs/cgroup{worker}"
    if "memory" in host.run("cat", f"/sys/fs/cgroup{unit}/cgroup.controllers"):  # a kernel may have none
        assert host.run("cat", f"{group}/memory.max").strip() == str(700 * 2**20)
    scores = [host.run("cat", f"/proc/{pid}/oom_score_adj").strip() for pid in (*pids, agent)]
    may_lower = host.run("sh", "-c", "echo -1 2>/dev/null > /proc/self/oom_score_adj && echo yes || true").strip()
    assert scores == ["0", "0", "-500" if may_lower else "0"], "a machine may allow root no lower one"
    assert host.show("unified-agent")["OOMPolicy"] == "continue", "a worker that runs out of memory ends nobody else"
    job.end()
    eventually(lambda: job.are_alive(pids) == [False, False], timeout=met(100))
    eventually(lambda: not host.run("sh", "-c", f"ls -d {group} 2>/dev/null || true"), timeout=met(100))


def test_a_wrong_key_ends_it_for_good(host: Host, settings: Callable[..., None]) -> None:
    host.run("unified", "key", "new", "/etc/unified/other.key")
    settings("unified-agent", "LoadCredential=", "LoadCredential=cluster.key:/etc/unified/other.key")
    host.run("systemctl", "restart", "unified-agent", codes=(0, 1))
    eventually(lambda: host.show("unified-agent")["ActiveState"] == "failed", timeout=met(100))
    unit = host.show("unified-agent")
    assert (unit["ExecMainStatus"], unit["NRestarts"]) == ("78", "0")
    assert "refused this side's cluster key" in host.journal("unified-agent")
    host.run("rm", "/etc/unified/other.key")


def test_a_gateway_serves_once_it_is_ready(host: Host) -> None:
    host.run("unified", "systemd", "install", "--role", "gateway")
    host.run("systemctl", "daemon-reload")
    host.run("systemctl", "start", "unified-gateway")
    assert host.show("unified-gateway")["StatusText"] == "serves at http://127.0.0.1:8000"
    asks = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8000/healthz').status)"
    assert host.run("python", "-c", asks).strip() == "200"
    host.run("systemctl", "stop", "unified-gateway")
    assert host.show("unified-gateway")["Result"] == "success"


@pytest.mark.parametrize("role", ROLES)
def test_systemd_finds_no_fault_in_a_unit(role: str, host: Host) -> None:
    host.run("unified", "systemd", "install", "--role", role)
    unit = f"/etc/systemd/system/unified-{role}.service"
    assert host.run("systemd-analyze", "verify", unit) == ""
    most = {"agent": 85}.get(role, 20)
    host.run("systemd-analyze", "security", "--offline=true", f"--threshold={most}", unit)
    assert host.run("systemd-analyze", "cat-config", "sysusers.d/unified.conf")


def test_systemd_finds_no_fault_in_the_unit_of_a_user(host: Host) -> None:
    host.run("unified", "systemd", "install", "--role", "agent", "--user", "--master", MASTER)
    unit = "/root/.config/systemd/user/unified-agent.service"
    assert host.run("systemd-analyze", "--user", "verify", unit, env={"XDG_RUNTIME_DIR": "/run/user"}) == ""
