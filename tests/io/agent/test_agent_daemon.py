"""A real agent process, with its zygote and workers, against a master that the test plays."""

import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.support.agents import ROOT, STORE, AgentProcess, PlayedMaster, a_job, a_worker, eventually, read_log
from unified import process
from unified.protocol.agent_master import (
    AgentHeartbeat,
    AgentLeaving,
    AgentRefused,
    AgentRegistered,
    AgentToMaster,
    DirectoryChanged,
    HeartbeatSeen,
    ObservedWorkers,
    RegisterAgain,
    RegisterAgent,
)
from unified.protocol.client_master import Refused
from unified.protocol.records import DirectoryEntry, Reachability, WorkerState


@pytest.fixture
def master() -> Iterator[PlayedMaster]:
    one = PlayedMaster()
    yield one
    one.close()


Start = Callable[..., AgentProcess]


@pytest.fixture
def start(tmp_path: Path, master: PlayedMaster) -> Iterator[Start]:
    agents: list[AgentProcess] = []

    def run(*flags: str, **options: str) -> AgentProcess:
        agents.append(AgentProcess(tmp_path, options.pop("master", master.address), *flags, **options))
        return agents[-1]

    yield run
    for agent in agents:
        if agent.process.poll() is None:
            agent.process.terminate()
            agent.wait()
    assert not agents or eventually(lambda: not agents[0].descendants()), "an agent left processes behind"
    left = [path for path in (tmp_path / "run").rglob("*") if path.is_file()] if (tmp_path / "run").exists() else []
    assert not left or any(agent.process.returncode == -signal.SIGKILL for agent in agents)


def test_it_registers_with_what_the_node_has(start: Start, master: PlayedMaster) -> None:
    start(
        "--devices", "2", "--labels", "zone=a,rack=3", "--resources", '{"MR": 1}', "--cpus", "3", "--memory-mb", "512"
    )
    registered = master.welcome()
    assert (registered.node, registered.address, registered.labels) == ("n1", "127.0.0.1", {"zone": "a", "rack": "3"})
    assert [device.kind for device in registered.resources.devices] == ["virtual", "virtual"]
    assert (registered.resources.cpu, registered.resources.memory_mb) == (3.0, 512.0)
    assert registered.resources.user_defined == {"MR": 1.0}
    master.hear(AgentHeartbeat)


def test_a_worker_lives_from_start_to_stop(start: Start, master: PlayedMaster) -> None:
    agent = start()
    master.welcome()
    job = a_job("finish")
    master.desire(a_worker(is_told_to_run=False), STORE, jobs=[job])
    both = master.observe(lambda lives: [life.state for life in lives.values()] == [WorkerState.READY] * 2)
    ready = both["w-0#0"]
    assert ready.inbox is not None
    assert ready.inbox.inbox_id == f"inbox-{ready.pid}"
    assert process.is_alive(ready.pid)
    assert both["store#0"].store_port == 4242
    master.desire(a_worker(), STORE, jobs=[job])
    finished = master.reaches("w-0#0", WorkerState.FINISHED)
    assert finished.round == 1
    assert finished.progress is not None
    assert process.is_alive(ready.pid)
    assert read_log(master, "out").data == b"hello from the worker\n"
    entry = DirectoryEntry(worker="w-1", incarnation=0, state=Reachability.DEAD)
    master.say(DirectoryChanged(job_id="job-1", entries=[entry]))
    assert eventually(lambda: b"news w-1=dead" in read_log(master, "out").data)
    master.desire(jobs=[])
    ended = master.observe(lambda lives: [life.state for life in lives.values()] == [WorkerState.EXITED] * 2)
    assert ended["w-0#0"].failure is None
    assert not process.is_alive(ready.pid)
    master.desire(jobs=[])
    assert master.hear(ObservedWorkers, lambda message: message.generation == 4).workers == []
    assert agent.process.poll() is None


