"""A real zygote: it forks, reports, cleans up, and leaves nobody behind."""

import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.deadlines import met
from unified import process
from unified.protocol.agent_zygote import ChildExited, Fork, Forked, ZygoteToAgent, ZygoteUp, zygote_to_agent
from unified.protocol.framing import PROTOCOL_VERSION, StreamBuffer, encode_stream
from unified.testing import SHARED_MEMORY, eventually
from unified.worker.zygote import QUIET_S, SPARE_S

pytestmark = pytest.mark.processes

DEADLINE_S = met(100.0)
ENTRY = """
import os, signal, subprocess, sys, time

PRELOAD = ("no.such.module", "early")
PRELOAD_LATER = ("late",)

def detached(*command):
    # A process without a parent, in a session of its own: of this program, or of another one.
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.setsid()
        if (pid := os.fork()) == 0:
            os.execvp(command[0], command) if command else time.sleep(60)
        os.write(write, str(pid).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return int(os.read(read, 64))

SHARE = r'''
from multiprocessing import get_context, resource_tracker, shared_memory
import os, signal, time
lock, memory = get_context("spawn").Lock(), shared_memory.SharedMemory(create=True, size=4096)
cache = shared_memory.SharedMemory(f"torch_cache-{os.getpid()}", create=True, size=4096)
os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
os.write(1, f"sem.{lock._semlock.name[1:]} {memory.name} {cache.name}\\n".encode())
time.sleep(60)
'''

def main(control):
    order = control.recv(4096).decode()
    if order == "report":
        fds = sorted(fd for fd in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{fd}"))
        handlers = [signal.getsignal(n) == signal.SIG_DFL for n in (signal.SIGTERM, signal.SIGCHLD)]
        print(os.getsid(0) == os.getpid(), fds == [0, 1, 2, control.fileno()], all(handlers))
        print(os.readlink("/proc/self/fd/0"))
        print("on stderr", file=sys.stderr)
    elif order.startswith("exit"):
        sys.exit(int(order.split()[1]))
    elif order == "no threads":
        import threading
        def refuse(thread):
            raise RuntimeError("can't start new thread")
        threading.Thread.start = refuse
        sys.exit(6)
    elif order == "modules":
        print("early" in sys.modules, "late" in sys.modules)
    elif order.startswith("tell "):
        print(eval(order[5:]))
    elif order == "raise":
        raise ValueError("no such thing")
    elif order == "leave children":
        pids = [subprocess.Popen(["sleep", "60"]).pid]
        pids.append(subprocess.Popen(["sleep", "60"], preexec_fn=os.setpgrp).pid)
        pids.append(subprocess.Popen(["sleep", "60"], start_new_session=True).pid)
        pids.append(detached())
        pids.append(detached("env", "-i", "sleep", "60"))
        print(*pids, flush=True)
    elif order == "leave a child":
        print(detached(), flush=True)
        time.sleep(60)
    elif order == "share memory":
        for is_apart in (False, True):
            subprocess.Popen([sys.executable, "-c", SHARE], start_new_session=is_apart)
        time.sleep(60)
    elif order == "wait":
        print("ready", flush=True)
        time.sleep(60)

if __name__ == "__main__":
    import socket
    print("fresh", flush=True)
    main(socket.socket(fileno=int(os.environ["UNIFIED_CONTROL_FD"])))
"""


class Child:
    pid = 0

    def __init__(self, number: int, control: socket.socket, out: int, err: int) -> None:
        self.number = number
        self.control = control
        self.out = out
        self.err = err

    def read(self, descriptor: int) -> str:
        parts = []
        while data := os.read(descriptor, 65536):
            parts.append(data)
        return b"".join(parts).decode()

    def close(self) -> None:
        self.control.close()
        os.close(self.out)
        os.close(self.err)


