"""Real daemons with a cluster key: on loopback, where one may be had, and on an address beyond it, where one must."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from tests.cluster.conftest import Cluster
from tests.support.programs.key_job import MARKER
from unified import process
from unified.security.curve import new_key, secure_client
from unified.security.keys import load_key, write_key
from unified.testing import eventually

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("without_torch")]
HERE = Path(__file__).parents[1] / "support/programs"
ADDRESS = "10.99.7.1"
MASTER = f"tcp://{ADDRESS}:7077"
PLAIN = "seen-in-the-clear-1c9e"


@pytest.fixture
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "keys" / "cluster.key"
    write_key(path, new_key())
    monkeypatch.setenv("UNIFIED_KEY_FILE", str(path))
    return path


@pytest.mark.parametrize("route", ["tcp", pytest.param("relay", marks=pytest.mark.slow)])
def test_a_job_runs_with_a_key_and_leaves_no_trace_of_it(
    local_cluster: Cluster, key_file: Path, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    monkeypatch.setenv("UNIFIED_BUS_ROUTE", route)
    cluster = local_cluster(nodes=2, devices=1)
    driver = subprocess.run(
        [sys.executable, str(HERE / "key_job.py")],
        env={**os.environ, "UNIFIED_MASTER": cluster.address},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert driver.returncode == 0, driver.stdout + driver.stderr
    assert f"stage RUNNING route {route}" in driver.stdout
    secret = load_key(key_file).secret.encode()
    logs = b"".join(path.read_bytes() for path in cluster.home.rglob("*") if path.is_file())
    assert b"event=master-ready" in logs
    assert b"job-submitted" in logs, "the store is among the files"
    assert secret not in logs
    assert b"key-refused" not in logs
    for line in cluster.processes():
        for where in ("environ", "cmdline"):
            assert secret not in Path(f"/proc/{line.split()[0]}/{where}").read_bytes()


def test_a_stranger_at_a_workers_door_is_refused_and_named_in_its_log(
    local_cluster: Cluster, key_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("UNIFIED_BUS_ROUTE", "tcp")
    cluster = local_cluster(nodes=1, devices=1)
    (tmp_path / "waits.py").write_text("import signal\ndef run():\n    signal.pause()\n")
    (tmp_path / "submit.py").write_text(
        "from unified.api.builder import DLJobBuilder\n"
        "job = DLJobBuilder().node_num(1).device_per_node(1).device_type('CPU').role('w').run('waits.run').build()\n"
        "job.submit('doors', blocking=False)\n"
    )
    env = {**os.environ, "UNIFIED_MASTER": cluster.address}
    subprocess.run([sys.executable, "submit.py"], env=env, cwd=tmp_path, check=True, timeout=100)
    eventually(lambda: [job.stage for job in cluster.jobs] == ["RUNNING"], timeout=100)
    ((_, pid),) = cluster.workers("doors").items()
    ports = {at.laddr.port for at in psutil.Process(pid).net_connections("tcp") if at.status == psutil.CONN_LISTEN}
    assert len(ports) == 2, "one for messages, one for large payloads"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = context.socket(zmq.PUSH)
    stranger.linger = 0
    secure_client(stranger, new_key())
    for port in ports:
        stranger.connect(f"tcp://127.0.0.1:{port}")
    stranger.send_multipart([b"anything", b"at all"])
    (log,) = cluster.home.rglob("0.err")
    eventually(
        lambda: "event=key-refused at='worker w_1-0_1-0'" in log.read_text().replace('"', "'"), message="no line"
    )
    stranger.close()
    context.term()
    assert process.is_alive(pid)
    assert [job.stage for job in cluster.jobs] == ["RUNNING"]


class Namespace:
    """A host of its own: a network namespace whose loopback interface has an address that is not loopback."""

    def __init__(self, folder: Path) -> None:
        self.name = f"unified-key-{os.getpid()}"
        self.folder = folder
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("UNIFIED_", "XDG_"))}
        self.env |= {"UNIFIED_HOME": str(folder / "home"), "UNIFIED_RUN_DIR": str(folder / "run")}
        self.env |= {"XDG_CONFIG_HOME": str(folder / "config"), "UNIFIED_HEARTBEAT_S": "0.2"}
        self.daemons: list[subprocess.Popen[bytes]] = []

    def open(self) -> None:
        self._ip("netns", "add", self.name)
        self._ip("-n", self.name, "link", "set", "lo", "up")
        self._ip("-n", self.name, "address", "add", f"{ADDRESS}/32", "dev", "lo")

    def command(self, *words: str) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self.name}", sys.executable, *words]

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = self.command(*words)
        return subprocess.run(command, env=self.env | env, capture_output=True, text=True, timeout=100)

    def start(self, module: str, *flags: str, **env: str) -> Path:
        log = self.folder / f"{module}-{len(self.daemons)}.log"
        with log.open("wb") as stderr:
            command = self.command("-m", module, *flags)
            self.daemons.append(subprocess.Popen(command, env=self.env | env, stderr=stderr, start_new_session=True))
        return log

    def close(self) -> None:
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(100)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._ip("netns", "delete", self.name)

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)


@pytest.fixture
def namespace(tmp_path: Path) -> Iterator[Namespace]:
    space = Namespace(tmp_path)
    try:
        space.open()
        yield space
    finally:
        space.close()


@pytest.mark.netns
def test_nothing_listens_beyond_loopback_without_a_key(namespace: Namespace) -> None:
    refused = namespace.run("-m", "unified_master", "--bind", MASTER)
    assert refused.returncode == 2
    assert f"unified-master would listen on {MASTER}, which other hosts reach, without a cluster key" in refused.stderr
    log = namespace.start("unified_master", "--bind", MASTER, "--insecure")
    eventually(lambda: "event=master-ready" in log.read_text(), timeout=100)
    assert log.read_text().count("event=insecure") == 1
    agent = namespace.run("-m", "unified_agent", "--master", MASTER, "--node-id", "a")
    assert agent.returncode == 2
    assert f"a worker of unified-agent a would listen on {ADDRESS}" in agent.stderr
    open_agent = namespace.start("unified_agent", "--master", MASTER, "--node-id", "a", UNIFIED_INSECURE="1")
    eventually(lambda: "event=registered" in open_agent.read_text(), timeout=100)
    assert open_agent.read_text().count("event=insecure") == 1
    assert namespace.run("-m", "unified", "nodes", "--master", MASTER).returncode == 0


@pytest.mark.netns
@pytest.mark.parametrize("route", ["tcp", "relay"])
def test_beyond_loopback_with_a_key(namespace: Namespace, route: str) -> None:
    """The key is found where `unified key new` puts it, strangers are refused, and nothing goes in the clear."""
    assert namespace.run("-m", "unified", "key", "new").returncode == 0
    other = namespace.folder / "other.key"
    assert namespace.run("-m", "unified", "key", "new", str(other)).returncode == 0
    sniffer = subprocess.Popen(
        namespace.command(str(HERE / "sniffer.py"), MARKER, MARKER.upper(), PLAIN),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert sniffer.stdout is not None
    assert sniffer.stdout.readline() == "listening\n"
    master = namespace.start("unified_master", "--bind", MASTER)
    flags = ["--devices", "1", "--master", MASTER, "--node-id"]
    agents = [namespace.start("unified_agent", *flags, node, UNIFIED_BUS_ROUTE=route) for node in ("a", "b")]
    for agent in agents:
        eventually(lambda agent=agent: "event=registered" in agent.read_text(), timeout=100)  # type: ignore[misc]

    for key, said in (("", "wants a cluster key"), (str(other), "refused this side's cluster key SHA256:")):
        command = namespace.run("-m", "unified", "nodes", "--master", MASTER, UNIFIED_KEY_FILE=key)
        assert command.returncode == 1
        assert said in command.stderr
        agent_of_another = namespace.run("-m", "unified_agent", "--insecure", *flags, "c", UNIFIED_KEY_FILE=key)
        assert agent_of_another.returncode == os.EX_CONFIG, "nothing that a restart would mend"
        assert said in agent_of_another.stderr
    nodes = namespace.run("-m", "unified", "nodes", "--json", "--master", MASTER)
    assert {node["node"]: node["state"] for node in json.loads(nodes.stdout)} == {"a": "ALIVE", "b": "ALIVE"}

    job = namespace.run(str(HERE / "key_job.py"), UNIFIED_MASTER=MASTER)
    assert job.returncode == 0, job.stdout + job.stderr + master.read_text()
    assert f"stage RUNNING route {route}" in job.stdout

    talk = f"import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.sendto(b'{PLAIN}', ('127.0.0.1', 9))"
    assert namespace.run("-c", talk).returncode == 0
    heard, _ = sniffer.communicate(timeout=100)
    assert json.loads(heard)["seen"] == [PLAIN], "all else was encrypted"
    assert json.loads(heard)["packets"] > 200
    log = master.read_text()
    assert 1 <= log.count("event=key-refused at='control'") <= 5, "once for each way in which it was refused"
    assert "at='relay'" not in log