@pytest.mark.parametrize(
    ("mode", "summary", "category", "traceback"),
    [
        ("exit:3", "exited with code 3", "crash", "this is the end"),
        ("kill", "killed by SIGKILL", "crash", ""),
        ("fail", "ValueError: no", "user", ""),
    ],
)
def test_how_a_life_ended_is_told(
    start: Start, master: PlayedMaster, mode: str, summary: str, category: str, traceback: str
) -> None:
    start()
    master.welcome()
    master.desire(a_worker(), jobs=[a_job(mode)])
    failure = master.reaches("w-0#0", WorkerState.EXITED).failure
    assert failure is not None
    assert (failure.summary, failure.category, failure.traceback) == (summary, category, traceback)


def test_a_worker_that_ends_itself_with_code_0_ended_well(start: Start, master: PlayedMaster) -> None:
    start()
    master.welcome()
    master.desire(a_worker(), jobs=[a_job("exit:0")])
    assert master.reaches("w-0#0", WorkerState.EXITED).failure is None


def test_the_next_life_starts_when_the_last_is_gone(start: Start, master: PlayedMaster) -> None:
    start()
    master.welcome()
    job = a_job("stubborn", grace_s=0.3)
    master.desire(a_worker(), jobs=[job])
    old = master.reaches("w-0#0", WorkerState.RUNNING)
    master.desire(a_worker(incarnation=1), jobs=[job])
    workers = master.observe(lambda workers: "w-0#1" in workers)
    assert workers["w-0#0"].state is WorkerState.EXITED
    assert not process.is_alive(old.pid)
    master.reaches("w-0#1", WorkerState.RUNNING)


def test_force_shortens_a_stop_that_has_begun(start: Start, master: PlayedMaster) -> None:
    start()
    master.welcome()
    job = a_job("stubborn", grace_s=60.0)
    master.desire(a_worker(), jobs=[job])
    master.reaches("w-0#0", WorkerState.RUNNING)
    master.desire(jobs=[job])
    master.reaches("w-0#0", WorkerState.STOPPING)
    master.desire(jobs=[msgspec.structs.replace(job, stop_grace_s=0.0)])
    assert master.reaches("w-0#0", WorkerState.EXITED).failure is None


def test_spawned_workers_and_their_children_are_ended_too(start: Start, master: PlayedMaster) -> None:
    agent = start()
    master.welcome()
    master.desire(a_worker(), jobs=[a_job("children", start_method="spawn")])
    worker = master.reaches("w-0#0", WorkerState.FINISHED)
    command = Path(f"/proc/{worker.pid}/cmdline").read_bytes().split(b"\0")
    assert command[1:3] == [b"-m", b"agent_entry"]
    assert len(agent.descendants()) == 4
    master.desire(jobs=[])
    master.reaches("w-0#0", WorkerState.EXITED)
    assert eventually(lambda: len(agent.descendants()) == 1)


def test_another_interpreter_has_a_zygote_while_its_job_lives(
    start: Start, master: PlayedMaster, tmp_path: Path
) -> None:
    python = tmp_path / "python-other"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    agent = start()
    master.welcome()
    master.desire(a_worker(), jobs=[a_job("finish", python=str(python))])
    master.reaches("w-0#0", WorkerState.FINISHED)
    assert len(agent.descendants()) == 3
    master.desire(jobs=[])
    assert eventually(lambda: len(agent.descendants()) == 1)


def test_an_interpreter_with_another_protocol_is_a_failure_of_setup_each_time(
    start: Start, master: PlayedMaster, tmp_path: Path
) -> None:
    python = tmp_path / "python-old"
    python.write_text(OLD_PYTHON)
    python.chmod(0o755)
    agent = start()
    master.welcome()
    for incarnation in range(2):
        master.desire(a_worker(incarnation=incarnation), jobs=[a_job("finish", python=str(python))])
        failure = master.reaches(f"w-0#{incarnation}", WorkerState.EXITED).failure
        assert failure is not None
        assert failure.category == "setup"
        assert "its unified speaks protocol version 99, the agent 1; install the same release." in failure.summary
    assert eventually(lambda: len(agent.descendants()) == 1), "its zygote is sent away"


