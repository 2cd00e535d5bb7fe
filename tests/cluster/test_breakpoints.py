"""`breakpoint()` in workers of real jobs: they wait, and ``unified attach`` types to their pdb."""

import contextlib
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import Cluster, Project, lines
from tests.support.deadlines import met
from unified.api.builder import DLJobBuilder
from unified.cli.main import main
from unified.client.handle import JobHandle
from unified.protocol.client_master import Explain, Story
from unified.testing import LocalCluster, eventually

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("without_torch")]

PROGRAM = """
import os, threading, time
from pathlib import Path
from unified import current_worker, rpc

HERE = Path(os.environ["HERE"])

def say(text):
    with (HERE / "said").open("a") as file:
        file.write(f"{text}\\n")

class Early:
    # At a breakpoint before its methods are exported.
    def __init__(self):
        secret = 6
        breakpoint()
        say(f"made {secret}")

    def run(self):
        say("ran")

def steps():
    rank = current_worker().actor_info.rank
    for step in range(2):
        secret = 40 + rank + step
        breakpoint()
        say(f"{rank} went on with {secret}")

def polite():
    worker = current_worker()
    worker.should_stop
    breakpoint()
    say(f"asked to stop: {worker.should_stop}")

def rude():
    import pdb
    pdb.set_trace()
    say("went on")

def own():
    import pdb, sys

    class Forked(pdb.Pdb):  # as many projects have it, and torch
        def interaction(self, *args, **named):
            before = sys.stdin
            try:
                with open("/dev/stdin") as sys.stdin:
                    pdb.Pdb.interaction(self, *args, **named)
            finally:
                sys.stdin = before

    secret = 8
    Forked().set_trace()
    say(f"went on with {secret}")
    with (HERE / "typed").open("w") as typed, (HERE / "shown").open("w") as shown:
        typed.write("p secret * 11\\nc\\n")
    with (HERE / "typed").open() as typed, (HERE / "shown").open("w") as shown:
        pdb.Pdb(stdin=typed, stdout=shown).set_trace()
    say("99" in (HERE / "shown").read_text())
    breakpoint()
    say("passed")

def collective():
    import torch.distributed as dist
    rank = dist.get_rank()
    secret = 40 + rank
    dist.breakpoint(rank=1)
    say(f"{rank} went on with {secret}")

def plain():
    say(f"ran, {'UNIFIED_DEBUGPY' in os.environ}")

def waits():
    threading.Event().wait()

class Service:
    @rpc()
    def half(self, number):
        breakpoint()
        return number / 2

def child():
    pid = os.fork()
    if pid == 0:
        breakpoint()
        os._exit(3)
    say(f"child {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}")
"""

OWN_TERMINAL = "import os, sys; os.close(os.open(os.ttyname(0), os.O_RDWR)); os.execv(sys.argv[1], sys.argv[1:])"
"""Its stdin becomes the terminal of its session, from which Ctrl-C comes."""