class ZygoteProcess:
    def __init__(self, folder: Path, *flags: str, early: str = "", late: str = "") -> None:
        (folder / "zygote_entry.py").write_text(ENTRY)
        for module in ("early", "late"):
            (folder / f"{module}.py").write_text(f"open({str(folder / module)!r}, 'w').close()\n")
        for module, text in (("early", early), ("late", late)):
            if text:
                (folder / f"{module}.py").write_text(text)
        self.control, theirs = socket.socketpair()
        self.control.settimeout(DEADLINE_S)
        self._buffer = StreamBuffer()
        self._words: list[ZygoteToAgent] = []
        self.children: list[Child] = []
        command = [sys.executable, "-m", "unified.worker.zygote", str(theirs.fileno())]
        self.process = subprocess.Popen(
            [*command, "--parent", str(os.getpid()), "--entry", "zygote_entry:main", *flags],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": str(folder)},
        )
        theirs.close()

    def next(self) -> ZygoteToAgent:
        while not self._words:
            data = self.control.recv(65536)
            assert data, "the zygote closed its socket"
            self._words += [zygote_to_agent.decode(body) for body in self._buffer.feed(data)]
        return self._words.pop(0)

    def fork(self, order: str = "", *, fresh: bool = False) -> Child:
        ours, theirs = socket.socketpair()
        out, out_write = os.pipe()
        err, err_write = os.pipe()
        child = Child(len(self.children) + 1, ours, out, err)
        self.children.append(child)
        fork = Fork(child=child.number, fresh=fresh)
        socket.send_fds(self.control, [encode_stream(fork)], [theirs.fileno(), out_write, err_write])
        theirs.close()
        os.close(out_write)
        os.close(err_write)
        if order:
            ours.sendall(order.encode())
        word = self.next()
        assert isinstance(word, Forked)
        assert word.child == child.number
        child.pid = word.pid
        return child

    def exited(self, child: Child) -> int:
        word = self.next()
        assert isinstance(word, ChildExited)
        assert word.child == child.number
        return word.code

    def close(self) -> None:
        self.control.close()
        for child in self.children:
            child.close()
        assert self.process.wait(DEADLINE_S) in (0, -signal.SIGKILL)


def gone(pid: int) -> bool:
    return eventually(lambda: not process.is_alive(pid), DEADLINE_S)


