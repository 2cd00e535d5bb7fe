"""A real master process on loopback, with agents and clients that are sockets of this test."""

import contextlib
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import zmq

from tests.support.deadlines import missed
from tests.support.full_disk import MountDisk
from tests.support.master_process import DEADLINE_MS, StartMaster
from tests.support.sim.sim_agent import Said, SimAgent, resources
from unified.errors import InvariantError, UnifiedError
from unified.job.spec import EntryPoint, JobSpec, RoleSpec
from unified.protocol.agent_master import DesiredWorkers, MasterStopping, MasterToAgent, master_to_agent
from unified.protocol.client_master import (
    Accepted,
    Changes,
    ClientToMaster,
    Done,
    Explain,
    GetJob,
    JobStatus,
    ListNodes,
    LogChunk,
    MasterToClient,
    NodeList,
    ReadLog,
    Refused,
    SignalWorkers,
    StopJob,
    Story,
    SubmitJob,
    WatchCluster,
    master_to_client,
)
from unified.protocol.framing import PROTOCOL_VERSION
from unified.protocol.records import NodeState, Stage, WorkerState
from unified.testing import eventually
from unified_master.core.master import MasterCore
from unified_master.daemon import MAX_DEFECTS, MasterDaemon, MasterOptions
from unified_master.store import Store

pytestmark = pytest.mark.processes

A = TypeVar("A")


class Peer:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.RECONNECT_IVL, 20)
        self.socket.connect(address)

    def frames(self) -> list[bytes]:
        assert self.socket.poll(DEADLINE_MS), "no answer"
        return self.socket.recv_multipart()

    def ask(self, request: ClientToMaster, request_id: int = 7) -> MasterToClient:
        self.socket.send_multipart(master_to_client.encode(request, request_id))
        found = master_to_client.decode(self.frames())
        assert found.request_id == request_id
        return found.message


