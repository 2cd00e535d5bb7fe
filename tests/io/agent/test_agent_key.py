"""A real agent and the cluster key: who its master is, what its workers get, and what it does when the keys differ."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.agents import AgentProcess, PlayedMaster, a_job, a_worker, eventually, read_log
from tests.support.deadlines import missed
from unified import process
from unified.protocol.agent_master import AgentRegistered, HeartbeatSeen, ObservedWorkers, RegisterAgent
from unified.protocol.client_master import Refused
from unified.protocol.framing import PROTOCOL_VERSION
from unified.protocol.records import WorkerState
from unified.security.curve import new_key
from unified.security.keys import ClusterKey, write_key

pytestmark = pytest.mark.processes

KEY, OTHER = new_key(), new_key()
Start = Callable[..., AgentProcess]
Play = Callable[[ClusterKey | None], PlayedMaster]


@pytest.fixture
def play() -> Iterator[Play]:
    masters: list[PlayedMaster] = []

    def run(key: ClusterKey | None) -> PlayedMaster:
        masters.append(PlayedMaster(key))
        return masters[-1]

    yield run
    for master in masters:
        master.hang_up()


@pytest.fixture
def start(tmp_path: Path, agents: list[AgentProcess], monkeypatch: pytest.MonkeyPatch) -> Start:
    def run(master: PlayedMaster, key: ClusterKey | None, *flags: str) -> AgentProcess:
        if key is not None:
            path = tmp_path / f"key-{len(agents)}"
            write_key(path, key)
            monkeypatch.setenv("UNIFIED_KEY_FILE", str(path))
        agents.append(AgentProcess(tmp_path, master.address, *flags))
        return agents[-1]

    return run


@pytest.mark.smoke
def test_a_worker_gets_the_key_in_its_first_message_and_nowhere_else(start: Start, play: Play, tmp_path: Path) -> None:
    master = play(KEY)
    agent = start(master, KEY)
    master.welcome()
    master.desire(a_worker(), jobs=[a_job("key")])
    worker = master.reaches("w-0#0", WorkerState.RUNNING)
    printed = f"ClusterKey({KEY.fingerprint})\n".encode()
    assert eventually(lambda: read_log(master, "out").data == printed)
    for pid in (worker.pid, agent.process.pid, *agent.descendants()):
        for where in ("environ", "cmdline"):
            assert KEY.secret.encode() not in content(Path(f"/proc/{pid}/{where}"))
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith("key-")]
    assert files
    assert not [path for path in files if KEY.secret.encode() in content(path)]


def content(path: Path) -> bytes:
    """What is in a file; nothing if it was there a moment ago."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@pytest.mark.parametrize(
    ("masters", "own", "reason"),
    [
        (KEY, OTHER, "refused this side's cluster key SHA256:"),
        (KEY, None, "wants a cluster key: set UNIFIED_KEY_FILE to a copy of its key file"),
        (None, KEY, "cluster key"),
    ],
    ids=["another key", "no key", "a master without one"],
)
def test_an_agent_whose_key_is_not_its_masters_ends_with_one_line(
    start: Start, play: Play, masters: ClusterKey | None, own: ClusterKey | None, reason: str
) -> None:
    agent = start(play(masters), own)
    assert agent.wait() == os.EX_CONFIG
    last = agent.stderr.splitlines()[-1]
    assert last.startswith("unified-agent: the master at tcp://127.0.0.1:")
    assert reason in last


def test_a_member_keeps_its_workers_while_its_master_has_another_key(start: Start, play: Play) -> None:
    master = play(KEY)
    agent = start(master, KEY)
    master.welcome()
    master.desire(a_worker(), jobs=[a_job("finish")])
    pid = master.reaches("w-0#0", WorkerState.FINISHED).pid
    master.hang_up()
    master.key = OTHER
    master.listen()
    assert eventually(lambda: "event=key-refused" in agent.stderr), agent.stderr
    assert process.is_alive(pid)
    master.hang_up()
    master.key = KEY
    master.listen()
    master.hear(ObservedWorkers, lambda message: [worker.pid for worker in message.workers] == [pid])
    assert agent.stderr.count("event=key-refused") == 1


def test_a_member_bears_frames_of_another_version(start: Start, play: Play) -> None:
    master = play(None)
    agent = start(master, None)
    master.welcome()
    master.desire(a_worker(), jobs=[a_job("finish")])
    pid = master.reaches("w-0#0", WorkerState.FINISHED).pid
    for _ in range(3):
        master.say(HeartbeatSeen(), version=PROTOCOL_VERSION + 1)
        master.say(AgentRegistered(lease_s=20.0, heartbeat_s=0.1), version=PROTOCOL_VERSION + 1)
        master.say(Refused(code="version", reason="speak version 2."))
    assert eventually(lambda: agent.stderr.count("event=master-unreadable") >= 2)
    master.generation += 1
    master.desire(jobs=[])
    ended = master.reaches("w-0#0", WorkerState.EXITED)
    assert (ended.pid, ended.failure) == (pid, None)
    assert agent.stderr.count("event=master-unreadable") == 2, "one line for each thing that it cannot read"


def test_workers_may_not_listen_beyond_loopback_without_a_key(start: Start, play: Play) -> None:
    """Nobody listens in this test: the agent says no before it starts any worker, and the other has none to start."""
    master = play(None)
    refused = start(master, None, "--address", "10.1.2.3")
    assert refused.wait() == 2
    (line,) = refused.stderr.splitlines()
    assert "a worker of unified-agent n1 would listen on 10.1.2.3" in line
    assert "`unified key new`" in line
    insecure = start(master, None, "--address", "10.1.2.3", "--insecure")
    assert master.hear(RegisterAgent).address == "10.1.2.3"
    assert insecure.stderr.count("event=insecure") == 1
    insecure.process.send_signal(signal.SIGTERM)
    assert insecure.wait() == 0


def test_a_key_comes_through_stdin_whose_end_has_the_agent_leave_in_order(
    agents: list[AgentProcess], play: Play, tmp_path: Path
) -> None:
    """As SLURM has it: srun copies its stdin to every task, and the key is in no file, environment or command line."""
    master = play(KEY)
    flags = ("--key-fd", "0", "--leave-at-eof", "0")
    agents.append(agent := AgentProcess(tmp_path, master.address, *flags, stdin=subprocess.PIPE))
    write_key(tmp_path / "key", KEY)
    stdin = agent.process.stdin
    assert stdin is not None
    stdin.write((tmp_path / "key").read_bytes())
    stdin.flush()
    master.welcome()
    master.desire(a_worker(), jobs=[a_job("key")])
    worker = master.reaches("w-0#0", WorkerState.RUNNING)
    stdin.close()
    assert agent.wait() == 0
    assert "the process that started it has closed its input" in agent.stderr
    assert not process.is_alive(worker.pid)


def test_a_second_sigterm_right_behind_the_first_takes_no_grace_away(
    agents: list[AgentProcess], play: Play, tmp_path: Path
) -> None:
    """SLURM sends it for a step, and then for its job."""
    master = play(None)
    agents.append(agent := AgentProcess(tmp_path, master.address))
    master.welcome()
    master.desire(a_worker(), jobs=[a_job("stubborn", grace_s=missed(0.5))])
    master.reaches("w-0#0", WorkerState.RUNNING)
    began = time.monotonic()
    agent.process.send_signal(signal.SIGTERM)
    time.sleep(0.02)
    agent.process.send_signal(signal.SIGTERM)
    took_s = time.monotonic() - began
    assert agent.wait() == 0
    assert "kill deadline passed" in agent.stderr or took_s > 0.4, "else this process was held up"