Start = Callable[..., ZygoteProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[ZygoteProcess] = []

    def run(**imported: str) -> ZygoteProcess:
        started.append(ZygoteProcess(tmp_path, **imported))
        up = started[0].next()
        assert isinstance(up, ZygoteUp)
        assert (up.pid, up.protocol_version) == (started[0].process.pid, PROTOCOL_VERSION)
        return started[0]

    yield run
    for one in started:
        one.close()


@pytest.fixture
def zygote(start: Start) -> ZygoteProcess:
    return start()


def test_a_child_has_its_own_session_streams_and_nothing_else_open(zygote: ZygoteProcess) -> None:
    zygote.fork("wait")
    child = zygote.fork("report")
    assert child.read(child.out).split() == ["True", "True", "True", "/dev/null"]
    assert child.read(child.err) == "on stderr\n"
    assert zygote.exited(child) == 0


@pytest.mark.parametrize(("order", "code"), [("exit 0", 0), ("exit 7", 7), ("raise", 1)])
def test_an_exit_code_is_reported(zygote: ZygoteProcess, order: str, code: int) -> None:
    child = zygote.fork(order)
    assert zygote.exited(child) == code
    assert ("ValueError: no such thing" in child.read(child.err)) == (order == "raise")


def test_a_signal_is_reported_as_its_negative(zygote: ZygoteProcess) -> None:
    child = zygote.fork("wait")
    os.kill(child.pid, signal.SIGTERM)
    assert zygote.exited(child) == -signal.SIGTERM


@pytest.mark.parametrize("fresh", [False, True])
def test_what_a_worker_leaves_behind_is_killed(zygote: ZygoteProcess, fresh: bool) -> None:
    sibling = zygote.fork("leave a child")
    kept = int(os.read(sibling.out, 64))
    child = zygote.fork("leave children", fresh=fresh)
    assert zygote.exited(child) == 0
    printed = child.read(child.out).split()
    assert printed[:-5] == (["fresh"] if fresh else [])
    assert all(gone(int(pid)) for pid in printed[-5:])
    assert process.is_alive(kept), "an orphan of a worker that lives"
    os.kill(sibling.pid, signal.SIGKILL)
    zygote.exited(sibling)
    assert gone(kept)


def test_shared_memory_of_killed_processes_is_removed_unless_another_process_uses_it(zygote: ZygoteProcess) -> None:
    """Nothing else removes it: the resource tracker of `multiprocessing` is killed with the others."""
    child = zygote.fork("share memory")
    with os.fdopen(os.dup(child.out)) as lines:
        paths = [SHARED_MEMORY / name for _ in range(2) for name in lines.readline().split()]
    assert len(paths) == 6
    assert all(path.exists() for path in paths)
    used, kept = paths[1], {paths[1], paths[2], paths[5]}  # a name that a user has given stays
    try:
        with used.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
            os.kill(child.pid, signal.SIGKILL)
            assert zygote.exited(child) == -signal.SIGKILL
            eventually(lambda: {path for path in paths if path.exists()} == kept, DEADLINE_S)
            zygote.exited(zygote.fork("exit 0"))  # the zygote has done all that it had to do before
            assert {path for path in paths if path.exists()} == kept
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def test_a_worker_that_may_start_no_thread_ends_alone(zygote: ZygoteProcess) -> None:
    sibling = zygote.fork("wait").pid
    child = zygote.fork("no threads")
    assert zygote.exited(child) == 6
    assert process.is_alive(sibling)
    assert child.read(child.err) == ""


@pytest.mark.parametrize("why", ["it is asked to", "its imports started threads"])
def test_a_child_is_a_new_interpreter(start: Start, why: str) -> None:
    is_asked = why == "it is asked to"
    threads = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    zygote = start(early="" if is_asked else threads)
    child = zygote.fork("exit 5", fresh=is_asked)
    assert child.read(child.out) == "fresh\n"
    assert zygote.exited(child) == 5
    assert child.pid != zygote.process.pid


@pytest.mark.smoke
@pytest.mark.parametrize("how", ["end of file", "SIGKILL"])
@pytest.mark.parametrize("fresh", [False, True])
def test_no_worker_outlives_its_zygote(zygote: ZygoteProcess, how: str, fresh: bool) -> None:
    children = [zygote.fork("wait", fresh=fresh) for _ in range(3)]
    for child in children:
        os.read(child.out, 64)
    if how == "end of file":
        zygote.control.close()
    else:
        zygote.process.send_signal(getattr(signal, how))
    zygote.process.wait(DEADLINE_S)
    assert all(gone(child.pid) for child in children)


@pytest.mark.parametrize("is_importing", [False, True])
def test_no_worker_outlives_a_killed_agent(tmp_path: Path, is_importing: bool) -> None:
    """The zygote's parent is killed outright: the kernel and end of file see to the rest, whatever the zygote does."""
    begun, script = tmp_path / "begun", tmp_path / "agent.py"
    late = f"import time\nopen({str(begun)!r}, 'w').close()\ntime.sleep(600)\n" if is_importing else ""
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import test_zygote as t, pathlib, signal\n"
        f"z = t.ZygoteProcess(pathlib.Path({str(tmp_path)!r}), late={late!r}); z.next()\n"
        "print(z.process.pid, *[z.fork('wait').pid for _ in range(3)], flush=True)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        pids = [int(word) for word in agent.stdout.readline().split()]
        assert len(pids) == 4
        assert not is_importing or eventually(begun.exists)
        agent.kill()
        assert all(gone(pid) for pid in pids)


def test_sigterm_changes_nothing_while_the_agent_lives(zygote: ZygoteProcess) -> None:
    """SLURM sends it to every process of a step that ends: workers have the time to save that their agent gives."""
    child = zygote.fork("wait")
    os.read(child.out, 64)
    zygote.process.send_signal(signal.SIGTERM)
    after = zygote.fork("modules")
    assert zygote.exited(after) == 0
    assert process.is_alive(child.pid)


def test_what_nobody_waits_for_is_imported_after_the_first_fork_when_it_is_quiet(start: Start, tmp_path: Path) -> None:
    zygote = start(early="import sys; sys.modules['__main__'].SPARE_S = 600.0")  # it imports nothing without a fork
    time.sleep(QUIET_S + 0.3)
    assert not (tmp_path / "late").exists(), "nobody has asked for anything yet"
    first = zygote.fork("modules")
    assert zygote.exited(first) == 0
    assert first.read(first.out).split() == ["True", "False"]
    assert eventually(lambda: (tmp_path / "late").exists())
    second = zygote.fork("modules")
    assert second.read(second.out).split() == ["True", "True"]
    assert zygote.exited(second) == 0


@pytest.mark.parametrize(
    ("said", "modules"), [("all", "True True"), ("torch", "False False"), ("none", "False False"), ("", "True False")]
)
def test_a_job_s_own_cluster_says_what_is_imported_before_the_first_fork(
    start: Start, monkeypatch: pytest.MonkeyPatch, said: str, modules: str
) -> None:
    monkeypatch.setenv("UNIFIED_PRELOAD", said)
    zygote = start()
    child = zygote.fork("modules")
    assert child.read(child.out).strip() == modules
    assert zygote.exited(child) == 0


@pytest.mark.slow
def test_a_zygote_without_a_job_imports_it_too_after_a_while(zygote: ZygoteProcess, tmp_path: Path) -> None:
    """A node in reserve that takes over from a lost one then starts its first rank as quickly as any other."""
    time.sleep(SPARE_S / 2)
    assert not (tmp_path / "late").exists()
    assert eventually(lambda: (tmp_path / "late").exists())
    first = zygote.fork("modules")
    assert zygote.exited(first) == 0
    assert first.read(first.out).split() == ["True", "True"]


def test_an_import_that_nobody_waits_for_does_not_hold_up_the_news_of_a_death(start: Start, tmp_path: Path) -> None:
    """Where many processes share a core an import took five seconds, and callers of the dead knew of nothing."""
    begun, may_end = tmp_path / "late", tmp_path / "may end"
    late = (
        f"import os, time\nopen({str(begun)!r}, 'w').close()\n"
        f"while not os.path.exists({str(may_end)!r}): time.sleep(0.01)\n"
    )
    zygote = start(late=late)
    try:
        children = [zygote.fork("wait") for _ in range(5)]
        assert eventually(begun.exists)
        for child in children:
            os.kill(child.pid, signal.SIGKILL)
        ended = [zygote.next() for _ in children]
        assert {word.child: word.code for word in ended if isinstance(word, ChildExited)} == {
            child.number: -signal.SIGKILL for child in children
        }
    finally:
        may_end.touch()
    after = zygote.fork("modules")
    assert after.read(after.out).split() == ["True", "True"], "the import went on, and ended"
    assert zygote.exited(after) == 0


def test_an_import_hears_how_the_programs_ended_that_it_started(start: Start, tmp_path: Path) -> None:
    said = tmp_path / "said"
    late = (
        "import subprocess\n"
        "codes = [subprocess.run(['sh', '-c', f'sleep 0.05; exit {n}']).returncode for n in (3, 0, 7)]\n"
        f"open({str(said)!r}, 'w').write(str(codes))\n"
    )
    zygote = start(late=late)
    child = zygote.fork("exit 0")
    assert zygote.exited(child) == 0
    assert eventually(lambda: said.exists() and said.read_text() != "")
    assert said.read_text() == "[3, 0, 7]"


SCAN = """
import gc, multiprocessing.process, os, random, sys
from operator import attrgetter
from unified.worker.fork_setup import LIBRARY_GENERATORS
from unified.worker.fork_setup import preload_later, import_if_there, preload

preload("unified.worker.main")
for name in preload_later("unified.worker.main"):
    import_if_there(name)
import numpy, torch

known = [random._inst, numpy.random.mtrand._rand, torch.default_generator]
for module, names in LIBRARY_GENERATORS.items():
    known += [attrgetter(name)(sys.modules[module]) for name in names if module in sys.modules]
kinds = (random.Random, numpy.random.RandomState, numpy.random.Generator, torch.Generator)
for found in gc.get_objects():
    if issubclass(type(found), kinds) and type(found) is not random.SystemRandom:
        if not any(found is each for each in known):
            print("a generator that no fork seeds:", type(found), [type(each) for each in gc.get_referrers(found)])
for name, module in list(sys.modules.items()):
    is_aware = name in ("__main__", "unified.threads")  # the latter asks anew in each fork
    for attribute, value in list(vars(module).items()) if not is_aware else ():
        text = str(value) if type(value) in (int, str) and not attribute.startswith("__") else ""
        if str(os.getpid()) in text and len(text) <= 200:  # the texts of mpmath have most numbers of four digits
            if (name, attribute) != ("unified.threads", "_own_pid"):  # which a hook renews in every fork
                print("the zygote's pid:", name, attribute)
"""


@pytest.mark.slow
def test_what_a_zygote_imports_brings_no_generator_that_a_fork_would_not_seed() -> None:
    pytest.importorskip("torch")
    found = scan()
    if found:  # with another pid, as the digits of one may stand in some library's text by chance
        found &= scan()
    assert found == set()


def scan() -> set[str]:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCAN], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines())


def test_many_forks_leave_neither_children_nor_descriptors(zygote: ZygoteProcess) -> None:
    before = os.listdir(f"/proc/{zygote.process.pid}/fd")
    for fresh in [False] * 30 + [True]:
        child = zygote.fork("exit 0", fresh=fresh)
        assert zygote.exited(child) == 0
    assert not process_children(zygote.process.pid)
    # It says that a child has ended before it looks for what that one left, for which it opens files.
    assert eventually(lambda: os.listdir(f"/proc/{zygote.process.pid}/fd") == before)


def process_children(pid: int) -> list[int]:
    return [found.pid for found in process.every_process() if found.parent == pid]


def run_alone(*flags: str) -> subprocess.CompletedProcess[str]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-m", "unified.worker.zygote", str(theirs.fileno()), *flags]
        return subprocess.run(command, pass_fds=[theirs.fileno()], capture_output=True, text=True, check=False)


def test_a_zygote_without_its_agent_does_not_start() -> None:
    """An agent that died while its zygote's interpreter was still starting."""
    assert run_alone("--parent", "1").returncode == -signal.SIGTERM


def test_an_entry_that_cannot_be_imported_is_said_on_stderr() -> None:
    done = run_alone("--entry", "no_such:main")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'no_such'"