class FakeAgent:
    def __init__(self, peer: Peer, node: str = "n1") -> None:
        self.agent = SimAgent(node, resources(devices=2))
        self.peer = peer
        self.heard: list[MasterToAgent] = []
        self._say(self.agent.begin(time.monotonic()))

    def until(self, is_true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_MS / 1000
        while not is_true():
            assert time.monotonic() < deadline, f"still not; heard {self.heard[-3:]}"
            due = self.agent.next_deadline
            wait_s = 0.05 if due is None else min(0.05, max(0.0, due - time.monotonic()))
            if self.peer.socket.poll(round(wait_s * 1000)):
                request_id, message = master_to_agent.decode(self.peer.socket.recv_multipart())
                self.heard.append(message)
                self._say(self.agent.receive(time.monotonic(), request_id, message))
            self._say(self.agent.tick(time.monotonic()))

    def status_after(self, client: Peer, request: ClientToMaster) -> MasterToClient:
        client.socket.send_multipart(master_to_client.encode(request, 9))
        self.until(lambda: bool(client.socket.poll(0)))
        return master_to_client.decode(client.socket.recv_multipart()).message

    def until_stage(self, client: Peer, job: str, stage: Stage) -> JobStatus:
        while True:
            found = self.status_after(client, GetJob(job=job))
            assert isinstance(found, JobStatus)
            if found.stage is stage:
                return found

    def _say(self, said: list[Said]) -> None:
        for request_id, message in said:
            self.peer.socket.send_multipart(master_to_agent.encode(message, request_id))


Connect = Callable[[str], Peer]


@pytest.fixture
def connect() -> Iterator[Connect]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peers: list[Peer] = []

    def _connect(address: str) -> Peer:
        peers.append(Peer(context, address))
        return peers[-1]

    yield _connect
    for peer in peers:
        peer.socket.close()
    context.term()


def spec(name: str = "train") -> JobSpec:
    entry = EntryPoint(kind="attribute", target="m", attribute="f")
    return JobSpec(name=name, roles=[RoleSpec(name="trainer", kind="elastic", entry_point=entry, total=2)])


def expect(answer: MasterToClient, kind: type[A]) -> A:
    assert isinstance(answer, kind), answer
    return answer


@pytest.mark.smoke
def test_a_job_runs_and_survives_a_killed_master(start_master: StartMaster, connect: Connect) -> None:
    master = start_master()
    agent = FakeAgent(connect(master.address))
    agent.until(lambda: any(isinstance(message, DesiredWorkers) for message in agent.heard))
    client = connect(master.address)
    assert expect(agent.status_after(client, SubmitJob(spec=spec())), Accepted).job_id.startswith("train-1-")
    running = agent.until_stage(client, "train", Stage.RUNNING)
    assert {(worker.name, worker.incarnation, worker.node) for worker in running.workers} == {
        ("trainer_2-0_1-0", 0, "n1"),
        ("trainer_2-1_1-0", 0, "n1"),
    }
    chunk = expect(agent.status_after(client, ReadLog(job="train", worker="trainer-1")), LogChunk)
    assert (chunk.data, chunk.is_final) == (b"trainer_2-1_1-0#0 says hello\n", False)

    address = master.address
    master.kill()
    generation = agent.agent.generation
    again = start_master(bind=address)
    assert again.address == address
    agent.heard.clear()
    agent.until(lambda: any(isinstance(message, DesiredWorkers) for message in agent.heard))
    assert agent.agent.generation > generation
    status = agent.until_stage(client, "train", Stage.RUNNING)
    assert [worker.incarnation for worker in status.workers] == [0, 0]
    for incarnation in list(agent.agent.incarnations):
        agent._say(agent.agent.finish(incarnation[0], incarnation[1]))
    done = agent.until_stage(client, "train", Stage.STOPPED)
    assert (done.exit_code, [worker.incarnation for worker in done.workers]) == (0, [0, 0])
    events = [event.event for event in expect(client.ask(Explain(job="train")), Story).events]
    assert events[:2] == ["job-submitted", "job-placed"]
    assert events[-1] == "job-stopped"
    at = expect(client.ask(Explain(job="train")), Story).events[0].at
    assert abs(at - time.time()) < 120
    assert expect(client.ask(StopJob(job="train")), Done).note


def test_a_lost_agent_is_seen(start_master: StartMaster, connect: Connect) -> None:
    master = start_master(lease_s=missed(1.0))
    agent = FakeAgent(connect(master.address))
    agent.until(lambda: any(isinstance(message, DesiredWorkers) for message in agent.heard))
    client = connect(master.address)
    agent.peer.socket.close()
    eventually(lambda: expect(client.ask(ListNodes()), NodeList).nodes[0].state is NodeState.LOST)


def test_another_protocol_version_is_answered_in_that_version(start_master: StartMaster, connect: Connect) -> None:
    master = start_master()
    client = connect(master.address)
    client.socket.send_multipart(master_to_client.encode(ListNodes(), 5, version=PROTOCOL_VERSION + 1))
    header, body = client.frames()
    assert msgspec.msgpack.decode(header) == [PROTOCOL_VERSION + 1, 5]
    refused = master_to_client.decode_body(body)
    assert isinstance(refused, Refused)
    assert refused.code == "version"
    assert f"version {PROTOCOL_VERSION + 1}" in refused.reason


def test_rubbish_is_refused_and_survived(start_master: StartMaster, connect: Connect) -> None:
    master = start_master()
    address = master.address
    client = connect(address)
    header = master_to_client.encode(ListNodes(), 3)[0]
    for frames in ([b""], [b"x"] * 5, [header, b"\xc1"], [header, b"\x81\xa4type\xa3wat"], [b"\xff" * 100, b""]):
        client.socket.send_multipart(frames)
        refused = master_to_client.decode_body(client.frames()[1])
        assert isinstance(refused, Refused), frames
        assert refused.code == "bad-request"
    host, port = address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(1000))
    assert expect(client.ask(ListNodes()), NodeList).nodes == []
    assert "event=message-refused" in master.log.read_text()


def test_a_taken_port_is_named(start_master: StartMaster, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        master = start_master(bind=f"tcp://127.0.0.1:{port}")
        assert master.process.wait(100) == 1
    said = master.log.read_text().splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"unified-master: port {port} is taken")


def test_a_state_that_no_start_can_read_has_an_exit_code_of_its_own(start_master: StartMaster, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    with contextlib.closing(sqlite3.connect(tmp_path / "state/master.sqlite")) as database:
        database.execute("pragma user_version = 99")
    master = start_master()
    assert master.process.wait(100) == os.EX_CONFIG
    assert "has schema version 99" in master.log.read_text()


def drop_a_table(database: sqlite3.Connection) -> None:
    database.execute("drop table events")


def write_junk(kind: str) -> Callable[[sqlite3.Connection], None]:
    def write(database: sqlite3.Connection) -> None:
        database.execute("replace into records values (?, 'x', x'c1c1')", (kind,))

    return write


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (drop_a_table, "is damaged (it has no table events)"),
        (write_junk("job"), "a record of the store cannot be read"),
        (write_junk("node"), "a record of the store cannot be read"),
        (write_junk("coordinator-barrier"), "cannot be read"),
    ],
    ids=["a table", "a job", "a node", "the coordinator"],
)
def test_damage_in_a_file_that_sqlite_can_read_is_one_sentence_that_names_the_file(
    start_master: StartMaster, tmp_path: Path, damage: Callable[[sqlite3.Connection], None], told: str
) -> None:
    Store(tmp_path / "state").close()
    with contextlib.closing(sqlite3.connect(tmp_path / "state/master.sqlite", isolation_level=None)) as database:
        damage(database)
    master = start_master()
    assert master.process.wait(100) == os.EX_CONFIG
    said = master.log.read_text()
    assert f"unified-master: {tmp_path / 'state/master.sqlite'}" in said
    assert told in said
    assert "Traceback" not in said