OLD_PYTHON = f"""#!{sys.executable}
import os, socket, sys
sys.path.insert(0, {str(ROOT)!r})
from unified.protocol.agent_zygote import ZygoteUp
from unified.protocol.framing import encode_stream
control = socket.socket(fileno=int(sys.argv[3]))
control.sendall(encode_stream(ZygoteUp(pid=os.getpid(), has_torch=False, protocol_version=99)))
control.recv(1)
"""
BROKEN_PYTHON = "#!/bin/sh\necho \"$0: No module named 'unified'\" >&2; exit 1\n"


@pytest.mark.parametrize(
    ("script", "summary"),
    [
        (BROKEN_PYTHON, "No module named 'unified'.*Install it there: .*python-bad -m pip install unified-runtime"),
        (None, "the interpreter .*python-bad cannot be started: No such file or directory"),
        ("\0", "the interpreter .*python-bad\0 cannot be started: embedded null byte"),
    ],
)
def test_an_interpreter_without_unified_is_a_failure_of_setup(
    start: Start, master: PlayedMaster, tmp_path: Path, script: str | None, summary: str
) -> None:
    python = str(tmp_path / "python-bad")
    if script == "\0":
        python += script
    elif script is not None:
        Path(python).write_text(script)
        Path(python).chmod(0o755)
    start()
    master.welcome()
    master.desire(a_worker(), jobs=[a_job("finish", python=python)])
    failure = master.reaches("w-0#0", WorkerState.EXITED).failure
    assert failure is not None
    assert failure.category == "setup"
    assert re.search(summary, failure.summary)


