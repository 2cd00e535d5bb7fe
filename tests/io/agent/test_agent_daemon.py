"""A real agent process, with its zygote and workers, against a master that the test plays."""

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.agents import ROOT, STORE, AgentProcess, PlayedMaster, a_job, a_worker, eventually, read_log
from tests.support.deadlines import missed
from unified import process
from unified.protocol.agent_master import (
    AgentHeartbeat,
    AgentLeaving,
    AgentRefused,
    AgentRegistered,
    AgentToMaster,
    DesiredJob,
    DesiredWorker,
    DirectoryChanged,
    HeartbeatSeen,
    ObservedWorker,
    ObservedWorkers,
    RegisterAgain,
    RegisterAgent,
)
from unified.protocol.client_master import Refused
from unified.protocol.framing import PROTOCOL_VERSION
from unified.protocol.records import DirectoryEntry, Reachability, WorkerState

pytestmark = pytest.mark.processes


@pytest.fixture
def master() -> Iterator[PlayedMaster]:
    one = PlayedMaster()
    yield one
    one.hang_up()


Start = Callable[..., AgentProcess]
Begin = Callable[..., AgentProcess]


@pytest.fixture
def start(tmp_path: Path, master: PlayedMaster, agents: list[AgentProcess]) -> Start:
    def run(*flags: str, **options: Any) -> AgentProcess:
        agents.append(AgentProcess(tmp_path, options.pop("master", master.address), *flags, **options))
        return agents[-1]

    return run


@pytest.fixture
def begin(start: Start, master: PlayedMaster) -> Begin:
    """Starts an agent which is to have a worker, or these, of a job."""

    def run(job: DesiredJob, *workers: DesiredWorker, flags: Sequence[str] = ()) -> AgentProcess:
        agent = start(*flags)
        master.welcome()
        master.desire(*(workers or [a_worker()]), jobs=[job])
        return agent

    return run


def both_are(state: WorkerState) -> Callable[[dict[str, ObservedWorker]], bool]:
    return lambda incarnations: [incarnation.state for incarnation in incarnations.values()] == [state] * 2


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


@pytest.mark.smoke
def test_a_worker_lives_from_start_to_stop(begin: Begin, master: PlayedMaster) -> None:
    job = a_job("finish")
    agent = begin(job, a_worker(is_told_to_run=False), STORE)
    both = master.observe(both_are(WorkerState.READY))
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
    eventually(lambda: b"news w-1=dead" in read_log(master, "out").data)
    master.desire(jobs=[])
    ended = master.observe(both_are(WorkerState.EXITED))
    assert ended["w-0#0"].failure is None
    assert not process.is_alive(ready.pid)
    master.desire(jobs=[])
    assert master.hear(ObservedWorkers, lambda message: message.generation == 4).workers == []
    assert agent.process.poll() is None


@pytest.mark.parametrize(
    ("mode", "summary", "category", "traceback"),
    [
        ("exit:3", "exited with code 3; its last output: this is the end", "crash", "this is the end"),
        ("kill", "killed by SIGKILL, which its agent did not send; the kernel counted no out", "crash", ""),
        ("fail", "ValueError: no", "user", ""),
    ],
)
def test_how_an_incarnation_ended_is_told(
    begin: Begin, master: PlayedMaster, mode: str, summary: str, category: str, traceback: str
) -> None:
    begin(a_job(mode))
    failure = master.failure()
    assert failure.summary.startswith(summary)
    assert (failure.category, failure.traceback) == (category, traceback)
    assert failure.evidence is not None
    assert failure.evidence.peak_mb > 1


def test_a_worker_that_ends_itself_with_code_0_ended_well(begin: Begin, master: PlayedMaster) -> None:
    begin(a_job("exit:0"))
    assert master.reaches("w-0#0", WorkerState.EXITED).failure is None


def test_the_next_incarnation_starts_when_the_last_is_gone(begin: Begin, master: PlayedMaster) -> None:
    job = a_job("stubborn", grace_s=missed(0.3))
    begin(job)
    old = master.reaches("w-0#0", WorkerState.RUNNING)
    master.desire(a_worker(incarnation=1), jobs=[job])
    workers = master.observe(lambda workers: "w-0#1" in workers)
    assert workers["w-0#0"].state is WorkerState.EXITED
    assert not process.is_alive(old.pid)
    master.reaches("w-0#1", WorkerState.RUNNING)