@pytest.mark.skipif(os.getuid() != 0, reason="only root may run a program as another user")
def test_a_file_that_belongs_to_another_user_is_told_and_not_tried_again(tmp_path: Path) -> None:
    state = Path(tempfile.mkdtemp(prefix="unified-test-", dir="/tmp"))
    try:
        Store(state).close()
        for path in (state, state / "lock", state / "master.sqlite-commits"):
            os.chown(path, 65534, 65534)
        code = "import os, pathlib; from unified_master.store import Store; os.setuid(65534); "
        code += f"Store(pathlib.Path({str(state)!r}))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    finally:
        shutil.rmtree(state)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("unified_master.store.OtherStoreError: ")
    assert "may not be written by this user" in last


def test_a_state_directory_in_use_is_named(start_master: StartMaster) -> None:
    first = start_master()
    assert first.address
    second = start_master()
    assert second.process.wait(100) == 1
    assert f"in use by another master (pid {first.process.pid})" in second.log.read_text()


def test_sigterm_ends_it_cleanly(start_master: StartMaster, connect: Connect) -> None:
    master = start_master()
    client = connect(master.address)
    assert expect(client.ask(ListNodes()), NodeList).nodes == []
    master.process.send_signal(signal.SIGTERM)
    assert master.process.wait(100) == 0
    log = master.log.read_text()
    assert "event=master-stopped" in log
    (relay,) = re.findall(r"relay=(tcp://\S+)", log)
    again = start_master()
    assert again.address
    both = re.findall(r"relay=(tcp://\S+)", again.log.read_text())
    assert both == [relay, relay], "workers that lived on know no other relay"


def test_sigterm_ends_it_when_its_agents_know(start_master: StartMaster, connect: Connect) -> None:
    master = start_master()
    agents = [FakeAgent(connect(master.address), node) for node in ("n1", "n2")]
    for agent in agents:
        agent.until(lambda: any(isinstance(message, DesiredWorkers) for message in agent.heard))  # noqa: B023
    master.process.send_signal(signal.SIGTERM)
    for agent in agents:  # one after the other: the second is told although the first has answered
        agent.until(lambda: any(isinstance(message, MasterStopping) for message in agent.heard))  # noqa: B023
    assert master.process.wait(100) == 0