def test_a_worker_that_says_nothing_is_killed(
    start: Start, master: PlayedMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIFIED_START_S", "0.5")
    start()
    master.welcome()
    master.desire(a_worker(), jobs=[a_job("silent")])
    failure = master.reaches("w-0#0", WorkerState.EXITED).failure
    assert failure is not None
    assert failure.summary == "did not answer within 0.5 s of its start"


def test_much_output_is_rotated_and_read_by_absolute_offset(start: Start, master: PlayedMaster, tmp_path: Path) -> None:
    start("--log-max-mb", "0.25", "--log-files", "3")
    master.welcome()
    master.desire(a_worker(), jobs=[a_job("print:2048")])
    master.reaches("w-0#0", WorkerState.FINISHED)
    assert eventually(lambda: read_log(master, "out", -1).size == 2048 * 1024)
    first = read_log(master, "out", 0)
    assert first.offset == 2048 * 1024 - 3 * 262144
    assert first.next_offset == first.offset + len(first.data) == first.offset + 65536
    folder = tmp_path / "state/logs/job-1/w-0"
    assert sum(file.stat().st_size for file in folder.glob("0.out*")) < 3 * 262144 + 100
    assert "is no worker" in read_log(master, "out", worker="../w-0").error


def test_a_killed_agent_leaves_nothing(start: Start, master: PlayedMaster) -> None:
    agent = start()
    master.welcome()
    job = a_job("children")
    master.desire(a_worker(0), a_worker(1), jobs=[job])
    master.observe(lambda workers: [w.state for w in workers.values()] == [WorkerState.FINISHED] * 2)
    assert len(agent.descendants()) == 7
    agent.process.kill()
    assert eventually(lambda: not agent.descendants(), within_s=2.0)
    agent.wait()
    again = start()
    master.welcome()
    assert "the last agent of this node" in again.stderr
    assert len(list(again.run_root.glob("a-*"))) == 1


def test_a_killed_zygote_takes_its_workers_and_is_replaced(start: Start, master: PlayedMaster) -> None:
    agent = start()
    master.welcome()
    job = a_job("stubborn", grace_s=0.2)
    master.desire(a_worker(0), a_worker(1), jobs=[job])
    workers = master.observe(lambda workers: [w.state for w in workers.values()] == [WorkerState.RUNNING] * 2)
    (zygote,) = {found.parent for pid in workers.values() if (found := process.facts(pid.pid)) is not None}
    assert zygote in agent.descendants()
    os.kill(zygote, signal.SIGKILL)
    workers = master.observe(lambda workers: [w.state for w in workers.values()] == [WorkerState.EXITED] * 2)
    assert {worker.failure.summary for worker in workers.values() if worker.failure} == {"killed by SIGKILL"}
    master.desire(a_worker(0, incarnation=1), jobs=[job])
    master.reaches("w-0#1", WorkerState.RUNNING)


def test_what_workers_of_a_killed_zygote_left_is_ended(start: Start, master: PlayedMaster) -> None:
    agent = start()
    master.welcome()
    job = a_job("children")
    master.desire(a_worker(0), a_worker(1), jobs=[job])
    workers = master.observe(lambda workers: [w.state for w in workers.values()] == [WorkerState.FINISHED] * 2)
    inboxes = [agent.inbox_file(worker) for worker in workers.values()]
    assert all(inbox.exists() for inbox in inboxes)
    found = process.facts(workers["w-0#0"].pid)
    assert found is not None
    os.kill(found.parent, signal.SIGKILL)
    master.observe(lambda workers: [w.state for w in workers.values()] == [WorkerState.EXITED] * 2)
    assert eventually(lambda: not agent.descendants()), "children in sessions of their own outlived it"
    assert not any(inbox.exists() for inbox in inboxes)
    master.desire(a_worker(0, incarnation=1), jobs=[job])
    master.reaches("w-0#1", WorkerState.FINISHED)


def test_an_agent_without_descriptors_fails_a_worker_and_lives(start: Start, master: PlayedMaster) -> None:
    agent = start()
    master.welcome()
    job = a_job("finish")
    master.desire(a_worker(), jobs=[job])
    master.reaches("w-0#0", WorkerState.FINISHED)
    before = agent.allow_no_more_descriptors()
    master.desire(a_worker(), a_worker(1), jobs=[job])
    failure = master.reaches("w-1#0", WorkerState.EXITED).failure
    assert failure is not None
    assert (failure.summary, failure.category) == ("could not be started: Too many open files", "crash")
    resource.prlimit(agent.process.pid, resource.RLIMIT_NOFILE, before)
    master.desire(a_worker(), a_worker(1, incarnation=1), jobs=[job])
    master.reaches("w-1#1", WorkerState.FINISHED)


def test_a_second_agent_of_one_node_is_refused(start: Start, master: PlayedMaster) -> None:
    first = start()
    master.welcome()
    second = start()
    assert second.wait() == 1
    assert f"already runs on this host as pid {first.process.pid}" in second.stderr


def test_sigterm_stops_workers_and_says_goodbye(start: Start, master: PlayedMaster, tmp_path: Path) -> None:
    agent = start()
    master.welcome()
    master.desire(a_worker(), jobs=[a_job("finish")])
    worker = master.reaches("w-0#0", WorkerState.FINISHED)
    agent.process.terminate()
    leaving = master.hear(AgentLeaving)
    assert leaving.reason == "SIGTERM"
    assert not process.is_alive(worker.pid)
    assert agent.wait() == 0
    assert not list((tmp_path / "run").rglob("*.lock"))


def test_a_second_sigterm_waits_for_nobody(start: Start, master: PlayedMaster) -> None:
    agent = start()
    master.welcome()
    master.desire(a_worker(), jobs=[a_job("stubborn", grace_s=60.0)])
    master.reaches("w-0#0", WorkerState.RUNNING)
    agent.process.terminate()
    master.reaches("w-0#0", WorkerState.STOPPING)
    agent.process.terminate()
    assert agent.wait() == 0


def test_it_ends_with_its_parent_if_asked_to(master: PlayedMaster, tmp_path: Path) -> None:
    script = (
        "import signal, sys; from pathlib import Path\n"
        f"sys.path.insert(0, {str(ROOT)!r}); import tests.support.agents as t\n"
        f"agent = t.AgentProcess(Path({str(tmp_path)!r}), {master.address!r}, '--die-with-parent')\n"
        "print(agent.process.pid, flush=True); signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        agent = int(parent.stdout.readline())
        master.welcome()
        master.desire(a_worker(), jobs=[a_job("stubborn", grace_s=60.0)])
        worker = master.reaches("w-0#0", WorkerState.RUNNING)
        parent.kill()
        assert master.hear(AgentLeaving).reason == "the process that started it is gone"
        assert eventually(lambda: not process.is_alive(agent) and not process.is_alive(worker.pid))
    assert not list((tmp_path / "run").rglob("*.lock"))


def test_workers_outlive_a_master_and_are_told_to_the_next(start: Start, master: PlayedMaster) -> None:
    start()
    master.welcome()
    job = a_job("finish")
    master.desire(a_worker(), jobs=[job])
    pid = master.reaches("w-0#0", WorkerState.FINISHED).pid
    master.hang_up()
    master.listen()
    master.hear(AgentHeartbeat)
    master.say(RegisterAgain())
    master.hear(RegisterAgent)
    master.say(AgentRegistered(lease_s=2.0, heartbeat_s=0.1))
    seen = master.observe(lambda workers: bool(workers))["w-0#0"]
    assert (seen.state, seen.pid) == (WorkerState.FINISHED, pid)
    master.generation = 0  # a master that lost its memory begins anew, and is listened to
    master.desire(jobs=[])
    master.reaches("w-0#0", WorkerState.EXITED)


@pytest.mark.parametrize(
    ("answer", "version", "reason"),
    [
        (AgentRefused(reason="node n1 is alive on another host"), 1, "node n1 is alive on another host"),
        (Refused(code="version", reason="speak version 2"), 1, "refuses this agent: speak version 2"),
        (HeartbeatSeen(), 2, "the peer speaks protocol version 2, this side speaks 1"),
    ],
)
def test_a_refusal_ends_it_with_one_line(
    start: Start, master: PlayedMaster, answer: AgentToMaster, version: int, reason: str
) -> None:
    agent = start()
    master.hear(RegisterAgent)
    master.say(answer, version=version)
    assert agent.wait() == 1
    last = agent.stderr.splitlines()[-1]
    assert last.startswith("unified-agent: ")
    assert reason in last


def test_it_gives_up_where_nobody_answers_if_asked_to(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIFIED_HEARTBEAT_S", "0.1")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
        agent = start("--connect-timeout", "0.2", master=address)
        assert agent.wait() == 1
    assert f"cannot reach the master at {address}" in agent.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--labels", "zone"], "--labels 'zone' is not KEY=VALUE"),
        (["--resources", "MR=1"], "--resources is not JSON"),
        (["--resources", '{"MR": "x"}'], "must map names to amounts"),
        (["--node-id", "a/b"], "node id 'a/b' is not allowed"),
        (["--master", "nowhere"], "--master 'nowhere' is not an address"),
        (["--log-files", "0"], "--log-files at least 1"),
        (["--state-dir", "/proc/x"], "the state directory /proc/x cannot be used: No such file or directory. Choose"),
        (["--devices", "-1"], "--devices -1 is not a number of devices"),
        (["--cpus", "0"], "--cpus 0 is not a number of CPUs"),
        (["--cpus", "-1"], "--cpus -1 is not a number of CPUs"),
        (["--cpus", "nan"], "--cpus nan is not a number of CPUs"),
        (["--memory-mb", "-5"], "--memory-mb -5 is not an amount of memory"),
    ],
)
def test_bad_flags_are_refused_in_a_line(start: Start, flags: list[str], message: str) -> None:
    agent = start(*flags)
    assert agent.wait() == 1
    assert message in agent.stderr
    assert len(agent.stderr.splitlines()) == 1