class Place:
    """A cluster of one node, jobs of `PROGRAM` on it, and ``unified attach``."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder

    def submit(self, entry: str, total: int = 1, **options: object) -> JobHandle:
        builder = DLJobBuilder().node_num(1).device_per_node(2).device_type("CPU")
        builder.global_env({"HERE": str(self.folder)})
        builder.workload("role", f"breaks.{entry}").total(total).resource(cpu=0.1)
        handle = self.cluster.submit(builder.build(), entry.lower(), **options)
        if entry not in ("waits", "Service"):
            eventually(lambda: all(self.waits(handle, rank) for rank in range(total)), timeout=100)
        return handle

    def waits(self, handle: JobHandle, rank: int = 0) -> str:
        """What its status says that it waits for."""
        progress = next(worker.progress for worker in handle.status().workers if worker.rank == rank)
        return progress.waits_for if progress is not None else ""

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "unified", "attach", *words, "--master", self.cluster.address]

    def attach(self, *words: str, typed: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words), input=typed, capture_output=True, text=True, check=False, timeout=100
        )

    def said(self) -> list[str]:
        return lines(self.folder, "said")


@pytest.fixture
def place(local_cluster: Cluster, project: Project, tmp_path: Path) -> Place:
    project(breaks=PROGRAM)
    return Place(local_cluster(nodes=1, devices=2), tmp_path)


def test_each_rank_waits_by_itself_until_somebody_types_to_its_pdb(place: Place) -> None:
    handle = place.submit("steps", 2)
    said = next(number for number, text in enumerate(PROGRAM.splitlines(), 1) if "went on with" in text)
    line = said - (sys.version_info >= (3, 13))  # which has pdb stop at breakpoint() itself
    for rank in range(2):
        attach = f"unified attach {handle.job_id} role-{rank}"
        told = f"worker=role_2-{rank}_1-0 at=breaks.py:{line} waits for: {attach}"
        assert any(told in each for each in handle.logs(rank=rank))
        assert place.waits(handle, rank) == f"`{attach}`, at the breakpoint breaks.py:{line}"
    assert [worker.reason for worker in handle.status().workers] == [
        f"waits for {place.waits(handle, rank)}" for rank in range(2)
    ]
    events = handle.connection.ask(Explain(job="steps", worker="role-1"), Story).events
    assert ("worker-waits", f"waits for {place.waits(handle, 1)}") in [(each.event, each.reason) for each in events]

    looked = place.attach("steps", "role-0", typed="p secret\n")  # the end of what is typed leaves it
    assert looked.returncode == 0
    assert f"breaks.py({line})steps()" in looked.stdout
    assert "(Pdb) 40\n" in looked.stdout
    assert "left role-0 as it is" in looked.stderr
    assert place.said() == []

    quit_ = place.attach("steps", "role-1", typed="p secret\nprint(secret + 1)\nq\n")
    assert (quit_.returncode, quit_.stderr) == (0, "")
    assert "41\n(Pdb) 42\n(Pdb) --off--\n" in quit_.stdout
    eventually(lambda: place.said() == ["1 went on with 41", "1 went on with 42"], timeout=100)

    again = place.attach("steps", "role-0", typed="secret = 7\nn\nc\np secret\n")  # the last is not for this stop
    assert again.returncode == 0
    assert "40\n(Pdb) " in again.stdout, "what was seen before is shown"
    assert again.stdout.endswith("--running--\n")
    eventually(lambda: place.said()[2:] == ["0 went on with 7"], timeout=100)
    eventually(lambda: place.attach("steps", "role-0", typed="c\n").returncode == 0, timeout=100)
    assert handle.wait(100) == 0
    assert place.said()[3:] == ["0 went on with 41"]


def test_a_debugger_that_the_program_makes_itself_waits_too_unless_it_has_streams_of_its_own(place: Place) -> None:
    handle = place.submit("own")
    assert "(Pdb) 8\n" in place.attach("own", "role-0", typed="p secret\nsecret = 9\nc\n").stdout
    eventually(lambda: place.said() == ["went on with 9", "True"] and place.waits(handle), timeout=100)
    assert place.attach("own", "role-0", typed="q\n").returncode == 0
    assert handle.wait(100) == 0
    assert place.said()[2:] == ["passed"]


def test_torch_s_breakpoint_of_one_rank_waits_and_the_other_waits_for_it(place: Place) -> None:
    builder = DLJobBuilder().node_num(1).device_per_node(2).device_type("CPU").skip_node_check()
    builder.global_env({"HERE": str(place.folder)})
    builder.train("breaks.collective").total(2).per_group(2).max_restart(0)
    handle = place.cluster.submit(builder.build(), "collective")
    eventually(lambda: place.waits(handle, 1) or handle.status().stage == "STOPPED", timeout=100)
    line = next(number for number, text in enumerate(PROGRAM.splitlines(), 1) if "dist.breakpoint" in text)
    assert place.waits(handle, 1).endswith(f"at the breakpoint breaks.py:{line}")
    assert place.waits(handle, 0) == ""
    role = place.waits(handle, 1).partition("-1`")[0].rpartition(" ")[2]
    seen = place.attach("collective", f"{role}-1", typed="u\np secret\nc\n")
    assert "(Pdb) 41\n" in seen.stdout, seen
    assert handle.wait(100) == 0
    assert sorted(place.said()) == ["0 went on with 40", "1 went on with 41"]


def test_whoever_waits_at_no_breakpoint_is_an_error(place: Place) -> None:
    handle = place.submit("waits")
    eventually(lambda: handle.status().stage == "RUNNING", timeout=100)
    for words, message in (
        (["waits", "role-0"], "role-0 waits at no breakpoint. `unified status waits` shows who does."),
        (["waits", "rule-0"], "has no worker 'rule-0'. Did you mean 'role'?"),
        (["waits", "role-1"], "has no worker 'role-1'. Role role has ranks 0 to 0."),
        (["weights", "role-0"], "there is no job 'weights'"),
    ):
        done = place.attach(*words, typed="c\n")
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr
    handle.stop()
    assert handle.wait(100) == 130
    assert "has ended" in place.attach("waits", "role-0").stderr


def test_a_stop_ends_the_wait_at_once(place: Place) -> None:
    for entry, said in (("rude", []), ("polite", ["asked to stop: True"])):
        handle = place.submit(entry, stop_grace_s=150)
        handle.stop()
        assert handle.wait(100) == 130
        assert place.said() == said


def test_a_worker_that_is_killed_at_a_breakpoint_waits_in_its_next_incarnation(place: Place) -> None:
    handle = place.submit("rude", stop_grace_s=1)
    pipe = subprocess.PIPE
    with subprocess.Popen(place.command("rude", "role-0"), stdin=pipe, stdout=pipe, stderr=pipe) as attached:
        assert attached.stdin is not None
        assert attached.stdout is not None
        while not attached.stdout.readline().startswith(b"-> "):
            pass
        handle.restart("role-0", timeout=100)
        eventually(lambda: place.waits(handle), timeout=100)
        attached.stdin.write(b"c\n")
        attached.stdin.close()
        assert attached.wait(100) == 1
        assert attached.stderr is not None
        assert re.search(b"restarted on request|was restarted since", attached.stderr.read())
    assert place.attach("rude", "role-0", typed="c\n").returncode == 0
    assert handle.wait(100) == 0
    assert place.said() == ["went on"]


def test_breakpoints_before_the_exports_in_a_handler_and_in_a_child(place: Place) -> None:
    early = place.submit("Early")
    assert "(Pdb) 6\n" in place.attach("early", "role-0", typed="p secret\nc\n").stdout
    assert early.wait(100) == 0
    assert place.said() == ["made 6", "ran"]

    service = place.submit("Service")
    answer = service.call("role-0", "half", 8, _timeout=120)
    eventually(lambda: place.waits(service), timeout=100)
    assert "(Pdb) 8\n" in place.attach("service", "role-0", typed="p number\nc\n").stdout
    assert answer.result(100) == 4
    service.stop()

    builder = DLJobBuilder().node_num(1).device_per_node(1).device_type("CPU").global_env({"HERE": str(place.folder)})
    builder.workload("role", "breaks.child").resource(cpu=0.1)
    child = place.cluster.submit(builder.build(), "child")
    assert child.wait(100) == 0
    assert place.said()[2:] == ["child 3"]
    assert any("a child of the worker passes over its breakpoint()" in line for line in child.logs())


def test_ctrl_c_and_ctrl_d_in_the_terminal_of_attach_leave_the_worker_as_it_is(place: Place) -> None:
    handle = place.submit("rude")
    for keys in (b"\x03", b"\x04"):
        master, terminal = pty.openpty()
        own = [sys.executable, "-c", OWN_TERMINAL, *place.command("rude", "role-0")]
        attached = subprocess.Popen(own, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True)
        os.close(terminal)
        seen = read_until(master, b"(Pdb) ")
        assert b"rude()" in seen
        os.write(master, b"p 6 * 7\n")
        seen = read_until(master, b"42\r\n")  # typed before the prompt was ready, the line is echoed twice
        read_until(master, b"(Pdb) ", seen=seen.partition(b"42\r\n")[2])
        # Python loses a Ctrl-C between the prompt and its wait for input: one presses it again
        left = read_until(master, b"comes back", press=keys)
        assert b"unified: left role-0 as it is" in left
        assert attached.wait(100) == 0
        os.close(master)
        assert place.waits(handle)
    assert place.attach("rude", "role-0", typed="c\n").returncode == 0
    assert handle.wait(100) == 0


def read_until(terminal: int, mark: bytes, press: bytes = b"", seen: bytes = b"") -> bytes:
    """Press keys, again after each second without output, until the mark has come; `seen` was read before."""
    deadline = time.monotonic() + met(100.0)
    os.write(terminal, press)
    while mark not in seen:
        assert time.monotonic() < deadline, seen
        if select.select([terminal], [], [], 1.0)[0]:
            seen += os.read(terminal, 65536)
        else:
            os.write(terminal, press)
    return seen


@pytest.mark.slow
def test_ctrl_c_of_unified_run_reaches_a_program_at_its_breakpoint(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("breakpoint()\nprint('not here')\n")
    command = [sys.executable, "-m", "unified", "run", "--master", "local", "script.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stderr is not None
        assert run.stdout is not None
        while "waits for: unified attach script-" not in run.stderr.readline():
            assert run.poll() is None
        run.send_signal(signal.SIGINT)
        assert run.stdout.read() == ""
        assert "unified: interrupted" in run.stderr.read()
        assert run.wait(100) == 130


def test_a_debugger_of_the_user_s_own_choice_is_left_alone(place: Place) -> None:
    builder = DLJobBuilder().node_num(1).device_per_node(1).device_type("CPU")
    builder.global_env({"HERE": str(place.folder), "PYTHONBREAKPOINT": "0"})
    builder.workload("role", "breaks.steps").resource(cpu=0.1)
    assert place.cluster.submit(builder.build(), "chosen").wait(100) == 0
    assert place.said() == ["0 went on with 40", "0 went on with 41"]


@pytest.mark.slow
def test_each_worker_waits_for_a_client_of_debugpy(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("debugpy")
    first = free_port_of_two()
    monkeypatch.setenv("UNIFIED_DEBUGPY", str(first))
    handle = place.submit("plain", 2)
    assert f"a client of debugpy at 127.0.0.1:{first} (" in place.waits(handle, 0)
    assert any(f"waits for: a client of debugpy at 127.0.0.1:{first + 1} (ssh -L" in line for line in handle.logs())
    assert place.said() == []
    clients = [attach_as_an_editor(first + rank) for rank in range(2)]
    assert handle.wait(100) == 0
    assert place.said() == ["ran, False"] * 2
    for client in clients:
        client.close()

    stopped = place.submit("plain", stop_grace_s=150)
    stopped.stop()
    assert stopped.wait(100) == 130
    eventually(lambda: not adapters(first), timeout=100)


def test_debugpy_that_is_missing_and_a_port_that_there_is_not(
    place: Place, project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UNIFIED_DEBUGPY", "")  # which the command sets for its own process
    project(debugpy="raise ImportError('none here')")
    file = place.folder / "project/job.py"
    file.write_text(
        "from unified import DLJobBuilder\n"
        "job = DLJobBuilder().device_type('CPU').workload('role', 'breaks.plain').resource(cpu=0.1).build()\n"
    )
    for port, message in (
        ("5678", "has none: pip install 'unified-runtime[debug]' there."),
        ("65536", "UNIFIED_DEBUGPY=65536 leaves no port to role_1-0_1-0: give a lower number."),
    ):
        assert main(["submit", str(file), "--debugpy", port, "--master", place.cluster.address]) == 1
        assert message in capsys.readouterr().err
    assert place.said() == []


def free_port_of_two() -> int:
    """A port that is free, as is the next one."""
    while True:
        with socket.socket() as one, socket.socket() as two, contextlib.suppress(OSError, OverflowError):
            one.bind(("127.0.0.1", 0))
            two.bind(("127.0.0.1", one.getsockname()[1] + 1))
            return int(one.getsockname()[1])


def attach_as_an_editor(port: int) -> socket.socket:
    """Do what an editor does that has no breakpoints."""
    connection = socket.create_connection(("127.0.0.1", port), 60)
    for number, command in enumerate(("initialize", "attach", "configurationDone"), 1):
        request = {"seq": number, "type": "request", "command": command, "arguments": {"adapterID": "python"}}
        body = json.dumps(request).encode()
        connection.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        seen = b""
        while {"attach": b'"initialized"'}.get(command, b'"response"') not in seen:
            seen += connection.recv(65536)
    return connection


def adapters(port: int) -> list[int]:
    """Processes of debugpy for this port."""
    found = (process.info for process in psutil.process_iter(["pid", "cmdline"]))
    return [each["pid"] for each in found if str(port) in (each["cmdline"] or []) and "--for-server" in each["cmdline"]]