def test_force_shortens_a_stop_that_has_begun(begin: Begin, master: PlayedMaster) -> None:
    job = a_job("stubborn", grace_s=100)
    begin(job)
    master.reaches("w-0#0", WorkerState.RUNNING)
    master.desire(jobs=[job])
    master.reaches("w-0#0", WorkerState.STOPPING)
    master.desire(jobs=[msgspec.structs.replace(job, stop_grace_s=0.0)])
    assert master.reaches("w-0#0", WorkerState.EXITED).failure is None


def test_spawned_workers_and_their_children_are_ended_too(begin: Begin, master: PlayedMaster) -> None:
    agent = begin(a_job("children", start_method="spawn"))
    worker = master.reaches("w-0#0", WorkerState.FINISHED)
    command = Path(f"/proc/{worker.pid}/cmdline").read_bytes().split(b"\0")
    assert command[1:3] == [b"-m", b"agent_entry"]
    eventually(lambda: len(agent.descendants()) == 4)  # the zygote, which it does without, may come later
    master.desire(jobs=[])
    master.reaches("w-0#0", WorkerState.EXITED)
    eventually(lambda: len(agent.descendants()) == 1)


def an_interpreter(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return str(folder / name)


def test_another_interpreter_has_a_zygote_while_its_job_lives(
    begin: Begin, master: PlayedMaster, tmp_path: Path
) -> None:
    python = an_interpreter(tmp_path, "python-other", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    agent = begin(a_job("finish", python=python))
    master.reaches("w-0#0", WorkerState.FINISHED)
    assert len(agent.descendants()) == 3
    master.desire(jobs=[])
    eventually(lambda: len(agent.descendants()) == 1)


def test_an_interpreter_with_another_protocol_is_a_failure_of_setup_each_time(
    start: Start, master: PlayedMaster, tmp_path: Path
) -> None:
    python = an_interpreter(tmp_path, "python-old", OLD_PYTHON)
    agent = start()
    master.welcome()
    for incarnation in range(2):
        master.desire(a_worker(incarnation=incarnation), jobs=[a_job("finish", python=python)])
        failure = master.failure(f"w-0#{incarnation}")
        assert failure.category == "setup"
        assert f"protocol version 99, the agent {PROTOCOL_VERSION}; install the same release." in failure.summary
    eventually(lambda: len(agent.descendants()) == 1, message="its zygote is not sent away")


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
    begin: Begin, master: PlayedMaster, tmp_path: Path, script: str | None, summary: str
) -> None:
    python = str(tmp_path / "python-bad")
    if script == "\0":
        python += script
    elif script is not None:
        an_interpreter(tmp_path, "python-bad", script)
    begin(a_job("finish", python=python))
    failure = master.failure()
    assert failure.category == "setup"
    assert re.search(summary, failure.summary)


def test_a_worker_that_says_nothing_is_killed(
    begin: Begin, master: PlayedMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIFIED_START_S", "0.5")
    begin(a_job("silent"))
    assert master.failure().summary == "did not answer within 0.5 s of its start"


def test_much_output_is_rotated_and_read_by_absolute_offset(begin: Begin, master: PlayedMaster, tmp_path: Path) -> None:
    begin(a_job("print:2048"), flags=["--log-max-mb", "0.25", "--log-files", "3"])
    master.reaches("w-0#0", WorkerState.FINISHED)
    eventually(lambda: read_log(master, "out", -1).size == 2048 * 1024)

    first = read_log(master, "out", 0)
    assert first.offset == 2048 * 1024 - 3 * 262144
    assert first.next_offset == first.offset + len(first.data) == first.offset + 65536
    folder = tmp_path / "state/logs/job-1/w-0"
    assert sum(file.stat().st_size for file in folder.glob("0.out*")) < 3 * 262144 + 100
    assert "is no worker" in read_log(master, "out", worker="../w-0").error


@pytest.mark.smoke
def test_a_killed_agent_leaves_nothing(begin: Begin, start: Start, master: PlayedMaster) -> None:
    agent = begin(a_job("children"), a_worker(0), a_worker(1))
    master.observe(both_are(WorkerState.FINISHED))
    assert len(agent.descendants()) == 7
    agent.process.kill()
    eventually(lambda: not agent.descendants())
    agent.wait()
    again = start()
    master.welcome()
    assert "an agent of node n1 (pid" in again.stderr
    assert len(list(again.run_root.glob("a-*"))) == 1


def test_a_killed_zygote_takes_its_workers_and_is_replaced(begin: Begin, master: PlayedMaster) -> None:
    job = a_job("stubborn", grace_s=missed(0.2))
    agent = begin(job, a_worker(0), a_worker(1))
    workers = master.observe(both_are(WorkerState.RUNNING))
    (zygote,) = {found.parent for pid in workers.values() if (found := process.facts(pid.pid)) is not None}
    assert zygote in agent.descendants()
    os.kill(zygote, signal.SIGKILL)
    workers = master.observe(both_are(WorkerState.EXITED))
    assert {worker.failure.summary for worker in workers.values() if worker.failure} == {
        "killed by SIGKILL: the zygote that it was forked from was killed by SIGKILL"
    }
    (cause,) = {worker.failure.cause for worker in workers.values() if worker.failure}
    assert cause.startswith(f"zygote {zygote} of "), "their ends are one failure"
    master.desire(a_worker(0, incarnation=1), jobs=[job])
    master.reaches("w-0#1", WorkerState.RUNNING)


def test_a_zygote_that_hangs_is_replaced_and_its_workers_live_on(
    begin: Begin, master: PlayedMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIFIED_FORK_S", "3")
    job = a_job("finish")
    agent = begin(job, a_worker(0), a_worker(1))
    workers = master.observe(both_are(WorkerState.FINISHED))
    zygote = parent_of(workers["w-0#0"].pid)
    os.kill(zygote, signal.SIGSTOP)
    master.desire(a_worker(0), a_worker(1), a_worker(2), jobs=[job])
    why = f"could not be started: its zygote (pid {zygote}) hangs: it has said nothing for 3 s"
    assert master.failure("w-2#0").summary == why
    master.desire(a_worker(0), a_worker(1), a_worker(2, incarnation=1), jobs=[job])
    assert parent_of(master.reaches("w-2#1", WorkerState.FINISHED).pid) != zygote
    assert {parent_of(worker.pid) for worker in workers.values()} == {zygote}
    os.kill(workers["w-0#0"].pid, signal.SIGKILL)
    assert master.failure("w-0#0").summary.startswith("killed by SIGKILL, which its agent did not send")
    assert process.is_alive(zygote)
    master.desire(a_worker(2, incarnation=1), jobs=[job])
    assert master.reaches("w-1#0", WorkerState.EXITED).failure is None
    eventually(lambda: zygote not in agent.descendants(), message="it outlived its last worker")


def test_an_end_that_a_hanging_zygote_does_not_tell_is_seen(
    begin: Begin, master: PlayedMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIFIED_FORK_S", "3")
    begin(a_job("finish"), a_worker())
    worker = master.reaches("w-0#0", WorkerState.FINISHED)
    os.kill(parent_of(worker.pid), signal.SIGSTOP)
    os.kill(worker.pid, signal.SIGKILL)
    assert master.failure().summary.startswith("killed by SIGKILL, which its agent did not send")


def parent_of(pid: int) -> int:
    found = process.facts(pid)
    assert found is not None
    return found.parent


def test_what_workers_of_a_killed_zygote_left_is_ended(begin: Begin, master: PlayedMaster) -> None:
    job = a_job("children")
    agent = begin(job, a_worker(0), a_worker(1))
    workers = master.observe(both_are(WorkerState.FINISHED))
    inboxes = [agent.inbox_file(worker) for worker in workers.values()]
    assert all(inbox.exists() for inbox in inboxes)
    found = process.facts(workers["w-0#0"].pid)
    assert found is not None
    os.kill(found.parent, signal.SIGKILL)
    master.observe(both_are(WorkerState.EXITED))
    eventually(lambda: not agent.descendants(), message="children in sessions of their own outlived it")
    assert not any(inbox.exists() for inbox in inboxes)
    master.desire(a_worker(0, incarnation=1), jobs=[job])
    master.reaches("w-0#1", WorkerState.FINISHED)


def test_an_agent_without_descriptors_fails_a_worker_and_lives(begin: Begin, master: PlayedMaster) -> None:
    job = a_job("finish")
    agent = begin(job)
    master.reaches("w-0#0", WorkerState.FINISHED)
    before = agent.allow_no_more_descriptors()
    master.desire(a_worker(), a_worker(1), jobs=[job])
    failure = master.failure("w-1#0")
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


def test_sigterm_stops_workers_and_says_goodbye(begin: Begin, master: PlayedMaster, tmp_path: Path) -> None:
    agent = begin(a_job("finish"))
    worker = master.reaches("w-0#0", WorkerState.FINISHED)
    agent.process.terminate()
    leaving = master.hear(AgentLeaving)
    assert leaving.reason == "SIGTERM"
    assert not process.is_alive(worker.pid)
    assert agent.wait() == 0
    assert not list((tmp_path / "run").rglob("*.lock"))


def test_a_second_sigterm_waits_for_nobody(begin: Begin, master: PlayedMaster) -> None:
    agent = begin(a_job("stubborn", grace_s=100))
    master.reaches("w-0#0", WorkerState.RUNNING)
    agent.process.terminate()
    master.reaches("w-0#0", WorkerState.STOPPING)
    time.sleep(0.6)  # one right behind the first is the first again
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
        master.desire(a_worker(), jobs=[a_job("stubborn", grace_s=100)])
        worker = master.reaches("w-0#0", WorkerState.RUNNING)
        parent.kill()
        assert master.hear(AgentLeaving).reason == "the process that started it is gone"
        eventually(lambda: not process.is_alive(agent) and not process.is_alive(worker.pid))
    assert not list((tmp_path / "run").rglob("*.lock"))


def test_workers_outlive_a_master_and_are_told_to_the_next(begin: Begin, master: PlayedMaster) -> None:
    begin(a_job("finish"))
    pid = master.reaches("w-0#0", WorkerState.FINISHED).pid
    master.hang_up()
    master.listen()
    master.hear(AgentHeartbeat)
    master.say(RegisterAgain())
    master.hear(RegisterAgent)
    master.say(AgentRegistered(lease_s=20.0, heartbeat_s=0.1))
    seen = master.observe(lambda workers: bool(workers))["w-0#0"]
    assert (seen.state, seen.pid) == (WorkerState.FINISHED, pid)
    master.generation = 0  # a master that lost its memory begins anew, and is listened to
    master.desire(jobs=[])
    master.reaches("w-0#0", WorkerState.EXITED)


@pytest.mark.parametrize(
    ("answer", "ahead", "code", "reason"),
    [
        (AgentRefused(reason="node n1 is alive on another host"), 0, 78, "node n1 is alive on another host"),
        (Refused(code="defect", reason="a defect"), 0, 1, "refuses this agent: a defect"),
        (Refused(code="version", reason="speak version 2"), 0, os.EX_CONFIG, "refuses this agent: speak version 2"),
        (HeartbeatSeen(), 1, os.EX_CONFIG, f"version {PROTOCOL_VERSION + 1}, this side speaks {PROTOCOL_VERSION}"),
    ],
)
def test_a_refusal_ends_it_with_one_line(
    start: Start, master: PlayedMaster, answer: AgentToMaster, ahead: int, code: int, reason: str
) -> None:
    agent = start()
    master.hear(RegisterAgent)
    master.say(answer, version=PROTOCOL_VERSION + ahead)
    assert agent.wait() == code
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
        (["--preload", "trl,", "--preload", "x"], "'' is no name of a module to preload"),
    ],
)
def test_bad_flags_are_refused_in_a_line(start: Start, flags: list[str], message: str) -> None:
    agent = start(*flags)
    assert agent.wait() == 2
    assert message in agent.stderr
    assert len(agent.stderr.splitlines()) == 1
