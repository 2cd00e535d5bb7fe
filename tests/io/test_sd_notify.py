"""Notifications to systemd, which a real datagram socket in its place receives: of the notifier, and of daemons."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agents import AgentProcess, PlayedMaster, a_job, a_worker
from tests.support.deadlines import met, missed
from tests.support.master_process import StartMaster
from unified.protocol.records import WorkerState
from unified.sd_notify import PERIOD_S, ServiceNotifier


class Manager:
    """The socket of a service manager, and what has come."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.settimeout(met(100))
        self.lines: list[str] = []

    def receive(self, line: str) -> str:
        """Wait for a line that begins so, from now on; return it."""
        deadline = time.monotonic() + met(100)
        while time.monotonic() < deadline:
            came = self.socket.recv(4096).decode().split("\n")
            self.lines += came
            if found := next((each for each in came if each.startswith(line)), ""):
                return found
        raise AssertionError(f"no {line} in {self.lines}")


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(tmp_path / "notify")
    yield manager
    manager.socket.close()


@pytest.fixture
def service(manager: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment that systemd gives a service with a watchdog of 0.4 s."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "400000")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_the_notifier_sends_and_when(manager: Manager, tmp_path: Path) -> None:
    clock, env = Clock(), {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "8000000", "OTHER": "1"}
    env["WATCHDOG_PID"] = str(os.getpid())
    notifier = ServiceNotifier(env, clock=clock)
    assert env == {"OTHER": "1"}, "no child speaks for this process"

    def sent(*, is_ready: bool = True, status: str = "fine") -> str:
        notifier.beat(is_ready, lambda: status)
        manager.socket.settimeout(missed(0.01))
        try:
            return manager.socket.recv(4096).decode()
        except TimeoutError:
            return ""

    assert notifier.next_deadline == 100.0
    assert sent(is_ready=False, status="waits") == "WATCHDOG=1\nSTATUS=waits"
    assert notifier.next_deadline == 104.0, "half of the watchdog's time"
    assert sent(is_ready=False) == ""
    assert sent(is_ready=True) == "READY=1\nWATCHDOG=1\nSTATUS=fine", "without delay"
    clock.now += 3.9
    assert sent(status="other") == ""
    clock.now += 0.2
    assert sent() == "WATCHDOG=1", "a status that has not changed is not sent again"
    notifier.stopping()
    notifier.stopping()
    assert manager.socket.recv(4096) == b"STOPPING=1\nEXTEND_TIMEOUT_USEC=15000000"
    clock.now += 5
    assert sent() == "WATCHDOG=1\nEXTEND_TIMEOUT_USEC=15000000"
    assert sent() == ""


def test_a_name_without_a_file_is_an_address_too() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(f"\0unified-test-{os.getpid()}")
        receiver.settimeout(met(100))
        ServiceNotifier({"NOTIFY_SOCKET": f"@unified-test-{os.getpid()}"}).beat(True, str)
        assert receiver.recv(4096) == b"READY=1\nWATCHDOG=1"


@pytest.mark.parametrize(
    ("env", "is_helper", "period_s"),
    [
        ({}, False, None),
        ({"NOTIFY_SOCKET": "/nowhere"}, True, None),
        ({"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}, False, PERIOD_S),
        ({"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "soon"}, False, PERIOD_S),
    ],
    ids=["no systemd", "part of a driver", "the watchdog of another process", "no number"],
)
def test_whom_it_does_not_notify(env: dict[str, str], is_helper: bool, period_s: float | None) -> None:
    notifier = ServiceNotifier(env, is_helper=is_helper, clock=Clock())
    assert env == {}
    notifier.beat(True, lambda: "a manager that is gone is no error")
    notifier.stopping()
    assert notifier.next_deadline == (None if period_s is None else 100.0 + period_s)


@pytest.mark.usefixtures("service")
def test_a_master_is_ready_when_it_listens_and_says_that_it_lives_and_stops(
    manager: Manager, start_master: StartMaster
) -> None:
    master = start_master()
    manager.receive("READY=1")
    assert master.address, "its socket was bound before"
    for _ in range(3):
        manager.receive("WATCHDOG=1")
    assert "STATUS=0 jobs of 0 workers; 0 of 0 nodes alive" in manager.lines
    master.process.terminate()
    manager.receive("STOPPING=1")
    assert master.process.wait(met(100)) == 0
    assert manager.lines.count("READY=1") == 1


@pytest.mark.usefixtures("service")
def test_an_agent_is_ready_once_it_is_registered(manager: Manager, tmp_path: Path) -> None:
    master = PlayedMaster()
    agent = AgentProcess(tmp_path, master.address)
    try:
        assert "0 workers of 0 jobs; node n1, unknown at the master" in manager.receive("STATUS=")
        assert "READY=1" not in manager.lines
        master.welcome()
        manager.receive("READY=1")
        master.desire(a_worker(), jobs=[a_job("forever")])
        worker = master.reaches("w-0#0", WorkerState.RUNNING)
        manager.receive("STATUS=1 workers of 1 jobs; node n1, registered at the master")
        names = {line.partition(b"=")[0] for line in Path(f"/proc/{worker.pid}/environ").read_bytes().split(b"\0")}
        assert b"UNIFIED_RUN_DIR" in names, "workers have the agent's environment"
        assert not {b"NOTIFY_SOCKET", b"WATCHDOG_USEC", b"WATCHDOG_PID"} & names, "but do not speak in its name"
        manager.receive("WATCHDOG=1")
        agent.process.terminate()
        manager.receive("STOPPING=1")
        assert agent.wait() == 0
    finally:
        agent.process.kill()
        agent.wait()
        master.hang_up()


@pytest.mark.usefixtures("service")
def test_a_boot_does_not_wait_for_a_master_elsewhere(
    manager: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIFIED_CONNECT_S", "0.5")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        agent = AgentProcess(tmp_path, f"tcp://127.0.0.1:{nobody.getsockname()[1]}")
        manager.receive("READY=1")
        assert any("unknown at the master" in line for line in manager.lines)
        agent.process.send_signal(signal.SIGTERM)
        assert agent.wait() == 0