def test_a_wildcard_address_is_advertised_as_one_that_can_be_reached(
    start_master: StartMaster, connect: Connect
) -> None:
    master = start_master("--insecure", bind="tcp://0.0.0.0:0")
    assert "0.0.0.0" not in master.address
    assert expect(connect(master.address).ask(ListNodes()), NodeList).nodes == []
    assert master.log.read_text().count("event=insecure") == 1


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--bind", "http://x"], "is not an address"),
        (["--bind", "tcp://127.0.0.1:99999"], "is not an address"),
        (["--insecure", "--bind", "tcp://203.0.113.7:0"], "cannot listen on"),
        (["--insecure", "--bind", "tcp://nohost:0"], "nohost is no address, name or network interface of this host"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_bad_flags_are_refused(flags: list[str], text: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "unified_master", "--state-dir", str(tmp_path), *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode != 0
    assert text in ended.stderr
    assert "Traceback" not in ended.stderr
    assert len(ended.stderr.splitlines()) < 10


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    address_file = tmp_path / "address"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-m', 'unified_master', *sys.argv[1:]])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    flags = ["--bind", "tcp://127.0.0.1:0", "--state-dir", str(tmp_path), "--address-file", str(address_file)]
    command = [sys.executable, "-c", code, *flags, "--die-with-parent", "--log-level", "error"]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    try:
        deadline = time.monotonic() + 15
        while not address_file.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)  # a file that another process writes
        parent.kill()
        parent.wait()
        poller = zmq.Poller()
        poller.register(child, zmq.POLLIN)
        assert poller.poll(5000), "the master outlived its parent"
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        os.close(child)


def test_a_defect_is_answered_and_the_core_rebuilt_from_the_store(
    tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = MasterDaemon(MasterOptions(bind="tcp://127.0.0.1:0", state_dir=tmp_path))
    store = Store(tmp_path)
    router = daemon._bind()
    client = connect(router.get_string(zmq.LAST_ENDPOINT))

    def ask(core: MasterCore, request: ClientToMaster) -> tuple[MasterCore, MasterToClient]:
        client.socket.send_multipart(master_to_client.encode(request, 4))
        assert router.poll(DEADLINE_MS)
        core = daemon._handle(core, daemon._take_in(router), router, store)
        return core, master_to_client.decode(client.frames()).message

    def broken(*_: object) -> None:
        raise InvariantError("a defect")

    core, _ = ask(daemon._begin_term(store, ""), SubmitJob(spec=spec()))
    with monkeypatch.context() as patch:
        patch.setattr(MasterCore, "step", broken)
        rebuilt, answer = ask(core, GetJob(job="train"))
    assert expect(answer, Refused).code == "defect"
    assert rebuilt is not core
    assert expect(ask(rebuilt, GetJob(job="train"))[1], JobStatus).job_id.startswith("train-1-")
    monkeypatch.setattr(MasterCore, "step", broken)
    for _ in range(MAX_DEFECTS - 1):
        rebuilt, _ = ask(rebuilt, GetJob(job="train"))
    with pytest.raises(UnifiedError, match="defects within"):
        ask(rebuilt, GetJob(job="train"))
    router.close()
    daemon._context.term()
    store.close()


# A full disk


def watch_after(version: int) -> WatchCluster:
    return WatchCluster(job="train", after_version=version, wait_s=100.0)


def test_with_a_full_disk_it_ends_when_it_is_asked_to(
    tmp_path: Path, small_disk: MountDisk, start_master: StartMaster, connect: Connect
) -> None:
    disk = small_disk(tmp_path / "state")
    master = start_master()
    agent, client = FakeAgent(connect(master.address)), connect(master.address)
    agent.until(lambda: bool(agent.heard))
    expect(agent.status_after(client, SubmitJob(spec=spec())), Accepted)
    agent.until_stage(client, "train", Stage.RUNNING)
    version = expect(agent.status_after(client, WatchCluster(job="train")), Changes).version
    disk.fill()
    for job_id, worker, _ in list(agent.agent.incarnations):
        agent._say(agent.agent.finish(job_id, worker))
    while not expect(agent.status_after(client, watch_after(version)), Changes).problem:
        pass
    master.process.terminate()
    assert master.process.wait(100) == 1
    last = master.log.read_text().splitlines()[-1]
    assert last.startswith(f"unified-master: {tmp_path}/state/master.sqlite cannot be written: "), last


def test_with_a_full_disk_it_stays_refuses_and_goes_on_when_there_is_room(
    tmp_path: Path, small_disk: MountDisk, start_master: StartMaster, connect: Connect
) -> None:
    disk = small_disk(tmp_path / "state")
    master = start_master(lease_s=3.0)
    agent, client = FakeAgent(connect(master.address)), connect(master.address)
    agent.until(lambda: bool(agent.heard))
    expect(agent.status_after(client, SubmitJob(spec=spec())), Accepted)
    while any(
        worker.state is not WorkerState.RUNNING for worker in agent.until_stage(client, "train", Stage.RUNNING).workers
    ):
        pass  # the agent has yet to take their orders
    known = expect(agent.status_after(client, WatchCluster(job="train")), Changes)
    disk.fill()

    refused = expect(agent.status_after(client, SubmitJob(spec=spec("second"))), Refused)
    assert refused.code == "unavailable"
    assert "the master can record nothing: the disk of its state is full: " in refused.reason
    for job_id, worker, _ in list(agent.agent.incarnations):
        agent._say(agent.agent.finish(job_id, worker))
    until = time.monotonic() + 6.0
    agent.until(lambda: time.monotonic() > until)  # its heartbeats are answered
    nodes = expect(agent.status_after(client, ListNodes()), NodeList)
    assert [node.state for node in nodes.nodes] == [NodeState.ALIVE]
    expect(agent.status_after(client, GetJob(job="train")), JobStatus)
    told = expect(agent.status_after(client, watch_after(known.version)), Changes)
    assert f"{tmp_path}/state/master.sqlite cannot be written: database or disk is full. Make room" in told.problem
    assert not told.jobs, "what is not recorded may yet be lost"
    expect(agent.status_after(client, StopJob(job="train")), Refused)
    expect(agent.status_after(client, SignalWorkers(job="train", signal=signal.SIGUSR1)), Done)  # to have them save
    assert master.process.poll() is None

    disk.make_room()
    agent.until_stage(client, "train", Stage.STOPPED)
    expect(agent.status_after(client, SubmitJob(spec=spec("third"))), Accepted)
    agent.until_stage(client, "third", Stage.RUNNING)
    log = master.log.read_text()
    assert "event=state-not-written" in log
    assert "event=state-written reason='there is room again'" in log
